"""Child processes of benchmarks, and what this process uses of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.core.errors import SageError
from sagellm.core.processes import child_environment

STATUS, STAT = Path("/proc/self/status"), Path("/proc/stat")
_IDLE = (3, 4)
"""Idle time and time waiting for a disk, among the counters in /proc/stat."""


def run_module(module: str, given: Any, what: str, error: type[SageError] = SageError) -> Any:
    """Runs `python -m module` with `given` as JSON on stdin. Returns its stdout, read as JSON. Raises
    `error` with `what` and the last line of stderr if the process fails."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
        env=child_environment(),
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise error(f"{what} failed: {' '.join(last) or f'exit status {done.returncode}'}")
    return json.loads(done.stdout)


def resident_bytes() -> int | None:
    """Returns resident memory now, shared pages included; None if the system does not tell."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Returns the largest resident memory so far."""
    found = _status_bytes("VmHWM")
    if found is not None:
        return found
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status_bytes(name: str) -> int | None:
    if not STATUS.exists():
        return None
    lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    found = [line.split() for line in lines if line.startswith(name + ":")]
    return int(found[0][1]) * 1024 if found else None


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds since the machine started. `total_s` is of all cores, `busy_s` of all processes, `own_s`
    of this process and of the finished processes that it started."""

    total_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> CpuTimes | None:
        """Returns None if the system does not tell."""
        if not STAT.exists():
            return None
        first = STAT.read_text(encoding="ascii").split("\n", 1)[0]
        ticks = [int(count) for count in first.split()[1:9]]
        per_second = os.sysconf("SC_CLK_TCK")
        total = sum(ticks)
        busy = total - sum(ticks[i] for i in _IDLE)
        own = os.times()
        return cls(total / per_second, busy / per_second, sum(own[:4]))


def others_share(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """Returns the share of the machine, 0 to 1, that other processes used."""
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    busy_s, own_s = after.busy_s - before.busy_s, after.own_s - before.own_s
    return min(1.0, max(0.0, (busy_s - own_s) / (after.total_s - before.total_s)))
