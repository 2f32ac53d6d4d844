"""What this process takes of the machine, and others meanwhile. None where the system does not say."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

STATUS, STAT = Path("/proc/self/status"), Path("/proc/stat")
_IDLE = (3, 4)
"""Idle and waiting for a disk, among the kernel's counters."""


def resident_bytes() -> int | None:
    """Resident memory now, shared pages included."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most that was ever resident."""
    found = _status_bytes("VmHWM")
    if found is not None:
        return found
    import resource  # there is none on Windows

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
    """CPU seconds since the machine started: of all cores, of all processes, of this one and of those that it
    has started and waited for."""

    total_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> CpuTimes | None:
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
    """The share of the machine that other processes used in between, 0 to 1."""
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    busy_s, own_s = after.busy_s - before.busy_s, after.own_s - before.own_s
    return min(1.0, max(0.0, (busy_s - own_s) / (after.total_s - before.total_s)))
