"""Cores by what a system's files say: hyperthreads, hybrid CPUs, masks, quotas of control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from sagellm.core import cores
from sagellm.core.cores import cpu_quota, num_physical, usable_cores

HYBRID = ["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"]  # two P cores of two threads, four E cores
V2, V1 = "0::/pod/box\n", "4:cpu,cpuacct:/pod/box\n3:cpuset:/elsewhere\n"
HOST = "0:26 / / rw - overlay overlay rw", "0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw"
V2_MOUNT = "0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNTS = (
    "0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset",
    "0:30 / /sys/fs/cgroup/cpu rw,nosuid shared:5 master:2 - cgroup cgroup rw,cpu,cpuacct",
)


def write_cpus(root: Path, siblings: Sequence[str]) -> None:
    for cpu, text in enumerate(siblings):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")


def write_group(
    root: Path, membership: str, limits: dict[str, str], mounts: Sequence[str] | None = None
) -> None:
    """`limits`: contents by path below /sys/fs/cgroup. `mounts`: lines of mountinfo without their ids."""
    if mounts is None:
        mounts = [V2_MOUNT] if membership.startswith("0:") else V1_MOUNTS
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_bytes(membership.encode())
    lines = [f"{31 + index} 23 {line}\n" for index, line in enumerate([*HOST, *mounts])]
    (root / "proc/self/mountinfo").write_text("".join(lines))
    for name, text in limits.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("siblings", "cpus", "expected"),
    [
        (["0,2", "1,3", "0,2", "1,3"], range(4), 2),
        (["0,2", "1,3", "0,2", "1,3"], {0, 2}, 1),
        (["0,2", "1,3", "0,2", "1,3"], {0, 1}, 2),
        (["0", "1"], range(2), 2),
        (HYBRID, range(8), 6),
        (HYBRID, {1, 2, 3, 7}, 3),
    ],
)
def test_hyperthreads_count_once(
    tmp_path: Path, siblings: list[str], cpus: Sequence[int], expected: int
) -> None:
    write_cpus(tmp_path, siblings)
    assert num_physical(cpus, tmp_path) == expected


def test_an_offline_cpu_is_no_sibling_and_one_without_a_file_is_a_core(tmp_path: Path) -> None:
    """CPU 2 went offline: its sibling stands alone. Of CPUs 4 and 5 nothing is told."""
    write_cpus(tmp_path, ["0", "1,3", "", "1,3"])
    assert num_physical({0, 1, 3}, tmp_path) == 2
    assert num_physical({0, 1, 3, 4, 5}, tmp_path) == 4


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        (V2, {"pod/box/cpu.max": "150000 100000"}, 1.5),
        (V2, {"pod/cpu.max": "400000 100000", "pod/box/cpu.max": "max 100000"}, 4.0),
        (V2, {"cpu.max": "50000 100000", "pod/box/cpu.max": "300000 100000"}, 0.5),
        (V2, {"other/cpu.max": "150000 100000"}, math.inf),
        (V1, {"cpu/pod/box/cpu.cfs_quota_us": "300000", "cpu/pod/box/cpu.cfs_period_us": "200000"}, 1.5),
        (V1, {"cpu/pod/cpu.cfs_quota_us": "200000", "cpu/pod/cpu.cfs_period_us": "100000"}, 2.0),
        (V1, {"cpu/cpu.cfs_quota_us": "800000", "cpu/cpu.cfs_period_us": "100000"}, 8.0),
        (V1, {"cpu/pod/box/cpu.cfs_quota_us": "-1", "cpu/pod/box/cpu.cfs_period_us": "100000"}, math.inf),
        (V1, {"pod/box/cpu.max": "150000 100000"}, math.inf),
        (V1, {"cpu/elsewhere/cpu.cfs_quota_us": "1", "cpu/elsewhere/cpu.cfs_period_us": "1"}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_the_least_quota_of_a_group_and_those_above(
    tmp_path: Path, membership: str, limits: dict[str, str], expected: float
) -> None:
    write_group(tmp_path, membership, limits)
    assert cpu_quota(tmp_path) == expected


@pytest.mark.parametrize(
    ("membership", "group", "mount", "expected"),
    [
        (V1, "cpu,cpuacct/pod", "0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct", 1.5),
        (V2, "unified/pod/box", "0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw", 1.5),
        (V2, "box", "0:30 /pod /sys/fs/cgroup rw - cgroup2 cgroup2 rw", 1.5),
        (V2, ".", "0:30 /pod/box /sys/fs/cgroup rw - cgroup2 cgroup2 rw", 1.5),
        (V2, ".", "0:30 /other /sys/fs/cgroup rw - cgroup2 cgroup2 rw", 1.5),
        (V2, "pod", "0:30 /po /sys/fs/cgroup rw - cgroup2 cgroup2 rw", 1.5),
        ("0::/a\\x2d b/c", "c", r"0:30 /a\134x2d\040b /sys/fs/cgroup rw - cgroup2 cgroup2 rw", 1.5),
        (V2, "a b/pod", r"0:30 / /sys/fs/cgroup/a\040b rw - cgroup2 - rw", 1.5),
        (V2, "pod", "0:30 / /sys/fs/cgroup rw - tmpfs tmpfs rw", math.inf),
        ("3:name=cpu:/pod\n", "pod", "0:30 / /sys/fs/cgroup rw - cgroup cgroup rw,name=cpu", math.inf),
    ],
)
def test_groups_are_where_they_are_mounted(
    tmp_path: Path, membership: str, group: str, mount: str, expected: float
) -> None:
    """A container is often told the host's path, and shown only its own groups."""
    write_group(tmp_path, membership, {f"{group}/cpu.max": "150000 100000"}, [mount])
    assert cpu_quota(tmp_path) == expected


@pytest.mark.parametrize("name", ["a\fb", "a\x85b", "a\u2028b", "a:b", "a\x85", "a "])
def test_a_group_may_have_any_name(tmp_path: Path, name: str) -> None:
    write_group(tmp_path, f"0::/{name}\n", {f"{name}/cpu.max": "150000 100000"})
    assert cpu_quota(tmp_path) == 1.5


@pytest.mark.parametrize("text", ["", "max", "100000", "1 2 3", "100000 0", "-1 100000", "\u00b2 1", "1.5 1"])
def test_a_limit_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    write_group(tmp_path, f"cpu\n\n0::\n{V2}", {"pod/box/cpu.max": text}, ["nothing", V2_MOUNT])
    assert cpu_quota(tmp_path) == math.inf
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5, "what does not parse hides nothing"


@pytest.mark.parametrize(
    ("quota", "expected"), [("20000", 1), ("150000", 1), ("290000", 2), ("600000", 4), ("max", 4)]
)
def test_a_quota_is_rounded_down_and_adds_no_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(cores, "allowed_cpus", lambda: range(6))
    write_cpus(tmp_path, HYBRID)
    write_group(tmp_path, "0::/\n", {"cpu.max": f"{quota} 100000"})
    assert usable_cores(tmp_path) == expected


def test_where_no_system_tells_every_cpu_is_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for count, expected in ((3, 3), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert usable_cores(tmp_path) == expected


def test_on_this_machine_the_mask_is_the_most() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
