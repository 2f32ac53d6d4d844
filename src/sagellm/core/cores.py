"""Counts the cores that this process may use. A machine shows more CPUs than it has cores, and a container
gets fewer."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator
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
    return max(1, math.floor(min(num_physical(allowed_cpus(), root), cpu_quota(root))))


def num_physical(cpus: Collection[int], root: Path = ROOT) -> int:
    """How many cores `cpus` belong to; see `physical_cores`."""
    return len(physical_cores(cpus, root))


def physical_cores(cpus: Iterable[int], root: Path = ROOT) -> list[tuple[int, ...]]:
    """`cpus` by the core that they belong to. The hyperthreads of a core share its arithmetic and memory
    units. Where the system does not say which belong together (not Linux), each CPU is a core."""
    cores: dict[object, list[int]] = {}
    for cpu in sorted(cpus):
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.setdefault(_read(file) or file, []).append(cpu)
    return [tuple(core) for core in cores.values()]


def usable_physical_cores(root: Path = ROOT) -> list[tuple[int, ...]]:
    """The cores of `usable_cores`; control groups may allow fewer than there are."""
    return physical_cores(allowed_cpus(), root)[: usable_cores(root)]


def keep_to(cpus: Collection[int]) -> None:
    """Keep this process, and the threads that it starts from now on, on `cpus`. Empty: change nothing.

    Raises `OSError` where the system has none of them. Systems other than Linux have no such call, and all
    cores stay in use."""
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def cpu_quota(root: Path = ROOT) -> float:
    """CPUs that the control groups (v2, v1) of this process and their parents allow. Infinity without a
    limit."""
    return min((quota for group in _control_groups(root) for quota in _quota_of(group)), default=math.inf)


def allowed_cpus() -> Collection[int]:
    """CPUs that this process may run on."""
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
