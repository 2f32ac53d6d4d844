"""Admission by predicted memory, lifetimes, and full steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import ConfigError
from sagellm.core.plan import Chunk, Draft, RequestState, StepStart
from sagellm.core.protocols.lifetime import Prediction, PredictionRequest
from sagellm.core.protocols.scheduler_ir import BlockBudget, SchedulerPass
from sagellm.core.types import FinishReason, Request, RequestStatus, SamplingParams, Tokens
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir._reservation import peak_growth
from sagellm.kvmgr.scheduler_ir.passes.admission import AdmissionPass
from sagellm.kvmgr.scheduler_ir.passes.batching_efficiency import BatchingEfficiencyPass
from sagellm.kvmgr.scheduler_ir.passes.lifetime_aware import LifetimeAwarePass
from sagellm.kvmgr.scheduler_ir.passes.memory_aware_preemption import MemoryAwarePreemptionPass
from tests.builders import expected_tokens, fake_engine, request
from tests.kvmgr.scheduler_ir.passes.desk import Desk, DeskView, admit, state


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 30)), max_size=8))
def test_the_peak_is_that_of_a_walk_through_time(batch: list[tuple[int, int]]) -> None:
    now = sum(held for held, _ in batch)
    peak = 0
    for step in range(1, 31):
        peak = max(peak, sum(held + step for held, left in batch if left >= step) - now)
    held = np.array([float(one[0]) for one in batch])
    left = np.array([float(one[1]) for one in batch])
    assert max(0.0, peak_growth(held, left)) == peak


def test_no_request_overtakes_one_that_predicted_memory_keeps_waiting() -> None:
    desk = Desk(AdmissionPass(headroom=0.0), DeskView(available=20))
    desk.running = [admit(state("r", 8, max_tokens=24), 8)]
    desk.waiting = [state("fits", 8, max_tokens=4), state("large", 60), state("small", 4, max_tokens=1)]
    assert desk.step() == ["fits"]
    assert [(d.request_id, d.action) for d in desk.draft.decisions] == [("large", "wait")]


def test_the_head_passes_when_none_runs_and_after_a_while() -> None:
    desk = Desk(AdmissionPass(max_defer_s=10.0), DeskView(available=20))
    desk.waiting = [state("large", 60, max_tokens=1000)]
    assert desk.step() == ["large"]
    desk.running = [admit(state("r", 8), 8)]
    assert desk.step() == []
    desk.now_s = 9.0
    assert desk.step() == []
    desk.now_s = 10.0
    assert desk.step() == ["large"]


def test_a_blocked_queue_is_tried_again_when_a_request_left() -> None:
    calls = 0

    class Counting(AdmissionPass):
        def remaining(self, state: object) -> float:
            nonlocal calls
            calls += 1
            return super().remaining(state)  # type: ignore[arg-type]

    desk = Desk(Counting(headroom=0.0), DeskView(available=10))
    desk.running = [admit(state(f"r{i}", 8, max_tokens=24), 8) for i in range(3)]
    desk.waiting = [state("next", 16)]
    assert desk.step() == []
    once = calls
    for _ in range(20):
        assert desk.step() == []
    assert calls == once
    desk.running.pop()
    desk.view.available = 40
    assert desk.step() == ["next"]


def test_only_what_can_never_fit_is_rejected() -> None:
    desk = Desk(AdmissionPass(), DeskView(num_blocks=10, available=2))
    desk.waiting = [state("never", 41), state("later", 40)]
    assert desk.step() == ["later"]
    assert desk.draft.rejected == {"never": "out of KV memory: it needs 11 blocks, there are 10"}


def test_lengths_are_learned_from_what_ended() -> None:
    scheduler_pass = AdmissionPass(min_samples=4)
    desk = Desk(scheduler_pass)
    new = state("new", max_tokens=1000)
    assert scheduler_pass.remaining(new) == 1000
    for i in range(8):
        desk.waiting = [state(str(i), max_tokens=10 + i)]
        desk.step()
        done = desk.run_first()
        desk.step()
        done.tokens.extend([1] * (10 + i))
        done.status, done.finish_reason = RequestStatus.FINISHED, FinishReason.LENGTH
    desk.waiting = [new]
    desk.step()
    assert scheduler_pass.remaining(new) == 16  # three quarters of 10..17
    new.tokens.extend([1] * 14)
    assert scheduler_pass.remaining(new) == 17 - 14
    new.tokens.extend([1] * 10)
    assert scheduler_pass.remaining(new) == 24  # longer than all: as much again


@pytest.mark.parametrize(
    ("reason", "stop", "remaining"),
    [
        (FinishReason.ABORT, (), 1000),
        (FinishReason.ERROR, (), 1000),
        (FinishReason.LENGTH, (), 20),
        (FinishReason.STOP, (), 20),
        (FinishReason.ABORT, ("end",), 20),
    ],
)
def test_who_is_aborted_teaches_no_length(
    reason: FinishReason, stop: tuple[str, ...], remaining: int
) -> None:
    scheduler_pass = AdmissionPass(min_samples=1)
    desk = Desk(scheduler_pass)
    one = RequestState.of(Request("one", Tokens([1] * 8), SamplingParams(max_tokens=50, stop=stop)))
    desk.waiting = [one]
    desk.step()
    done = desk.run_first()
    desk.step()
    done.tokens.extend([1] * 20)
    done.status, done.finish_reason = RequestStatus.FINISHED, reason
    new = state("new", max_tokens=1000)
    desk.waiting = [new]
    desk.step()
    assert scheduler_pass.remaining(new) == remaining


def test_an_engine_that_aborts_teaches_no_length() -> None:
    scheduler_pass = AdmissionPass(min_samples=1)
    engine = fake_engine(TokenMemoryBackend(), passes=[scheduler_pass])
    new = state("new", max_tokens=1000)
    for number, abort in enumerate((True, False)):
        engine.add(request(str(number), [5] * 6, 4))
        engine.step()
        engine.step()
        if abort:
            assert engine.abort(str(number))
        engine.add(request(f"next {number}", [6] * 6, 4))
        while engine.has_work():
            engine.step()
        engine.add(request(f"last {number}", [7] * 6, 4))
        engine.step()
        engine.abort(f"last {number}")
        assert scheduler_pass.remaining(new) == 4


def test_a_quantile_is_a_share() -> None:
    with pytest.raises(ConfigError, match="quantile of admission must be in"):
        AdmissionPass(quantile=1.0)


# -- what fits


def _asked(view: DeskView, *waiting: RequestState, running: int = 1) -> Draft:
    """What becomes of prompts that all would enter in one step."""
    desk = Desk(MemoryAwarePreemptionPass(), view)
    inside = [admit(state(f"r{i}"), 8) for i in range(running)]
    draft = Draft(StepStart(0, 0.0), 2048, inside, list(waiting))
    for one in waiting:
        draft.chunks[one.request_id] = Chunk(one, 0, len(one.tokens), view.match(one))
    desk.scheduler_pass(draft, view)
    return draft


def test_the_reason_names_the_watermark_where_it_is_in_the_way() -> None:
    for available, told in (
        (2, "its prompt needs 3 blocks, 2 are available"),
        (3, "its prompt needs 3 blocks, 3 are available, and 2 must be left for those that run"),
        (4, "its prompt needs 3 blocks, 4 are available, and 2 must be left for those that run"),
    ):
        draft = _asked(DeskView(available=available), state("w", 12), running=2)
        assert [(one.action, one.reason) for one in draft.decisions] == [("wait", told)]
    assert _asked(DeskView(available=5), state("w", 12), running=2).decisions == []


def test_the_reason_names_the_request_that_waits_in_front() -> None:
    draft = _asked(DeskView(available=4), state("large", 40), state("small", 4))
    assert [(one.request_id, one.reason) for one in draft.decisions] == [
        ("large", "its prompt needs 10 blocks, 4 are available"),
        ("small", "large comes first and waits for memory"),
    ]


def test_what_a_ceiling_keeps_out_is_refused_when_nothing_runs() -> None:
    """With its own figures. While others run it waits, and nobody overtakes whoever came before it: by a
    prefix that they share they may use blocks that count on the ceiling."""

    class Capped(DeskView):
        def block_budget(self) -> BlockBudget:
            return BlockBudget(
                self.available, lambda account: {"poor": 2} if account.tenant == "poor" else {}
            )

    waiting = [state("large", 40), state("never", 16, tenant="poor"), state("small", 4)]
    draft = _asked(Capped(available=4), *waiting)
    assert [(one.request_id, one.action) for one in draft.decisions] == [
        ("large", "wait"), ("never", "wait"), ("small", "wait"),
    ]  # fmt: skip
    assert draft.chunks == {}
    draft = _asked(Capped(available=4), *waiting[1:], running=0)
    assert draft.rejected == {"never": "out of KV memory: its prompt needs 4 blocks, 2 are available"}
    assert list(draft.chunks) == ["small"]


def _preemptions(passes: list[SchedulerPass]) -> int:
    backend = TokenMemoryBackend(num_blocks=24, block_size=4, max_num_seqs=8, max_model_len=96)
    engine = fake_engine(backend, max_batched_tokens=64, passes=passes)
    for i in range(16):
        engine.add(request(str(i), [i] * 8, 30))
    got: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert all(got[str(i)] == expected_tokens(backend, [i] * 8, 30) for i in range(16))
    return engine.stats().num_preemptions


@pytest.mark.parametrize("make", [AdmissionPass, LifetimeAwarePass])
def test_predicted_memory_spares_preemptions(make: Callable[[], SchedulerPass]) -> None:
    assert _preemptions([]) > 5
    assert _preemptions([make()]) == 0


class Oracle:
    """Knows how long each will be; writes down what it is told."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self.lengths, self.asked, self.told = lengths, list[str](), dict[str, tuple[int, float]]()

    def predict(self, request: PredictionRequest) -> Prediction:
        self.asked.append(request.sequence_id)
        length = float(self.lengths[request.sequence_id])
        return Prediction(length, length, 1.0, {0.5: length, 0.9: 2 * length})

    def update(self, sequence_id: str, actual_length: int, actual_time: float) -> None:
        self.told[sequence_id] = (actual_length, actual_time)


def test_shortest_predicted_first_asking_for_few_a_step() -> None:
    oracle = Oracle({f"r{i}": 2 ** (9 - i) for i in range(9)})
    desk = Desk(LifetimeAwarePass(oracle, asks=3, reserve=False))
    desk.waiting = [state(f"r{i}", max_tokens=None) for i in range(9)]
    for step in (1, 2, 3):
        order = desk.step()
        assert len(oracle.asked) == 3 * step
    assert order == [f"r{i}" for i in reversed(range(9))]
    desk.step()
    assert len(oracle.asked) == 9


def test_the_predictor_is_taught_when_requests_end_and_asked_again_after_a_preemption() -> None:
    oracle = Oracle({"a": 5, "b": 7})
    desk = Desk(LifetimeAwarePass(oracle, reserve=False))
    a, b = state("a"), state("b", 12)
    desk.waiting = [a, b]
    desk.step()
    desk.waiting = []
    desk.running = [admit(a, 8), admit(b, 12)]
    desk.step(num_new_running=2)
    a.first_token_s, desk.now_s = 1.0, 3.0
    a.tokens.extend([1] * 5)
    a.status, a.finish_reason = RequestStatus.FINISHED, FinishReason.STOP
    b.status = RequestStatus.WAITING
    desk.running, desk.waiting = [], [b]
    desk.step()
    assert oracle.told == {"a": (13, 2.0)}
    assert oracle.asked == ["a", "b", "b"]


def test_the_quantile_is_reserved() -> None:
    oracle = Oracle({"r": 8, "w": 8})
    for quantile, order in ((0.5, ["w"]), (0.9, [])):
        scheduler_pass = LifetimeAwarePass(oracle, quantile=quantile, headroom=0.0)
        desk = Desk(scheduler_pass, DeskView(available=10))
        running = state("r", 8, max_tokens=None)
        desk.waiting = [running]
        desk.step()
        desk.waiting, desk.running = [state("w", 8, max_tokens=None)], [admit(running, 8)]
        assert desk.step(num_new_running=1) == order


# -- full steps


def test_like_lengths_stand_together_the_oldest_first() -> None:
    desk = Desk(BatchingEfficiencyPass())
    lengths = {"long": 100, "short": 5, "longer": 120, "shorter": 4, "middle": 20}
    desk.waiting = [state(name, n, arrival_s=float(i)) for i, (name, n) in enumerate(lengths.items())]
    assert desk.step() == ["long", "longer", "short", "shorter", "middle"]


def test_requests_that_fit_overtake_until_the_other_is_overdue() -> None:
    desk = Desk(BatchingEfficiencyPass(max_wait_s=5.0, watermark=0), DeskView(available=10))
    desk.waiting = [state("large", 60)]
    desk.waiting += [state(name, size, arrival_s=0.1) for name, size in (("a", 8), ("b", 8), ("c", 48))]
    assert desk.step() == ["a", "b", "large", "c"]
    assert [(d.request_id, d.action) for d in desk.draft.decisions] == [("large", "wait")]
    desk.run_first()
    desk.step()
    desk.run_first()
    desk.now_s = 5.0
    desk.waiting += [state(f"n{i}", 8, arrival_s=4.0) for i in range(90)]
    for _ in range(80):
        if desk.step()[0] == "large":
            break
        desk.run_first()
    assert desk.draft.waiting[0].request_id == "large"  # its turn: it waits at the front until it fits


def test_lower_priority_does_not_overtake_a_request_that_does_not_fit() -> None:
    desk = Desk(BatchingEfficiencyPass(watermark=0), DeskView(available=10))
    desk.waiting = [state("large", 60, priority=1), state("equal", 8, arrival_s=0.2, priority=1)]
    desk.waiting += [state("small", 8, arrival_s=0.1)]
    assert desk.step() == ["equal", "large", "small"]
    desk.run_first()
    assert desk.step() == ["large", "small"]


def _efficiency(passes: list[SchedulerPass], backlog: int) -> float:
    """Tokens computed of tokens offered, while at least as many wait as a step could take."""
    backend = TokenMemoryBackend(num_blocks=96, block_size=4, max_num_seqs=32, max_model_len=160)
    engine = fake_engine(backend, max_batched_tokens=64, passes=passes)
    lengths = [150 if i % 7 == 0 else 20 + i % 5 for i in range(backlog)]
    for i, length in enumerate(lengths):
        engine.add(request(str(i), [i % 97, *(k % 97 for k in range(length - 1))], 2))
    computed = offered = 0
    while engine.stats().num_waiting > 8:
        engine.step()
        assert engine.last_plan is not None
        computed, offered = computed + engine.last_plan.num_tokens, offered + 64
    return computed / offered


def test_steps_are_full_under_load() -> None:
    full = _efficiency([BatchingEfficiencyPass()], 120)
    assert full >= 0.85
    assert full >= _efficiency([], 120)
