"""Ranks that are started and joined: whatever fails in between ends it soon, with the reason."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore, HashStore

from sagellm.comm.collectives import shared_region
from sagellm.core.clock import MonotonicClock
from sagellm.core.errors import CommError, ConfigError, EngineFailedError
from sagellm.engines.native.parallel import launch
from sagellm.engines.native.parallel.ranks import Ranks
from sagellm.engines.native.parallel.split import Split
from tests.effort import usual
from tests.engines.native.parallel.entries import HERE

MOST_S = 30.0
"""A child's start takes seconds on a busy machine; a group's own limit is 300 s and more."""
BACKENDS = ("shared_memory", "torch_distributed", "auto")


@pytest.mark.parametrize(
    ("entry", "backend", "reason"),
    [
        ("die_while_joining", "shared_memory", r"rank 1 \(process \d+\) was ended by SIGKILL"),
        ("fail_while_joining", "torch_distributed", "rank 1 failed: no heads for this rank"),
        pytest.param("die_while_joining", "auto", "was ended by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_while_it_joins_ends_the_start(entry: str, backend: str, reason: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(EngineFailedError, match=reason):
        launch.launch(Split(0, tensor=2), f"{HERE}:{entry}", {}, backend)
    assert time.monotonic() - began_s < MOST_S


def test_a_rank_that_never_joins_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "START_S", 0.2)
    with pytest.raises(EngineFailedError, match=r"not all ranks have joined within 0\.2 s"):
        launch.launch(Split(0, tensor=2), f"{HERE}:stop_while_joining", {}, "shared_memory")


def listening_addresses(pid: int) -> set[str]:
    """The IPv4 addresses at which the TCP sockets of a process listen; others count as they are written."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = str(link.readlink()) if link.is_symlink() else ""
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address = fields[1].split(":")[0]
                found.add(
                    ".".join(str(b) for b in bytes.fromhex(address)[::-1]) if name == "tcp" else address
                )
    return found


@pytest.mark.parametrize("backend", usual({"auto"}, BACKENDS))
def test_ranks_listen_at_the_loopback_address_only(backend: str) -> None:
    ranks = launch.launch(Split(0, tensor=2), f"{HERE}:follow", {}, backend)
    try:
        assert ranks._processes is not None
        heard = listening_addresses(ranks._processes.pids[0])
        assert heard == (set() if backend == "shared_memory" else {launch.LOOPBACK})
    finally:
        ranks.close()


def test_ranks_keep_the_store_in_which_they_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `FileStore` that is dropped while its folder is removed holds the process up for 300 s."""
    stores: list[weakref.ref[FileStore]] = []

    def remembered(path: str, num_ranks: int) -> FileStore:
        store = FileStore(path, num_ranks)
        stores.append(weakref.ref(store))
        return store

    monkeypatch.setattr(launch, "FileStore", remembered)
    joined: list[Ranks] = []

    def join(rank: int) -> None:
        joined.append(launch.join(Split(rank, tensor=2), str(tmp_path / "store"), {"name": "shared_memory"}))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(joined) == len(stores) == 2
    assert all(store() is not None for store in stores)
    for ranks in joined:
        ranks.close()


def test_a_group_is_not_waited_for_when_a_rank_that_has_joined_is_dead(tmp_path: Path) -> None:
    layout = shared_region.RegionLayout(3, 4096, 64, 64)
    store = FileStore(str(tmp_path / "store"), 3)
    region = shared_region.SharedRegion(0, store, layout, 300.0, MonotonicClock())
    region._states[1], region._pids[1] = shared_region.RankState.READY, 1  # no process holds its lock
    with pytest.raises(CommError, match="rank 1 has died before all ranks had joined"):
        region.join(has_kernel=True)
    region.close()


def test_options_reach_the_collectives(tmp_path: Path) -> None:
    options = {"table": str(tmp_path / "absent.json")}
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read as a table"):
        launch._group(Split(0), HashStore(), {"name": "auto", **options})
