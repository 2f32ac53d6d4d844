"""`HierarchyManager`: what is evicted comes back right, whatever fails below."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sagellm.core.blocks import Tier
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import NO_USE
from sagellm.core.protocols.kv_tiers import BlockFormat, ReadOutcome, StoredBlock, Tail, TierLookup
from sagellm.core.types import NO_ACCOUNT, TOKEN_BYTES, Namespace, Tokens
from sagellm.kvmgr.eviction import LRUPolicy, PrefillCostModel
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.kv_pool.quota import QuotaManager
from sagellm.kvmgr.kv_pool.tiers import hierarchy, saves
from sagellm.kvmgr.kv_pool.tiers.admission import AdmissionFilter
from sagellm.kvmgr.kv_pool.tiers.disk import DiskStorage
from sagellm.kvmgr.kv_pool.tiers.tier import KVTier
from sagellm.kvmgr.prefix_cache.fingerprint import block_hash
from sagellm.kvmgr.prefix_cache.radix import RadixIndex
from tests.kvmgr.tiers.drivers import BLOCK_BYTES, SIZE, FaultyStorage, User, content, hashes_of

SPACE = Namespace()
BLOCK_TOKENS = SIZE * TOKEN_BYTES


def prompt(name: int, num_blocks: int, shared: int = 0) -> Tokens:
    """A prompt whose first `shared` blocks are those of all prompts."""
    ids = [1] * (shared * SIZE) + [1000 * name + i for i in range((num_blocks - shared) * SIZE)]
    return Tokens(ids)


@pytest.fixture
def user() -> User:
    return User(8, [(Tier.DRAM, FaultyStorage(64))])


def test_what_the_device_has_lost_comes_back(user: User) -> None:
    prompts = [prompt(name, 4) for name in range(10)]
    for name, tokens in enumerate(prompts):
        assert user.serve(tokens, f"a{name}") == 0
        user.settle()
    assert [user.serve(tokens, f"b{name}") for name, tokens in enumerate(prompts)] == [4] * 10
    user.settle()
    user.check()
    assert user.tiers[0].num_loaded == 40
    assert user.tiers[0].num_stored == 40
    user.hierarchy.close()


def test_a_prefix_of_the_device_is_continued_from_the_tier(user: User) -> None:
    long, other = prompt(1, 6), prompt(2, 5)
    user.serve(long, "long")
    user.settle()
    user.serve(other, "other")  # evicts the end of the long one
    user.settle()
    on_device = user.index.lookup(long).num_blocks
    assert 0 < on_device < 6
    assert user.serve(long, "again") == 6
    assert user.tiers[0].num_loaded == 6 - on_device
    user.check()
    user.hierarchy.close()


def test_a_second_tier_serves_what_the_first_has_lost() -> None:
    user = User(8, [(Tier.DRAM, FaultyStorage(12)), (Tier.NVME, FaultyStorage(200))])
    prompts = [prompt(name, 4) for name in range(20)]
    for name, tokens in enumerate(prompts):
        user.serve(tokens, f"a{name}")
        user.settle()
    assert [user.serve(tokens, f"b{name}") for name, tokens in enumerate(prompts)] == [4] * 20
    assert user.tiers[1].num_loaded > 0
    user.settle()
    user.check()
    user.hierarchy.close()


def test_what_is_written_twice_is_kept_in_one_slot() -> None:
    """A path that is offered again before its first write has ended, and then cleared."""
    storage = FaultyStorage(64)
    user = User(8, [(Tier.DRAM, storage)])
    user.serve(prompt(1, 4), "first")
    user.serve(prompt(1, 4), "second")
    user.settle()
    assert sorted(storage.kept) == sorted(user.tiers[0].index.all_block_ids())
    assert user.hierarchy.clear() == 4
    assert not storage.kept
    user.check()
    user.hierarchy.close()


def test_damage_is_a_miss_and_is_repaired(user: User) -> None:
    tokens, storage = prompt(1, 6), user.tiers[0].storage
    assert isinstance(storage, FaultyStorage)
    user.serve(tokens, "first")
    user.settle()
    for name in (2, 3):
        user.serve(prompt(name, 4), f"other {name}")
        user.settle()
    slots = user.tiers[0].index.block_ids(user.tiers[0].index.lookup(tokens))
    del storage.kept[slots[2]]
    assert user.serve(tokens, "damaged") == 2
    assert user.tiers[0].misses == {ReadOutcome.ABSENT: 1}
    user.settle()
    user.check()
    for name in (4, 5):
        user.serve(prompt(name, 4), f"other {name}")
        user.settle()
    assert user.serve(tokens, "repaired") == 6
    user.hierarchy.close()


def test_a_tier_that_cannot_be_written_is_left_out(user: User, caplog: pytest.LogCaptureFixture) -> None:
    storage = user.tiers[0].storage
    assert isinstance(storage, FaultyStorage)
    user.serve(prompt(1, 4), "before")
    user.settle()
    storage.fails_to_write = True
    for name in range(2, 8):
        user.serve(prompt(name, 4), f"r{name}")
        user.settle()
    assert caplog.text.count("the tier dram is not used any more: the disk is full") == 1
    assert user.serve(prompt(1, 4), "still read") == 4
    user.check()
    user.hierarchy.close()


def test_a_storage_that_has_failed_is_not_asked(user: User) -> None:
    tokens = prompt(1, 4)
    user.serve(tokens, "first")
    user.settle()
    for name in (2, 3):
        user.serve(prompt(name, 4), f"r{name}")
    user.settle()
    storage = user.tiers[0].storage
    assert isinstance(storage, FaultyStorage)
    storage.fault = "gone"
    assert user.hierarchy.request("a", tokens, Namespace(), len(tokens)) is TierLookup.MISS
    assert user.hierarchy.faults() == ["dram: gone"]
    assert user.serve(tokens, "computed") == 0
    user.settle()
    user.check()
    user.hierarchy.close()


def test_loading_that_takes_longer_than_computing_is_not_done(user: User) -> None:
    tokens = prompt(1, 4)
    user.serve(tokens, "first")
    user.settle()
    for name in (2, 3):
        user.serve(prompt(name, 4), f"r{name}")
    user.settle()
    user.hierarchy.speeds.set_all(1.0)
    assert user.hierarchy.request("slow", tokens, Namespace(), len(tokens)) is TierLookup.MISS
    user.hierarchy.speeds.set_all(1e9)
    assert user.hierarchy.request("fast", tokens, Namespace(), len(tokens)) is TierLookup.HIT_PENDING
    user.hierarchy.cancel("fast")
    user.settle()
    user.check()
    user.hierarchy.close()


def test_loads_of_a_running_step_start_behind_it(user: User) -> None:
    tokens = prompt(1, 4)
    user.serve(tokens, "first")
    user.settle()
    for name in (2, 3):
        user.serve(prompt(name, 4), f"r{name}")
    user.settle()
    assert user.hierarchy.request("a", tokens, Namespace(), 8, start=False) is TierLookup.HIT_PENDING
    assert not user.hierarchy.is_idle
    assert user.migrator.is_idle
    user.hierarchy.start_loads()
    assert user.settle() == ["a"]
    assert user.hierarchy.request("b", tokens, Namespace(), 8, start=False) is TierLookup.HIT
    user.check()
    user.hierarchy.close()


def test_a_tail_is_taken_over_behind_the_head(user: User) -> None:
    """It is asked for first, loaded while the head is computed, and belongs to no prefix until then."""
    tokens = prompt(1, 4)
    user.serve(tokens, "a")
    user.settle()
    user.split_loads()
    hierarchy, path = user.hierarchy, (tokens, Namespace(), len(tokens))
    assert hierarchy.request("b", *path, tail_blocks=4) is TierLookup.SPLIT
    assert hierarchy.is_idle, "nothing has begun"
    assert hierarchy.take_tail("b") == Tail()
    assert user.begin_tail(tokens, "b") == 2
    assert hierarchy.request("b", *path, tail_blocks=4) is TierLookup.HIT_PENDING
    assert hierarchy.load_tail("b", *path, NO_ACCOUNT, 4) is None
    assert user.index.lookup(tokens).num_blocks == 0
    assert user.end_tail("b") == 2
    assert user.index.lookup(tokens).num_blocks == 4
    user.settle()
    user.check()
    hierarchy.close()


@pytest.mark.parametrize("how", ["cancel", "cancel when it has come", "give_way", "clear", "close"])
def test_a_tail_that_is_given_up_leaves_no_block(user: User, how: str) -> None:
    tokens = prompt(1, 4)
    user.serve(tokens, "a")
    user.settle()
    user.split_loads()
    assert user.hierarchy.load_tail("b", tokens, Namespace(), len(tokens), NO_ACCOUNT, 4) == 2
    assert user.arrivals.num_blocks == 2
    if "come" in how:
        user.settle()
        assert user.arrivals.num_blocks == 2
    if how.startswith("cancel"):
        user.hierarchy.cancel("b")
        user.settle()
    else:
        getattr(user.hierarchy, how)()
    assert user.arrivals.num_blocks == 0
    assert user.hierarchy.take_tail("b") == Tail()
    user.check()
    user.hierarchy.close()


@pytest.mark.parametrize("start", [True, False])
def test_requests_with_one_prompt_share_a_load(user: User, start: bool) -> None:
    tokens = prompt(1, 4)
    user.serve(tokens, "first")
    user.settle()
    for name in (2, 3):
        user.serve(prompt(name, 4), f"r{name}")
    user.settle()
    hierarchy, disk = user.hierarchy, user.tiers[0].storage
    assert isinstance(disk, FaultyStorage)
    disk.gate.clear()
    longer = Tokens([*tokens, *range(50, 50 + SIZE)])
    for request_id in "abcd":
        asked = longer if request_id == "d" else tokens
        assert hierarchy.request(request_id, asked, SPACE, 8, start=start) is TierLookup.HIT_PENDING
    assert hierarchy.request("other", tokens, Namespace("b"), 8, start=start) is TierLookup.MISS
    user.check()
    assert user.arrivals.num_blocks == 4
    hierarchy.cancel("a")
    hierarchy.cancel("c")
    disk.gate.set()
    assert sorted(user.settle()) == ["b", "d"]
    assert user.tiers[0].num_loaded == 4
    assert user.index.lookup(tokens).num_blocks == 4
    user.check()
    hierarchy.close()


def test_a_load_that_was_cancelled_is_not_shared(user: User) -> None:
    tokens, storage = prompt(1, 4), user.tiers[0].storage
    assert isinstance(storage, FaultyStorage)
    user.serve(tokens, "first")
    user.settle()
    for number in (2, 3):
        user.serve(prompt(number, 4), f"r{number}")
    user.settle()
    storage.gate.clear()
    storage.called.clear()
    assert user.hierarchy.request("a", tokens, SPACE, 8) is TierLookup.HIT_PENDING
    assert storage.called.wait(10)
    user.hierarchy.cancel("a")
    assert user.hierarchy.request("b", tokens, SPACE, 8) is TierLookup.RETRY, "its blocks are not free yet"
    storage.gate.set()
    user.settle()
    user.check()
    user.hierarchy.close()


def test_a_shared_load_stops_with_its_last_request(user: User) -> None:
    tokens = prompt(1, 4)
    user.serve(tokens, "first")
    user.settle()
    for name in (2, 3):
        user.serve(prompt(name, 4), f"r{name}")
    user.settle()
    for request_id in "ab":
        assert user.hierarchy.request(request_id, tokens, SPACE, 8, start=False) is TierLookup.HIT_PENDING
    user.hierarchy.cancel("a")
    assert user.arrivals.num_blocks == 4
    user.hierarchy.cancel("b")
    assert user.arrivals.num_blocks == 0
    assert user.hierarchy.is_idle
    user.check()
    user.hierarchy.close()


@pytest.mark.parametrize("how", ["drop_unstarted", "give_way", "clear"])
def test_a_load_that_has_not_started_is_dropped_without_a_write(user: User, how: str) -> None:
    """A step that computes may still write to its blocks."""
    tokens = prompt(1, 4)
    user.serve(tokens, "first")
    user.settle()
    for name in (2, 3):
        user.serve(prompt(name, 4), f"r{name}")
    user.settle()
    assert user.hierarchy.request("a", tokens, Namespace(), 8, start=False) is TierLookup.HIT_PENDING
    num_moves = user.migrator._num_moves
    assert getattr(user.hierarchy, how)()
    assert not user.hierarchy.drop_unstarted()
    assert user.migrator._num_moves == num_moves
    assert user.hierarchy.is_idle
    assert user.hierarchy.poll() == ["a"]
    assert user.arrivals.num_blocks == 0
    user.check()
    user.hierarchy.close()


def test_blocks_without_their_prefix_are_not_published(user: User) -> None:
    arrival = user.arrivals.begin_receive(prompt(1, 4), Namespace(), 4, first=2)
    assert arrival is not None
    assert (arrival.first, len(arrival.block_ids)) == (2, 2)
    user.check()
    with pytest.raises(BookkeepingError, match="from block 2 on, 0 are cached"):
        user.arrivals.publish(arrival, 1)


def test_a_restart_finds_what_was_stored() -> None:
    storage = FaultyStorage(64)
    first = User(8, [(Tier.NVME, storage)])
    prompts = [prompt(name, 5, shared=2) for name in range(10)]
    for name, tokens in enumerate(prompts):
        first.serve(tokens, f"a{name}")
        first.settle()
    first.hierarchy.close()
    lost = next(
        slot for slot, (block, _) in storage.kept.items() if block.tokens == bytes(prompts[3].slice(4, 6))
    )
    del storage.kept[lost]  # the rest of that path can no longer be reached
    second = User(8, [(Tier.NVME, storage)])
    assert second.tiers[0].recover(block_hash) == 2 + 9 * 3
    second.check()
    reused = [second.serve(tokens, f"b{name}") for name, tokens in enumerate(prompts)]
    assert reused == [5, 5, 5, 2, 5, 5, 5, 5, 5, 5]
    second.settle()
    second.check()
    second.hierarchy.close()


@pytest.mark.parametrize(("num_blocks", "ends"), [(12, True), (4, False)], ids=["ended", "loaded"])
def test_what_was_used_longest_ago_is_evicted_first_after_a_restart(
    tmp_path: Path, num_blocks: int, ends: bool
) -> None:
    """`a` was written before `b`, and used after it: on the device by a request that ended, or loaded."""

    def started() -> User:
        user = User(num_blocks, [(Tier.NVME, DiskStorage(tmp_path, 8, BlockFormat(bytes(16), BLOCK_BYTES)))])
        user.tiers[0].recover(block_hash)
        return user

    a, b, c = (prompt(name, 4) for name in range(3))
    first = started()
    for number, tokens in enumerate((a, b, a)):
        assert first.serve(tokens, str(number)) == (4 if number == 2 else 0)
        first.settle()
    if ends:
        first.end(a)
    first.hierarchy.close()
    second = started()
    second.serve(c, "c")
    second.settle()
    assert [second.tiers[0].lookup(each, Namespace()).num_blocks for each in (a, b, c)] == [4, 0, 4]
    second.check()
    second.hierarchy.close()


def sessions_on_disk(num_sessions: int, num_shared: int, num_own: int = 2) -> FaultyStorage:
    """What a disk has of sessions behind one system prompt; the last one was used longest ago."""
    storage = FaultyStorage(num_shared + num_sessions * num_own)
    for name in range(num_sessions):
        path, parent = bytes(prompt(name + 1, num_shared + num_own, shared=num_shared).slice(0)), b""
        for at, token_hash in enumerate(hashes_of(path, SPACE)):
            slot = at if at < num_shared else num_shared + name * num_own + at - num_shared
            tokens = path[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]
            block = StoredBlock(slot, token_hash, parent, SPACE, tokens, float(num_sessions - name))
            storage.kept[slot] = block, content(token_hash)
            parent = token_hash
    return storage


def recovery_steps(num_shared: int) -> int:
    """Lines of Python that a restart of 100 sessions runs."""
    user, num_lines = User(8, [(Tier.NVME, sessions_on_disk(100, num_shared))]), 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        num_blocks = user.tiers[0].recover(block_hash)
    finally:
        sys.settrace(before)
    assert num_blocks == num_shared + 200
    user.check()
    user.hierarchy.close()
    return num_lines


def test_a_restart_takes_time_linear_in_the_blocks() -> None:
    """Not in the sum of all prompts: these share their first blocks."""
    assert recovery_steps(600) - recovery_steps(200) < 400 * 60


def test_after_a_restart_the_session_used_longest_ago_is_evicted_first() -> None:
    user = User(8, [(Tier.NVME, sessions_on_disk(6, num_shared=3))])
    tier = user.tiers[0]
    assert tier.recover(block_hash) == 15
    for num_left in (5, 4, 3):
        tier.index.evict(2)
        lengths = [tier.lookup(prompt(name + 1, 5, shared=3), SPACE).num_blocks for name in range(6)]
        assert lengths == [5] * num_left + [3] * (6 - num_left)
    user.hierarchy.close()


@pytest.mark.parametrize("kind", ["tenants", "classes"])
def test_a_restart_finds_blocks_beside_a_ceiling_of_requests_without_a_name(kind: str) -> None:
    """They count for no share, and go first."""
    storage = FaultyStorage(8)
    first = User(8, [(Tier.NVME, storage)])
    first.serve(prompt(1, 6), "a")
    first.settle()
    first.hierarchy.close()
    shares: dict[str, dict[str, tuple[float, float | None]]] = {"tenants": {}, "classes": {}}
    shares[kind][""] = (0.0, 0.5)
    quota = QuotaManager.from_fractions(8, shares["tenants"], shares["classes"])
    index, pool = RadixIndex(SIZE, policy_factory=LRUPolicy), FreeListPool(8, SIZE, quota=quota)
    tier = KVTier(Tier.NVME, index, pool, storage, quota)
    assert tier.recover(block_hash) == 6
    assert tier.lookup(prompt(1, 6), Namespace()).num_blocks == 6
    store = tier.begin_store(prompt(2, 4), Namespace(), 4)
    assert store is not None
    tier.end_store(store, 4)
    assert tier.begin_store(prompt(3, 5), Namespace(), 5) is None, "above the ceiling"
    assert (tier.num_evicted, quota.used(NO_ACCOUNT)) == (2, 4)
    tier.check()
    quota.check()
    assert tier.clear() == 8
    assert pool.num_free == 8
    quota.check()


def test_what_a_preempted_request_has_lost_is_not_evicted() -> None:
    user = User(8, [(Tier.DRAM, FaultyStorage(16)), (Tier.NVME, FaultyStorage(64))])
    tokens = prompt(0, 4)
    user.serve(tokens, "running")
    user.settle()
    user.preempt(tokens, "running")
    others = [prompt(name, 4) for name in range(1, 12)]
    for name, other in enumerate(others):
        user.serve(other, f"other {name}")
        user.settle()
    host = user.tiers[0]
    assert (host.num_evicted, host.lookup(tokens, Namespace()).num_blocks) == (32, 4)
    assert [state.held for state in user.hierarchy.states()] == [4, 0]
    assert user.serve(tokens, "running") == 4
    user.hierarchy.let_go("running")
    user.hierarchy.let_go("unknown")
    user.check()
    host.clear()
    assert host.index.num_cached == 0
    user.hierarchy.close()


def test_a_path_that_is_being_written_is_not_written_twice() -> None:
    storages = [FaultyStorage(64), FaultyStorage(64)]
    user = User(16, [(Tier.DRAM, storages[0]), (Tier.NVME, storages[1])])
    tokens = prompt(0, 4)
    user.serve(tokens, "first")
    hit = user.index.pin(user.index.lookup(tokens))
    for _ in range(3):
        user.hierarchy.offer(hit)
    user.index.unpin(hit)
    user.settle()
    assert [tier.num_stored for tier in user.tiers] == [4, 4]
    assert [storage.num_written for storage in storages] == [4, 4]
    assert user.index.num_evictable == 4
    user.check()
    user.hierarchy.close()


@pytest.mark.parametrize("most", [1, 4, 5, 29, 30])
def test_a_path_with_more_blocks_than_may_be_under_way_goes_down_in_parts(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "MAX_PENDING_BYTES", most * BLOCK_BYTES)
    user = User(40, [(Tier.DRAM, FaultyStorage(64)), (Tier.NVME, FaultyStorage(20))])
    user.serve(prompt(1, 30), "long")
    user.settle()
    assert [tier.num_stored for tier in user.tiers] == [30, 20]  # what fits of its beginning
    assert [tier.num_dropped for tier in user.tiers] == [0, 10]
    user.check()
    assert user.index.num_evictable == user.index.num_cached == 30  # nothing is pinned any more
    user.hierarchy.close()


def test_parts_that_a_filter_refuses_are_not_sent_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "MAX_PENDING_BYTES", 5 * BLOCK_BYTES)
    filters = {Tier.NVME: AdmissionFilter(64, 2)}
    user = User(40, [(Tier.NVME, FaultyStorage(64))], filters=filters)
    user.serve(prompt(1, 30), "long")
    user.settle()
    assert (user.tiers[0].num_stored, user.tiers[0].num_refused) == (0, 5)
    assert user.hierarchy.is_idle
    user.check()
    user.hierarchy.close()


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_disk_that_does_not_answer_is_given_up(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hierarchy, "MAX_CALL_S", 0.2)
    disk = FaultyStorage(64)
    user = User(8, [(Tier.DRAM, FaultyStorage(6)), (Tier.NVME, disk)])
    for name in (1, 2, 3):
        user.serve(prompt(name, 4), f"first {name}")
        user.settle()
    disk.gate.clear()
    disk.called.clear()
    if call == "write":
        user.serve(prompt(4, 4), "writes")
    else:
        assert user.hierarchy.request("reads", prompt(1, 4), Namespace(), 8) is TierLookup.HIT_PENDING
    assert disk.called.wait(10)
    assert user.hierarchy.give_way()
    assert user.hierarchy.is_idle
    assert user.hierarchy.faults() == ["nvme: it has not answered for 0.2 s"]
    assert caplog.text.count("the tier nvme is not used any more") == 1
    if call == "read":
        assert user.hierarchy.poll() == ["reads"]
    user.check()
    assert user.serve(prompt(1, 4), "computed") == 0  # only the disk had it
    user.settle()
    for name in (5, 6):
        user.serve(prompt(name, 4), f"evicts {name}")
        user.settle()
    assert user.tiers[0].num_stored > 12  # host memory goes on
    disk.gate.set()  # the late call ends, and changes nothing
    user.serve(prompt(7, 4), "after")
    user.settle()
    user.check()
    user.hierarchy.close()


@pytest.mark.parametrize("closes", [False, True])
def test_a_poll_takes_in_a_bounded_number_of_blocks(closes: bool) -> None:
    """The others follow in the next ones. Until then it is not idle, and `wait` returns at once."""
    user = User(12, [(Tier.DRAM, FaultyStorage(64))])
    paths = [prompt(name, 2) for name in (1, 2, 3)]
    for tokens in (*paths, prompt(4, 10)):
        user.serve(tokens, "first")
        user.settle()
    user.hierarchy.most_polled_blocks = 3
    for name, tokens in zip("abc", paths, strict=True):
        assert user.ask(tokens, name, SPACE) is TierLookup.HIT_PENDING
    user.hierarchy.wait(20)
    while len(user.migrator._done) < 3:
        time.sleep(0.001)
    if closes:
        user.hierarchy.close()
    else:
        for name in "abc":
            assert not user.hierarchy.is_idle
            assert user.hierarchy.wait(0.0)
            assert user.poll() == [name]
            user.check()
    assert user.hierarchy.is_idle
    assert [user.index.lookup(tokens).num_blocks for tokens in paths] == [2, 2, 2]
    user.check()


def test_a_load_that_has_ended_is_not_given_up_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report is polled together with the finding that the next one hangs, as after a long step."""
    monkeypatch.setattr(hierarchy, "MAX_CALL_S", 0.2)
    disk = FaultyStorage(64)
    user = User(8, [(Tier.NVME, disk)])
    for name in range(1, 8):
        user.serve(prompt(name, 2), f"first {name}")
        user.settle()
    assert user.hierarchy.request("ended", prompt(1, 2), SPACE, 4) is TierLookup.HIT_PENDING
    assert user.migrator.wait(20)
    user.hierarchy.most_polled_blocks = 1  # what has ended is taken in first, however much it is
    disk.gate.clear()
    disk.called.clear()
    assert user.hierarchy.request("hangs", prompt(2, 2), SPACE, 4) is TierLookup.HIT_PENDING
    assert disk.called.wait(20)
    time.sleep(0.3)
    assert sorted(user.hierarchy.poll()) == ["ended", "hangs"]
    assert user.index.lookup(prompt(1, 2)).num_blocks == 2
    assert user.hierarchy.faults() == ["nvme: it has not answered for 0.2 s"]
    user.check()
    disk.gate.set()
    user.hierarchy.close()


def test_a_prompt_that_does_not_fit_evicts_nothing() -> None:
    user = User(40, [(Tier.DRAM, FaultyStorage(8))])
    user.serve(prompt(1, 6), "first")
    user.settle()
    user.hierarchy.hold("held", user.index.pin(user.index.lookup(prompt(1, 4))), NO_ACCOUNT, NO_USE)
    user.serve(prompt(2, 12), "long")
    user.settle()
    host = user.tiers[0]
    assert host.lookup(prompt(1, 4), Namespace()).num_blocks == 4
    assert host.lookup(prompt(2, 12), Namespace()).num_blocks == 4  # its beginning
    assert host.num_dropped == 8
    user.hierarchy.close()


def test_preempted_requests_hold_at_most_half_of_a_tier() -> None:
    user = User(8, [(Tier.DRAM, FaultyStorage(9))])
    for number, held in enumerate([2, 4, 4]):
        tokens = prompt(number, 2)
        user.serve(tokens, str(number))
        user.settle()
        user.preempt(tokens, str(number))
        assert user.hierarchy.states()[0].held == held
    user.hierarchy.let_go("0")
    user.preempt(prompt(2, 2), "2")
    assert user.hierarchy.states()[0].held == 4
    user.check()
    user.hierarchy.close()


def test_a_preemption_waits_until_the_blocks_are_saved(user: User) -> None:
    """The caller takes them for others right after it."""
    tokens = prompt(0, 4)
    user.serve(tokens, "running")
    user.preempt(tokens, "running")
    assert user.index.num_evictable == 4, "no copy pins them"
    assert user.tiers[0].lookup(tokens, Namespace()).num_blocks == 4
    user.hierarchy.close()


def test_where_saving_takes_longer_than_computing_nothing_is_held() -> None:
    storage = FaultyStorage(64)
    user = User(8, [(Tier.DRAM, storage)])
    user.hierarchy._costs = PrefillCostModel(SIZE, seconds_per_token=1e-9)
    tokens = prompt(0, 4)
    user.serve(tokens, "running")
    user.settle()
    user.preempt(tokens, "running")
    assert user.hierarchy.states()[0].held == 0
    assert user.hierarchy.load_s(4) > 0
    storage.fault = "broken"
    assert user.hierarchy.load_s(4) == math.inf
    user.hierarchy.close()


def test_a_cycle_of_damaged_rows_ends_a_restart() -> None:
    storage = FaultyStorage(64)
    first = User(8, [(Tier.NVME, storage)])
    first.serve(prompt(1, 3), "a")
    first.serve(prompt(2, 2), "b")
    first.settle()
    first.hierarchy.close()
    by_tokens = {block.tokens: slot for slot, (block, _) in storage.kept.items()}
    head, middle, _ = (by_tokens[bytes(prompt(1, 3).slice(at, at + SIZE))] for at in (0, 2, 4))
    block, data = storage.kept[head]
    storage.kept[head] = block._replace(parent=storage.kept[middle][0].token_hash), data
    second = User(8, [(Tier.NVME, storage)])
    assert second.tiers[0].recover(block_hash) == 2
    second.check()
    second.hierarchy.close()


def test_a_filter_keeps_the_disk_for_what_comes_again() -> None:
    host, disk = FaultyStorage(64), FaultyStorage(64)
    user = User(8, [(Tier.DRAM, host), (Tier.NVME, disk)], filters={Tier.NVME: AdmissionFilter(64, 2)})
    tokens = prompt(0, 4)
    for number, (num_host, num_disk) in enumerate([(4, 0), (4, 4)]):
        hit = user.serve(tokens, str(number))
        user.settle()
        assert (host.num_written, disk.num_written) == (num_host, num_disk)
        user.end(tokens)  # its blocks count from now on
        user.settle()
        user.check()
    assert hit == 4
    assert [state.refused for state in user.hierarchy.states()] == [0, 8]
    user.hierarchy.close()
