"""Planning ahead changes when things are decided, never what is drawn."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.errors import CapacityError, PlanError
from sagellm.core.plan import Draft, ExecutionPlan, StepResult
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.types import FinishReason, Namespace, RequestOutput, Tokens
from sagellm.engines.build_kv import build_kv
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.eviction import PrefillCostModel
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from sagellm.kvmgr.scheduler_ir import PassPipeline, strategies
from tests.builders import check_books, expected_tokens, load_always, request, tiers_below
from tests.effort import examples
from tests.engines.kv_scenes import hints


def engine(
    backend: TokenMemoryBackend,
    *,
    strategy: str = "priority",
    overlap: bool = True,
    host_blocks: int = 0,
    **kv_options: Any,
) -> Engine:
    capability = backend.capability()
    clock, config = ManualClock(), KVConfig(block_size=capability.block_size, **kv_options)
    kv = build_kv(
        config,
        capability.num_blocks,
        groups=backend.get_kv_schema().groups,
        state_pages=backend.get_kv_schema().state_pages,
        max_chunk=24,
        tiers=tiers_below(backend, clock, host_blocks=host_blocks) if host_blocks else None,
        clock=clock,
    )
    load_always(kv)
    scheduler = PassPipeline(strategies.make(strategy))
    return Engine(backend, kv, scheduler, max_batched_tokens=24, overlap=overlap, clock=clock)


class Watched(TokenMemoryBackend):
    """Notes when a step begins and ends; waits before it ends until it may."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[int] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def execute(self, plan: ExecutionPlan) -> StepResult:
        self.seen.append(plan.step)
        assert self.may_end.wait(10)
        return super().execute(plan)


def test_the_next_step_is_computing_when_one_has_landed() -> None:
    backend = Watched()
    busy = engine(backend)
    busy.add(request("a", range(5), 20))
    busy.step()  # the prompt: planned alone
    busy.step()
    for _ in range(100):
        if len(backend.seen) == 3:
            break
        threading.Event().wait(0.01)
    assert backend.seen == [0, 1, 2], "step 2 took off when step 1 had landed"
    assert len(busy._request_table.states["a"].tokens) == 5 + 2
    busy.close()


def steps(busy: Engine) -> list[tuple[ExecutionPlan, bool]]:
    """Steps until all have ended: each one's plan, and whether it was planned ahead."""
    seen = []
    while busy.has_work():
        flight = busy._in_flight
        busy.step()
        assert busy.last_plan is not None
        seen.append((busy.last_plan, flight is not None))
        check_books(busy)
    return seen


def test_prompts_and_admissions_are_planned_ahead() -> None:
    busy = engine(TokenMemoryBackend(num_blocks=200))
    for number in range(4):
        busy.add(request(str(number), range(number, number + 40), 8))
    seen = steps(busy)
    assert [ahead for _, ahead in seen] == [False] + [True] * (len(seen) - 1)
    assert sum(bool(plan.joined) for plan, _ in seen) > 2, "not all were admitted in the first step"
    assert all(plan.num_tokens == 24 for plan, _ in seen[:6]), "no step waits for a result"


def test_a_prompt_in_flight_is_reused_by_the_step_planned_meanwhile() -> None:
    def cached(*, overlap: bool) -> list[int]:
        busy = engine(TokenMemoryBackend(num_blocks=200), overlap=overlap)
        prompt = range(20)
        for name in "abc":
            busy.add(request(name, prompt, 4))
        joined = [join for plan, _ in steps(busy) for join in plan.joined]
        return [join.num_computed for join in joined]

    assert cached(overlap=True) == cached(overlap=False)
    assert max(cached(overlap=True)) >= 16


def test_who_reaches_its_length_is_not_in_the_step_behind() -> None:
    busy = engine(TokenMemoryBackend(num_blocks=200))
    busy.add(request("short", range(5), 3))
    busy.add(request("long", range(5, 9), 9))
    decoding = [len(plan.decode_rows) for plan, _ in steps(busy)]
    assert decoding == [0, 2, 2, 1, 1, 1, 1, 1, 1], "nothing is computed for nobody"


def test_who_ended_is_dropped_from_the_step_in_flight() -> None:
    backend = Watched()
    prompt = list(range(7))
    drawn = expected_tokens(backend, prompt, 12)
    end = drawn[4]
    busy = engine(backend)
    busy.add(request("stops", prompt, 12, stop_token_ids=(end,)))
    busy.add(request("goes on", [9, 8, 7], 12))
    got: dict[str, list[int]] = {}
    while busy.has_work():
        for output in busy.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
        check_books(busy)
    assert got["stops"] == drawn[: drawn.index(end) + 1]
    assert got["goes on"] == expected_tokens(backend, [9, 8, 7], 12)
    assert busy.kv.block_states().active == 0


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), seed=st.integers(0, 10_000), strategy=st.sampled_from(sorted(strategies.STRATEGIES)))
def test_the_same_tokens_as_without(  # noqa: C901 - one story
    data: st.DataObject, seed: int, strategy: str
) -> None:
    """Small memory, stops, aborts, forks, compaction, failing steps: every request gets its own tokens."""
    draw = random.Random(seed)

    class Failing(TokenMemoryBackend):
        def execute(self, plan: ExecutionPlan) -> StepResult:
            if plan.sample_rows and draw.random() < fails:
                raise CapacityError("for once") if draw.random() < 0.5 else RuntimeError("for once")
            return super().execute(plan)

    fails = data.draw(st.sampled_from([0.0, 0.0, 0.05]))
    block = data.draw(st.sampled_from([1, 2, 4]))
    host_blocks = data.draw(st.sampled_from([0, 0, 12, 80]))
    num_blocks = data.draw(st.integers(32, 120)) // block
    some = st.sampled_from([(None,), (None, 3), (None, None, 5, 9)])
    windows = (None,) if host_blocks else data.draw(some)
    backend = Failing(num_blocks * len(windows), block, max_model_len=48, windows=windows)
    reuse = data.draw(st.sampled_from([{}, {}, {"index_as_computed": True}, {"prefix_caching": False}]))
    busy = engine(backend, strategy=strategy, host_blocks=host_blocks, **reuse)
    expected: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}
    gone: set[str] = set()

    def take() -> None:
        for output in busy.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is FinishReason.ERROR:
                gone.add(output.request_id)
        check_books(busy)
        busy.clock.advance(0.05)  # type: ignore[attr-defined]

    for number in range(data.draw(st.integers(1, 8))):
        name, prompt = str(number), [draw.randrange(3) for _ in range(draw.randrange(1, 14))]
        most = draw.randrange(1, 16)
        tokens = expected_tokens(backend, prompt, most)
        stop = draw.choice(tokens)
        stops = (stop,) if draw.random() < 0.5 else ()
        expected[name] = tokens[: tokens.index(stop) + 1] if stops else tokens
        group = draw.choice([None, None, None, "together"])
        more = {"stop_token_ids": stops, "priority": draw.randrange(2), "group": group}
        busy.add(request(name, prompt, most, **more))
        for _ in range(draw.randrange(4)):
            take()
        if draw.random() < 0.2:
            victim = str(draw.randrange(number + 1))
            if busy.abort(victim):
                gone.add(victim)
            check_books(busy)
        if draw.random() < 0.2:
            busy.compact()
            check_books(busy)
    for _ in range(2000):
        if not busy.has_work():
            break
        take()
    assert not busy.has_work()
    for name, tokens in expected.items():
        mine = got.get(name, [])
        assert mine == (tokens[: len(mine)] if name in gone else tokens), name
    assert busy.kv.block_states().active == 0
    assert not fails or len(gone) <= len(expected)
    busy.close()


def test_a_fork_waits_for_the_step_in_flight() -> None:
    backend = TokenMemoryBackend()
    busy = engine(backend)
    busy.add(request("a", range(6), 9))
    for _ in range(4):
        busy.step()
    busy.fork("a", "b")
    got: dict[str, list[int]] = {"a": [], "b": []}
    while busy.has_work():
        for output in busy.step():
            got[output.request_id].extend(output.new_token_ids)
        check_books(busy)
    whole = expected_tokens(backend, range(6), 20)
    assert got["a"] == whole[9 - len(got["a"]) : 9]
    at = next(at for at in range(9) if whole[at : at + len(got["b"])] == got["b"])  # it goes on from there
    assert at > 0


def test_closing_waits_for_what_is_in_flight() -> None:
    backend = Watched()
    busy = engine(backend)
    busy.add(request("a", range(5), 20))
    for _ in range(3):
        busy.step()
    busy.close()
    assert busy.kv.block_states().active == 0
    with pytest.raises(RuntimeError):
        busy._worker.submit(print)  # type: ignore[union-attr]


class Once:
    """A pass that raises in some of its calls."""

    name = "once"

    def __init__(self, errors: dict[int, Exception]) -> None:
        self.errors = errors
        self.calls = 0

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        self.calls += 1
        if self.calls in self.errors:
            raise self.errors[self.calls]


PROMPTS = {"a": list(range(8)), "b": [5, 6], "c": [7, 7, 8]}


def drain(busy: Engine) -> dict[str, list[RequestOutput]]:
    got: dict[str, list[RequestOutput]] = {}
    while busy.has_work():
        for output in busy.step():
            got.setdefault(output.request_id, []).append(output)
        check_books(busy)
    return got


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_pass_that_raises_while_a_step_is_in_flight(at: int, first: int) -> None:
    """An error goes out, the step stays in flight, and who is aborted meanwhile takes nobody's token."""
    backend = TokenMemoryBackend()
    busy = engine(backend)
    errors: dict[int, Exception] = {at: ValueError("a user's mistake")}
    if first:
        errors[at - first] = PlanError("nothing of it")
    busy.scheduler.use([Once(errors)])
    for name, prompt in PROMPTS.items():
        busy.add(request(name, prompt, 9))
    got: dict[str, list[int]] = {}
    for _ in range(60):
        if not busy.has_work():
            break
        try:
            for output in busy.step():
                got.setdefault(output.request_id, []).extend(output.new_token_ids)
        except ValueError:
            busy.abort("a")
        except PlanError:
            continue
        check_books(busy)
    for name in "bc":
        assert got[name] == expected_tokens(backend, PROMPTS[name], 9)
    assert busy.kv.block_states().active == 0


class NotFinite(TokenMemoryBackend):
    """Draws no token of the vocabulary behind the prompts of requests whose id begins with "bad"."""

    def execute(self, plan: ExecutionPlan) -> StepResult:
        result = super().execute(plan)
        names = {op.row: op.request_id for op in plan.prefills}
        drawn = zip(plan.sample_rows, result.token_ids, strict=True)
        bad, vocab_size = {row for row in names if names[row].startswith("bad")}, self._capability.vocab_size
        return StepResult(result.step, tuple(vocab_size if row in bad else token for row, token in drawn))


def test_kv_of_logits_that_are_not_finite_is_not_kept() -> None:
    for as_computed in (False, True):
        busy = engine(NotFinite(), index_as_computed=as_computed)
        busy.add(request("bad", range(20), 4))
        assert drain(busy)["bad"][-1].finish_reason is FinishReason.ERROR
        assert busy.kv.block_states().cached == 0
        busy.add(request("good", range(20), 2))
        [*_, last] = drain(busy)["good"]
        assert last.num_cached_tokens == 0
        busy.close()


@pytest.mark.parametrize("index", ["radix", "hashed"])
def test_a_request_planned_ahead_keeps_the_blocks_that_it_shares(index: str) -> None:
    """The one that computes them ends, and they are not to be kept."""
    backend = NotFinite()
    busy = engine(backend, index=index)
    good = [*range(12), *range(50, 54)]
    busy.add(request("bad", range(24), 4))
    busy.add(request("good", good, 4))
    got = drain(busy)
    assert got["bad"][-1].finish_reason is FinishReason.ERROR
    assert got["good"][0].num_cached_tokens == 12
    assert [token for one in got["good"] for token in one.new_token_ids] == expected_tokens(backend, good, 4)
    busy.close()


@pytest.mark.parametrize("index", ["radix", "hashed"])
def test_a_prefix_of_a_step_in_flight_is_pinned_behind_it(index: str) -> None:
    """The step has published it, and fails."""

    class Fails(TokenMemoryBackend):
        fails = True

        def execute(self, plan: ExecutionPlan) -> StepResult:
            if self.fails and len(plan.prefills) == 2:
                self.fails = False
                raise CapacityError("for once")
            return super().execute(plan)

    backend, prompt = Fails(), range(18)
    busy = engine(backend, strategy="vllm-like", index=index, index_as_computed=True)
    busy.add(request("first", range(90, 94), 8))
    busy.step()
    for name in "ab":
        busy.add(request(name, prompt, 4))
    busy.step()
    assert busy.kv.is_published("a")
    pinned = busy.pin_prefix(Tokens(prompt), Namespace())
    assert pinned.num_blocks == 0
    got = drain(busy)
    for name in "ab":
        assert [t for one in got[name] for t in one.new_token_ids] == expected_tokens(backend, prompt, 4)
    pinned.release()
    busy.close()


class ClearOnce:
    """A pass that has the cache evicted in its first call."""

    name = "clear_once"

    def __init__(self) -> None:
        self.engine: Engine | None = None

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        if self.engine is not None:
            self.engine.kv.clear_cache()
            self.engine = None


@pytest.mark.parametrize("index", ["radix", "hashed"])
@pytest.mark.parametrize(("num_shared", "num_behind", "token_s"), [(12, 21, 6e-5), (24, 29, 3.8e-5)])
def test_a_load_behind_what_a_failed_step_has_published_is_dropped(
    index: str, num_shared: int, num_behind: int, token_s: float
) -> None:
    """The load of "b" begins with what the step in flight computes for "a": a part of it, or all.

    Loading these blocks alone, for "a", would take longer than computing them.
    """

    class FailsOnce(TokenMemoryBackend):
        fails = False

        def execute(self, plan: ExecutionPlan) -> StepResult:
            if self.fails:
                self.fails = False
                raise CapacityError("for once")
            return super().execute(plan)

    backend, clear = FailsOnce(num_blocks=40), ClearOnce()
    busy = engine(backend, host_blocks=80, index=index, index_as_computed=True)
    first, second = range(40), [*range(num_shared), *range(60, 60 + num_behind)]
    busy.add(request("stored", second, 1))
    drain(busy)
    tiers = busy.kv.tiers
    assert isinstance(tiers, HierarchyManager)
    tiers._costs = PrefillCostModel(4, seconds_per_token=token_s)
    busy.scheduler.use([clear, *strategies.make("priority")])
    clear.engine, backend.fails = busy, True
    busy.add(request("a", first, 4))
    busy.add(request("b", second, 4))
    busy.step()
    assert not backend.fails
    assert busy.kv.index.num_cached == 0
    got = {name: [t for one in outputs for t in one.new_token_ids] for name, outputs in drain(busy).items()}
    assert got == {name: expected_tokens(backend, p, 4) for name, p in {"a": first, "b": second}.items()}
    assert tiers.states()[0].loaded > 0
    busy.close()


@pytest.mark.parametrize("index", ["radix", "hashed"])
def test_kv_that_is_not_kept_is_not_kept_by_a_load_that_has_not_started(index: str) -> None:
    """A request of the same step has ended before, and expects a prompt that begins alike."""
    backend, clear = NotFinite(num_blocks=40), ClearOnce()
    busy = engine(backend, host_blocks=80, index=index)
    first, second = range(20), [*range(12), *range(60, 81)]
    busy.add(request("stored", second, 1))
    drain(busy)
    tiers = busy.kv.tiers
    assert isinstance(tiers, HierarchyManager)
    tiers._costs = PrefillCostModel(4, seconds_per_token=6e-5)
    busy.scheduler.use([clear, *strategies.make("priority")])
    clear.engine = busy
    busy.add(replace(request("ends", range(90, 94), 1), kv_hints=hints("kv.expect", token_ids=second)))
    busy.add(request("bad", first, 4))
    busy.step()
    assert busy.kv.index.num_cached == 1
    drain(busy)
    assert tiers.states()[0].loaded == 0
    busy.close()


@pytest.mark.parametrize("how", ["stop", "abort"])
def test_nobody_ends_for_one_that_left_a_step_in_flight(how: str) -> None:
    """The step that computes a token of `a` for nothing fails because of it."""
    drawn = expected_tokens(TokenMemoryBackend(), PROMPTS["a"], 20)

    class Failing(TokenMemoryBackend):
        def execute(self, plan: ExecutionPlan) -> StepResult:
            if any(position == 11 for position in plan.decode_positions):
                raise RuntimeError("a's position")
            return super().execute(plan)

    busy = engine(Failing())
    busy.add(request("a", PROMPTS["a"], 20, stop_token_ids=(drawn[3],) if how == "stop" else ()))
    busy.add(request("b", PROMPTS["b"], 6))
    got: list[RequestOutput] = []
    while busy.has_work():
        got += [output for output in busy.step() if output.request_id == "b"]
        state = busy._request_table.states.get("a")
        if how == "abort" and state is not None and len(state.tokens) == 12:
            busy.abort("a")
    assert got[-1].finish_reason is FinishReason.LENGTH
    assert [token for one in got for token in one.new_token_ids] == expected_tokens(
        TokenMemoryBackend(), PROMPTS["b"], 6
    )


def test_an_id_used_again_is_told_nothing_of_the_first() -> None:
    backend = TokenMemoryBackend()
    busy = engine(backend)
    busy.add(request("a", PROMPTS["a"], 12))
    busy.add(request("z", [3, 3], 12))
    for _ in range(3):
        busy.step()
    busy.compact()  # lands the step in flight
    busy.abort("a")
    busy.add(request("a", [9, 9, 9], 3))
    told = [token for output in drain(busy)["a"] for token in output.new_token_ids]
    assert told == expected_tokens(backend, [9, 9, 9], 3)


def test_requests_of_one_step_share_as_without() -> None:
    def computed(*, overlap: bool) -> int:
        backend = TokenMemoryBackend(num_blocks=200)
        busy = engine(backend, strategy="vllm-like", overlap=overlap, index_as_computed=True)
        busy.max_batched_tokens = 64
        for name in "abcd":
            busy.add(request(name, range(22), 3))
        return sum(plan.num_prefill_tokens for plan, _ in steps(busy))

    assert computed(overlap=True) == computed(overlap=False)


def test_after_a_failed_step_nobody_says_what_it_did_not_reuse() -> None:
    class Fails(TokenMemoryBackend):
        calls = 0

        def execute(self, plan: ExecutionPlan) -> StepResult:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("for once")
            return super().execute(plan)

    busy = engine(Fails(num_blocks=200))
    busy.add(request("x", range(20), 3))
    busy.add(request("y", [*range(20), 3], 3))
    joined: dict[str, int] = {}
    told: dict[str, int] = {}
    while busy.has_work():
        told |= {output.request_id: output.num_cached_tokens for output in busy.step()}
        assert busy.last_plan is not None
        joined |= {join.request_id: join.num_computed for join in busy.last_plan.joined}
    assert told == joined


def test_a_step_took_what_it_took_not_what_was_waited_for() -> None:
    class Timed(TokenMemoryBackend):
        def execute(self, plan: ExecutionPlan) -> StepResult:
            busy.clock.advance(2.0)  # type: ignore[attr-defined]
            return super().execute(plan)

    busy = engine(Timed())
    busy.add(request("a", range(8), 6))
    while busy.has_work():
        busy.step()
        assert busy.last_step.duration_s == 2.0
