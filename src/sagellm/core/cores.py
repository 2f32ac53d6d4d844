"""Counts the cores that this process may use. A machine shows more CPUs than it has cores, and a container
gets fewer."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
# Lines of proc(5). Only a line feed ends one: a group's name may hold the others that `splitlines` ends at.
_MEMBERSHIP = re.compile(r"^\d+:([^:\n]*):(/.*)$", re.MULTILINE)  # controllers, group
# The group that it shows as its top, folder, type.
_MOUNT = re.compile(r"^\d+ \d+ \d+:\d+ ([^ \n]+) ([^ \n]+) .* - (cgroup2?) ", re.MULTILINE)


def usable_cores(root: Path = ROOT) -> int:
    """Physical cores that this process may run on; at least 1.

    Control groups limit the number. A quota of 1.5 CPUs is one core: two threads use it up before its period
    ends, and then all threads stop, those of the server too. `root` holds the system's `sys` and `proc`."""
    return max(1, math.floor(min(num_physical(_allowed(), root), cpu_quota(root))))


def num_physical(cpus: Collection[int], root: Path = ROOT) -> int:
    """Cores that `cpus` belong to. The hyperthreads of a core share its arithmetic and memory units, so they
    count once. Where the system does not say which belong together (not Linux), each CPU counts."""
    topology = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in cpus)
    return len({_read(file) or file for file in topology})


def cpu_quota(root: Path = ROOT) -> float:
    """CPUs that the control groups (v2, v1) of this process and their parents allow. Infinity without a
    limit."""
    return min((quota for group in _control_groups(root) for quota in _quota_of(group)), default=math.inf)


def _allowed() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _control_groups(root: Path) -> Iterator[Path]:
    """Folders that may limit this process, from the outermost on. A container often sees its own group as the
    outermost, whatever its path says; folders that do not exist limit nothing."""
    groups = {}  # of this process, by the type of the file systems that show them
    for controllers, group in _MEMBERSHIP.findall(_read(root / "proc/self/cgroup")):
        if not controllers or "cpu" in controllers.split(","):
            groups["cgroup" if controllers else "cgroup2"] = PurePosixPath(group)
    for top, mount, kind in _MOUNT.findall(_read(root / "proc/self/mountinfo")):
        if kind in groups:
            folder, group, shown = root / _unescaped(mount).lstrip("/"), groups[kind], _unescaped(top)
            yield folder
            for part in group.relative_to(shown if group.is_relative_to(shown) else "/").parts:
                folder /= part
                yield folder


def _unescaped(text: str) -> str:
    r"""As in mountinfo: `\040` is a space, `\134` a backslash."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), text)


def _quota_of(group: Path) -> Iterator[float]:
    words = _read(group / "cpu.max").split()
    words = words or [_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")]
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        yield int(words[0]) / int(words[1])


def _read(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes()).rstrip("\n")
    except OSError:
        return ""
