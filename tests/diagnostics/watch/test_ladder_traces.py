"""The ladder's predictions on recorded traces, beside the reference cache run again with other memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from sagellm.benchmarks.replay.block_trace import block_trace
from sagellm.benchmarks.traces import read_trace
from sagellm.core.types import Tokens
from sagellm.diagnostics.watch.accesses import CacheAccess, KeptAccesses
from sagellm.diagnostics.watch.cache_view import CacheView
from sagellm.diagnostics.watch.counters import ServerCounters
from sagellm.diagnostics.watch.ladder import ESTIMATED, LOWER_BOUNDS, Ladder, Watched
from sagellm.diagnostics.watch.replays import WatchedRequests
from tests.diagnostics.watch.reference_cache import ReferenceCache

pytestmark = [pytest.mark.traces, pytest.mark.slow]

CONVERSATION = "mooncake_conversation_first_half.jsonl.xz"
SYNTHETIC = "mooncake_synthetic_first_half.jsonl.xz"
CODING = "cc_agentic_sessions_a.jsonl.xz"
SETTINGS = [
    (CONVERSATION, 1000),
    (CONVERSATION, 4000),
    (CONVERSATION, 12_000),
    (SYNTHETIC, 1000),
    (SYNTHETIC, 4000),
    (CODING, 1500),
    (CODING, 6000),
]
POINTS = 0.02
NUM_REQUESTS = 1500
MOST_ANSWER_BLOCKS = 8


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer, in blocks of one token: a token stands for all tokens of a block."""

    time_s: float
    prompt: list[int]
    answer: list[int]


@cache
def turns_of(path: Path) -> list[Turn]:
    """The first requests. The traces do not hold answers: each gets blocks that never come again."""
    trace = block_trace(read_trace(path))
    answer_token = -1
    turns = []
    for request in trace.requests[:NUM_REQUESTS]:
        num_blocks = min(MOST_ANSWER_BLOCKS, request.num_output_tokens // trace.block_tokens)
        answer = list(range(answer_token, answer_token - num_blocks, -1))
        answer_token -= num_blocks
        turns.append(Turn(request.time_s, request.ids.tolist(), answer))
    return turns


class Served:
    """The trace served by a cache of `num_blocks`: its events, its counters and what is seen of it.

    The watch begins after the first `num_before` requests; figures are of those behind."""

    def __init__(
        self, turns: list[Turn], num_blocks: int, *, reports_hits: bool = False, num_before: int = 0
    ) -> None:
        self.cache = ReferenceCache(num_blocks, reports_hits=reports_hits, block=1)
        for number, turn in enumerate(turns):
            if number == num_before:
                self._num_items_before = len(self.cache.items)
                before = self.cache.num_queried, self.cache.num_hit
            self.cache.serve(turn.prompt, turn.answer, time_s=turn.time_s)
        self._queried, self._hit = self.cache.num_queried - before[0], self.cache.num_hit - before[1]
        self.ratio = self._hit / self._queried

    def ladder(self) -> Ladder:
        kept = KeptAccesses()
        view = CacheView(on_access=kept.add)
        for item in self.cache.items[self._num_items_before :]:
            view.feed(0, item)
        view.finish()
        # Prompts of a server end inside a block; these end with one, so the counters have no ends.
        counters = ServerCounters("vLLM", "m", self._queried, self._hit)
        return Ladder(view, [Watched(counters, self.cache.num_blocks, 1)], list(kept))


@pytest.mark.parametrize(("name", "num_blocks"), SETTINGS)
def test_double_memory_is_predicted_from_events_alone(
    sagellm_traces: Path, name: str, num_blocks: int
) -> None:
    turns = turns_of(sagellm_traces / name)
    small, large = Served(turns, num_blocks), Served(turns, 2 * num_blocks)
    found = small.ladder().lru_from_events(2.0)
    print(f"{name} {num_blocks}: now {small.ratio:.4f}, double {found:.4f}, run {large.ratio:.4f}")
    assert found == pytest.approx(large.ratio, abs=POINTS)


@pytest.mark.parametrize(("name", "num_blocks"), [(CONVERSATION, 2000), (SYNTHETIC, 2000), (CODING, 3000)])
def test_replayed_requests_agree_with_the_cache_at_other_sizes(
    sagellm_traces: Path, name: str, num_blocks: int
) -> None:
    turns = turns_of(sagellm_traces / name)
    ladder = Served(turns, num_blocks, reports_hits=True).ladder()
    assert ladder.coverage == pytest.approx(1.0, abs=0.01)
    for factor in (0.5, 1.0, 2.0):
        run = Served(turns, int(factor * num_blocks)).ratio
        lru, adaptive, best = (ladder.replayed(policy, factor) for policy in ("lru", "adaptive", "optimum"))
        assert lru is not None and adaptive is not None and best is not None  # noqa: PT018
        print(f"{name} {num_blocks} x {factor}: lru {lru:.4f}, run {run:.4f}, {adaptive=:.4f}, {best=:.4f}")
        assert lru == pytest.approx(run, abs=POINTS)
        assert best >= max(lru, adaptive)


TUNED_ON = [(CONVERSATION, 4000), (CODING, 6000)]
JUDGED_ON = [(SYNTHETIC, 4000), (CONVERSATION, 2000), (CODING, 1500)]
NUM_BEFORE = 900


@pytest.mark.parametrize(("name", "num_blocks"), TUNED_ON + JUDGED_ON)
def test_a_watch_that_begins_with_a_full_cache(sagellm_traces: Path, name: str, num_blocks: int) -> None:
    """Beside all that is known: the whole trace, of which the same requests are counted."""
    turns = turns_of(sagellm_traces / name)
    watched = Served(turns, num_blocks, reports_hits=True, num_before=NUM_BEFORE)
    ladder = watched.ladder()
    answers = iter(range(10**9, 2 * 10**9))
    accesses = [
        CacheAccess(
            turn.time_s,
            0,
            Tokens([*turn.prompt, *(next(answers) for _ in turn.answer)]),
            len(turn.prompt),
        )
        for turn in turns
    ]
    whole = WatchedRequests(accesses)
    queried = sum(access.num_queried for access in accesses[NUM_BEFORE:])

    def known(policy: str, factor: float) -> float:
        return sum(whole.hits(policy, round(factor * num_blocks))[NUM_BEFORE:]) / queried

    lru, double = ladder.replayed("lru", 1.0), ladder.lru_from_events(2.0)
    assert lru is not None
    assert double is not None
    print(f"{name} {num_blocks}: lru {lru:.4f} / {known('lru', 1.0):.4f}")
    print(f"    double memory {double:.4f} / {known('lru', 2.0):.4f}")
    assert lru == pytest.approx(watched.ratio, abs=0.01)
    assert lru == pytest.approx(known("lru", 1.0), abs=0.01)
    assert double == pytest.approx(known("lru", 2.0), abs=0.02)
    assert list(ladder.limits()) == [ESTIMATED, LOWER_BOUNDS]
    for policy in ("adaptive", "optimum"):
        found = ladder.replayed(policy, 1.0)
        assert found is not None
        print(f"    {policy} {found:.4f} / {known(policy, 1.0):.4f}")
        assert found <= known(policy, 1.0) + 0.01
