"""No request starves: the guard, and every pass and preset that reorders the waiting."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.clock import ManualClock
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.types import SLO, Namespace, Request, SamplingParams, Tokens
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir import strategies
from sagellm.kvmgr.scheduler_ir._queue import RankedQueue, StarvationGuard
from sagellm.kvmgr.scheduler_ir.passes.batching_efficiency import BatchingEfficiencyPass
from sagellm.kvmgr.scheduler_ir.passes.fairness import FairnessPass
from sagellm.kvmgr.scheduler_ir.passes.lifetime_aware import LifetimeAwarePass
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from sagellm.kvmgr.scheduler_ir.passes.slo_aware import SLOAwarePass
from tests.builders import fake_engine
from tests.kvmgr.scheduler_ir.passes.desk import Desk, admit, state

Make = Callable[[], SchedulerPass]

WITH_GUARD: dict[str, Make] = {
    "prefix_cache_aware": lambda: PrefixCacheAwarePass(max_wait_s=5.0, share=0.25),
    "slo_aware": lambda: SLOAwarePass(max_wait_s=5.0, share=0.25),
    "batching_efficiency": lambda: BatchingEfficiencyPass(max_wait_s=5.0, share=0.25),
    "lifetime_aware": lambda: LifetimeAwarePass(max_wait_s=5.0, share=0.25, reserve=False),
}


def test_a_queue_ranks_once_and_reports_arrivals_and_departures() -> None:
    queue, a, b, c = RankedQueue(), state("a"), state("b"), state("c")
    assert queue.update([a, b])
    assert (queue.arrived, queue.left) == ([a, b], [])
    queue.ranks.update({a: 1, b: 0})
    waiting = [a, b]
    queue.sort(waiting)
    assert waiting == [b, a]
    assert not queue.update([a, b])
    assert queue.arrived == []
    admit(b)
    assert queue.update([a, c])
    assert (queue.arrived, queue.left) == ([c], [b])
    assert list(queue.ranks) == [a]


def test_who_is_only_kept_back_by_another_pass_has_not_left() -> None:
    queue, a, b = RankedQueue(), state("a"), state("b")
    queue.update([a, b])
    queue.ranks.update({a: 0, b: 0})
    assert queue.update([a])
    assert (queue.left, list(queue.ranks)) == ([], [a, b])


def test_a_queue_forgets_requests_that_it_never_sees_again() -> None:
    queue = RankedQueue()
    for index in range(5000):
        queue.update([state(str(index))])
        queue.ranks.update(dict.fromkeys(queue.arrived, 0))
    assert len(queue.ranks) < 1100


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    rival=st.integers(1, 20),
    share=st.sampled_from([0.1, 0.25, 1.0]),
    max_wait_s=st.sampled_from([0.5, 3.0]),
)
def test_guard_bound_what_others_get_first(
    sizes: list[int], rival: int, share: float, max_wait_s: float
) -> None:
    """Rivals always stand first. From when it is overdue, a request waits for those that came before it and
    for no more than `1 / share` times their tokens and its own."""
    guard = StarvationGuard(max_wait_s, share)
    victims = [state(f"v{i}", size, arrival_s=i * 1e-3) for i, size in enumerate(sizes)]
    guard.note(victims, [])
    left, others, now_s, rivals = list(victims), 0, 10.0, 0
    overtaken: list[int] = []
    while left:
        new = state(f"r{rivals}", rival, arrival_s=now_s)
        rivals += 1
        waiting = [new, *reversed(left)]
        guard.note([new], [])
        guard.promote(waiting, now_s)
        first = admit(waiting[0])
        guard.note([], [first])
        now_s += 1e-4
        if first is new:
            others += rival
        else:
            assert first is left.pop(0)
            overtaken.append(others)
    for place, got in enumerate(overtaken):
        needed = sum(sizes[: place + 1])
        assert got <= needed / share + (place + 1) * rival


def test_guard_want_a_share() -> None:
    with pytest.raises(ValueError, match="share must be in"):
        StarvationGuard(1.0, 0.0)
    with pytest.raises(ValueError, match="max_wait_s"):
        StarvationGuard(-1.0)


@pytest.mark.parametrize("name", WITH_GUARD)
@settings(max_examples=20, deadline=None)
@given(
    length=st.integers(1, 64),
    rival_length=st.integers(1, 64),
    rival_priority=st.integers(0, 3),
    cached=st.booleans(),
)
def test_the_longest_wait_is_bounded_in_every_pass_with_guard(
    name: str, length: int, rival_length: int, rival_priority: int, cached: bool
) -> None:
    """One request a step is admitted, and rivals that the pass likes better come forever."""
    desk = Desk(WITH_GUARD[name]())
    victim = state("victim", length, arrival_s=0.0, max_tokens=1000)
    desk.waiting.append(victim)
    bound = 5.0 + (length / 0.25 / min(length, rival_length, 64)) + length / 0.25 / rival_length + 2
    for step in range(int(bound) + 10):
        rival = state(
            f"r{step}", rival_length, arrival_s=desk.now_s, priority=rival_priority, ttft_s=9.0, max_tokens=2
        )
        if cached:
            desk.view.cached[rival.request_id] = rival_length - 1
        desk.waiting.append(rival)
        desk.step()
        first = desk.run_first()
        if first is victim:
            assert desk.now_s <= bound
            return
        first.num_cached = 0
        desk.now_s += 1.0
    raise AssertionError("the victim waited longer than the bound")


@settings(max_examples=40, deadline=None)
@given(age_s=st.sampled_from([2.0, 5.0]), difference=st.integers(0, 3), order=st.permutations(["x", "y"]))
def test_ageing_bounds_the_wait_under_any_priority(age_s: float, difference: int, order: list[str]) -> None:
    """No request is overtaken by one that arrives `age_s * (1 + difference)` seconds later."""
    desk = Desk(PriorityBasedPass(age_s))
    victim = state("victim")
    desk.waiting.append(victim)
    bound = age_s * (1 + difference)
    for step in range(1000):
        desk.waiting += [state(f"{name}{step}", arrival_s=desk.now_s, priority=difference) for name in order]
        desk.step()
        first = desk.run_first()
        if first is victim:
            return
        assert first.request.arrival_s < bound
        desk.now_s += 0.5
    raise AssertionError("the victim starved")


def test_without_ageing_priority_is_strict() -> None:
    desk = Desk(PriorityBasedPass(None))
    desk.waiting = [state("old"), state("urgent", arrival_s=1e9, priority=1)]
    desk.now_s = 1e9
    assert desk.step() == ["urgent", "old"]


def test_no_tenant_starves_beside_one_that_never_stops() -> None:
    desk = Desk(FairnessPass(quantum=0.0))
    victims = [state(f"v{i}", 40, tenant="small") for i in range(5)]
    desk.waiting += victims
    for step in range(60):
        desk.waiting += [state(f"r{step}.{i}", 10, arrival_s=desk.now_s, tenant="large") for i in range(3)]
        desk.step()
        desk.run_first()
        desk.now_s += 1.0
    assert all(victim not in desk.waiting for victim in victims)


TURN: dict[str, object] = {"max_wait_s": 2.0, "share": 0.5}
TUNED: dict[str, dict[str, dict[str, object]]] = {
    "fifo": {},
    "priority": {"prefix_cache_aware": TURN, "priority_based": {"age_s": 2.0}},
    "slo": {"prefix_cache_aware": TURN, "slo_aware": TURN},
    "adaptive": {
        "prefix_cache_aware": TURN,
        "slo_aware": TURN,
        "priority_based": {"age_s": 2.0},
        "admission": {"max_defer_s": 1.0},
    },
    "throughput": {"prefix_cache_aware": TURN, "batching_efficiency": TURN},
    "fair": {"prefix_cache_aware": TURN, "fairness": {"quantum": 16.0}},
    "vllm-like": {},
}
"""The bounds of the presets, scaled to a world in which a request is done in a fifth of a second."""


@pytest.mark.parametrize("name", strategies.STRATEGIES)
def test_no_preset_starves_anybody_under_overload(name: str) -> None:
    """Two rivals a step, of higher priority, with a warm prefix and a goal, where one can be served: the
    victims, which have nothing of it and are long, are done all the same."""
    backend = TokenMemoryBackend(num_blocks=24, max_num_seqs=2, max_model_len=64)
    engine = fake_engine(backend, max_batched_tokens=16, passes=strategies.make(name, TUNED[name]))
    clock = engine.clock
    assert isinstance(clock, ManualClock)

    def ask(request_id: str, tokens: list[int], priority: int, tenant: str, ttft_s: float | None) -> None:
        params = SamplingParams(max_tokens=3)
        engine.add(
            Request(
                request_id, Tokens(tokens), params, arrival_s=clock.now(), priority=priority,
                namespace=Namespace(tenant=tenant), slo=SLO(ttft_s),
            )
        )  # fmt: skip

    victims = {f"victim{i}" for i in range(3)}
    for i, victim in enumerate(sorted(victims)):
        ask(victim, [50 + i] * 30, 0, "quiet", None)
    waiting_for = set(victims)
    for step in range(400):
        for i in range(2):
            ask(f"r{step}.{i}", [1, 2, 3, 4, step % 90, i], 2, "loud", 1.0)
        for output in engine.step():
            if output.finish_reason is not None:
                assert output.error is None
                waiting_for.discard(output.request_id)
        clock.advance(0.1)
        if not waiting_for:
            return
    raise AssertionError(f"{sorted(waiting_for)} still wait")
