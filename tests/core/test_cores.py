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
V2, V1 = "0::/pod/box\n", "4:memory:/elsewhere\n3:cpu,cpuacct:/pod/box\n"


def write_cpus(root: Path, siblings: Sequence[str]) -> None:
    for cpu, text in enumerate(siblings):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")


def write_group(root: Path, membership: str, limits: dict[str, str]) -> None:
    """`limits`: contents by path below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
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
    ("quota", "expected"), [("20000", 1), ("150000", 1), ("290000", 2), ("600000", 4), ("max", 4)]
)
def test_a_quota_is_rounded_down_and_adds_no_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(cores, "_allowed", lambda: range(6))
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
