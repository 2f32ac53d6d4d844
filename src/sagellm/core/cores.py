"""How many cores this process may use: a machine shows more CPUs than cores, a container gets fewer."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path("/")


def usable_cores(root: Path = ROOT) -> int:
    """Physical cores that this process may run on, at most what its control groups pay for; at least 1.

    A quota of 1.5 CPUs is one core: with two threads it is used up before its period ends, and then all
    threads stand still, those of the server too. `root` holds the system's `sys` and `proc`.
    """
    return max(1, math.floor(min(num_physical(_allowed(), root), cpu_quota(root))))


def num_physical(cpus: Collection[int], root: Path = ROOT) -> int:
    """Cores that `cpus` belong to. A core's hyperthreads share what computes and what reads memory, so they
    count once; where the system does not tell (not Linux), each CPU counts.
    """
    return len({_siblings(cpu, root) for cpu in cpus})


def cpu_quota(root: Path = ROOT) -> float:
    """CPUs whose time the control groups (v2, v1) of this process, and those above them, give; infinity where
    none has a limit.
    """
    return min((quota for group in _control_groups(root) for quota in _quota_of(group)), default=math.inf)


def _allowed() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _siblings(cpu: int, root: Path) -> str:
    """The same text for all CPUs of a core."""
    return _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _control_groups(root: Path) -> Iterator[Path]:
    """Folders that may limit this process, from the outermost on. A container often sees its own group as the
    outermost, whatever path it is told: what is not there limits nothing.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        yield folder
        for part in path.strip("/").split("/"):
            folder /= part
            yield folder


def _quota_of(group: Path) -> Iterator[float]:
    words = _read(group / "cpu.max").split()
    words = words or [_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")]
    if all(word.isdigit() for word in words):
        quota_us, period_us = map(int, words)
        yield quota_us / period_us


def _read(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""
