"""Deadlines, and steps that are short enough."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.plan import Chunk, Decodes, Draft, RequestState, StepStart
from sagellm.core.protocols.scheduler_ir import StepFacts
from sagellm.core.types import SLO, Request, SamplingParams, Tokens
from sagellm.kvmgr.scheduler_ir._step_time import StepTimeModel
from sagellm.kvmgr.scheduler_ir.passes.slo_aware import SLOAwarePass
from tests.kvmgr.scheduler_ir.passes.desk import Desk, admit, state


def at_pace(desk: Desk, token_s: float = 0.01) -> None:
    """The engine is known to compute a token of a prompt in `token_s` seconds, and its steps cost nothing."""
    assert isinstance(desk.scheduler_pass, SLOAwarePass)
    pace = desk.scheduler_pass.step_time
    pace.fixed_s, pace.row_s, pace.token_s, pace.is_known = 1e-12, 0.0, token_s, True


def test_earliest_deadline_first_and_the_hopeless_last() -> None:
    desk = Desk(SLOAwarePass())
    at_pace(desk)
    desk.waiting = [
        state("no goal"),
        state("hopeless", 100, ttft_s=0.5),
        state("late", 10, ttft_s=3.0),
        state("early", 10, ttft_s=1.0),
        state("urgent", 10, ttft_s=9.0, priority=1),
    ]
    assert desk.step() == ["urgent", "early", "late", "no goal", "hopeless"]


def test_a_request_that_became_late_falls_back_without_an_arrival() -> None:
    desk = Desk(SLOAwarePass())
    at_pace(desk)
    desk.waiting = [state("short", 10, ttft_s=1.0), state("long", 10, ttft_s=2.0)]
    assert desk.step() == ["short", "long"]
    desk.now_s = 0.95
    assert desk.step() == ["long", "short"]


def test_a_default_goal_and_the_first_token_out() -> None:
    desk = Desk(SLOAwarePass(ttft_s=2.0))
    at_pace(desk)
    begun = state("begun")
    begun.first_token_s, begun.num_preemptions = 0.5, 1
    desk.waiting = [state("own", ttft_s=3.0), state("default"), begun]
    assert desk.step() == ["begun", "default", "own"]


@settings(max_examples=150, deadline=None)
@given(jobs=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=6))
def test_as_many_make_it_as_in_the_best_of_all_orders(jobs: list[tuple[int, int]]) -> None:
    desk = Desk(SLOAwarePass())
    at_pace(desk, 1.0)
    desk.waiting = [state(str(i), cost, ttft_s=goal + 1e-6) for i, (cost, goal) in enumerate(jobs)]
    order = desk.step()

    def num_in_time(names: list[str]) -> int:
        done, made = 0, 0
        for name in names:
            cost, goal = jobs[int(name)]
            done += cost
            made += done <= goal
        return made

    assert num_in_time(order) == max(num_in_time(list(one)) for one in permutations(order))


def _running(name: str, tpot_s: float | None) -> RequestState:
    request = Request(name, Tokens([1, 2, 3]), SamplingParams(), slo=SLO(None, tpot_s))
    return RequestState.of(request)


def test_steps_are_no_longer_than_the_shortest_goal_of_running_requests() -> None:
    desk = Desk(SLOAwarePass(tpot_s=0.5, margin=1.0, min_prefill=4))
    tight, other = _running("tight", 0.1), _running("other", None)
    desk.waiting = [tight, other]
    desk.step()
    admit(tight, 2)
    admit(other, 2)
    desk.waiting = [state("new", 100)]

    def budget(chunk_tokens: int = 0) -> int:
        at_pace(desk)
        desk.step()
        draft = desk.draft
        draft.decodes = Decodes((tight, other))
        draft.token_budget = 1000
        long = admit(state("long", 500))
        draft.chunks = {"long": Chunk(long, 0, chunk_tokens)} if chunk_tokens else {}
        desk.scheduler_pass(draft, desk.view)
        assert all(chunk.num_tokens <= draft.token_budget - 2 for chunk in draft.chunks.values())
        return draft.token_budget

    assert budget() in (11, 12)  # 0.1 s are 10 tokens, beside two in decode
    assert budget(chunk_tokens=500) in (11, 12)
    tight.status = tight.status.FINISHED
    assert budget() in (51, 52)


def test_no_goal_leaves_the_budget() -> None:
    desk = Desk(SLOAwarePass())
    at_pace(desk)
    desk.waiting = [state("a", 100)]
    desk.step(token_budget=777)
    assert desk.draft.token_budget == 777


@given(
    fixed_s=st.floats(1e-4, 0.1),
    row_s=st.floats(1e-5, 1e-3),
    token_s=st.floats(1e-6, 1e-3),
    sizes=st.lists(st.integers(64, 4096), min_size=3, unique=True),
)
def test_the_pace_is_learned_from_steps(
    fixed_s: float, row_s: float, token_s: float, sizes: list[int]
) -> None:
    pace = StepTimeModel()
    for number in range(60):
        for size in sizes[:4]:
            decodes = (7 * number + size) % 40
            pace.observe(StepFacts(fixed_s + row_s * decodes + token_s * size, decodes, size))
    for size in sizes:
        truth_s = fixed_s + 20 * row_s + token_s * size
        assert abs(pace.prefill_s(size, size, 20) / truth_s - 1) < 0.1
    assert pace.tokens_in(0.0, 20) == 0


def test_what_a_step_costs_by_itself_is_not_taken_for_the_price_of_its_tokens() -> None:
    """Or short steps would look dear by the token, and so be made shorter still."""
    pace = StepTimeModel()
    pace.observe(StepFacts(0.012 + 3e-5 * 8192, 0, 8192))
    for number in range(300):
        room = max(128, pace.tokens_in(0.030, 8))
        pace.observe(StepFacts(0.012 + 3e-5 * room, 8, room + number % 2))
    assert 500 < pace.tokens_in(0.030, 8) < 650  # 0.018 s are 600 tokens


def test_one_stray_step_does_not_spoil_the_pace() -> None:
    pace = StepTimeModel()
    for _ in range(20):
        pace.observe(StepFacts(0.1, 0, 1000))
    pace.observe(StepFacts(60.0, 0, 1000))
    assert pace.token_s < 3e-4
    same = StepFacts(0.5, 0, 1000)
    pace.observe(same)
    token_s = pace.token_s
    pace.observe(same)
    assert pace.token_s == token_s


def beside_a_decode(desk: Desk, runs: RequestState) -> int:
    """The token budget that the pass leaves a step in which `runs` decodes while others wait."""
    draft = Draft(StepStart(desk.num_steps, desk.now_s), 2048, [runs], list(desk.waiting))
    draft.decodes = Decodes((runs,))
    desk.num_steps += 1
    desk.scheduler_pass(draft, desk.view)
    return draft.token_budget


def with_a_decode(**options: float) -> tuple[Desk, RequestState]:
    """A request that decodes and wants a token each 20 ms, and long prompts that wait."""
    desk = Desk(SLOAwarePass(ttft_s=5.0, margin=1.0, min_prefill=1, **options))
    runs = _running("runs", 0.02)
    desk.waiting = [runs, *(state(f"long {i}", 4000) for i in range(20))]
    desk.step()
    admit(runs, 2)
    desk.waiting = desk.waiting[1:]
    desk.view.available = 990
    return desk, runs


def knows_the_cost(desk: Desk) -> None:
    """Steps take 10 ms and 30 µs for each token of a prompt."""
    assert isinstance(desk.scheduler_pass, SLOAwarePass)
    for num_tokens in (64, 512, 2048):
        for num_decodes in (0, 8):
            desk.scheduler_pass.step_time.observe(
                StepFacts(0.010 + 3e-5 * num_tokens, num_decodes, num_tokens)
            )


def tokens_of_steps(desk: Desk, runs: RequestState, num_steps: int) -> list[int]:
    """Tokens of prompts that each step computes, all beside a decode."""
    runs.first_token_s = 0.0
    found = []
    for _ in range(num_steps):
        num_tokens = beside_a_decode(desk, runs) - 1
        found.append(num_tokens)
        desk.view.last_step = StepFacts(0.010 + 3e-5 * num_tokens, 1, num_tokens)
        desk.now_s += desk.view.last_step.duration_s
    return found


def tokens_per_s(min_throughput: float) -> float:
    desk, runs = with_a_decode(min_throughput=min_throughput)
    knows_the_cost(desk)
    return sum(tokens_of_steps(desk, runs, 6000)) / desk.now_s


def test_short_steps_cost_no_more_throughput_than_they_may() -> None:
    full = 2048 / (0.010 + 3e-5 * 2048)
    assert tokens_per_s(0.0) < 0.65 * full
    assert 0.75 * full < tokens_per_s(0.8) < 0.9 * full


def num_full_steps(num_served: int) -> int:
    """Of 3,000 steps in which the same 20 requests wait, behind so many others that were served."""
    desk, runs = with_a_decode()
    knows_the_cost(desk)
    stay, served = desk.waiting, [state(f"served {i}", 10) for i in range(num_served)]
    desk.waiting = stay + served
    beside_a_decode(desk, runs)
    for one in served:
        admit(one, 10)
    desk.waiting = stay
    return tokens_of_steps(desk, runs, 3000).count(2047)


def test_short_steps_go_on_while_few_requests_wait_beside_those_served() -> None:
    assert num_full_steps(2000) == 0
    assert num_full_steps(10) > 100


def test_a_late_first_token_frees_the_steps() -> None:
    desk, runs = with_a_decode()
    at_pace(desk, 1e-4)
    runs.first_token_s = 4.9
    assert beside_a_decode(desk, runs) in (200, 201)  # 20 ms are 200 tokens
    runs.first_token_s = 5.1
    assert beside_a_decode(desk, runs) == 2048
