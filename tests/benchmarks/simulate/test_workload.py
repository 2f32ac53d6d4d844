"""From a trace to requests: tokens by id, arrival times, turns, priorities."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.benchmarks.simulate.workload import (
    Arrivals,
    PromptContent,
    RequestMaker,
    WorkloadSpec,
    mean_rate,
    uncached_tokens,
    workload,
)
from sagellm.benchmarks.traces import read_trace
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.types import Tokens
from tests.benchmarks.simulate.stand_in import VOCAB, request, trace

LONG = 10_000


def tokens(ids: list[int], length: int, number: int = 0, *, block: int = 8, vocab: int = VOCAB) -> list[int]:
    return PromptContent(block, vocab).tokens(Tokens(ids), length, number).tolist()


def test_equal_ids_are_equal_tokens_and_others_are_not() -> None:
    one, other = tokens([5, 6], 16), tokens([5, 7], 16, 1)
    assert one[:8] == other[:8]
    assert all(a != b for a, b in zip(one[8:], other[8:], strict=True))
    assert len(set(one)) > 8


@given(st.lists(st.integers(0, 2**30 - 1), min_size=2, max_size=40, unique=True))
def test_ids_differ_in_each_pair_of_tokens(ids: list[int]) -> None:
    made = PromptContent(16, 2**16).tokens(Tokens(ids), 16 * len(ids), 0)
    blocks = np.array(made.tolist()).reshape(len(ids), 8, 2)
    for place in range(8):
        assert len({tuple(pair) for pair in blocks[:, place].tolist()}) == len(ids)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), st.integers(1, 60), st.integers(2, 200_000))
def test_lengths_are_exact_and_tokens_in_the_vocabulary(ids: list[int], length: int, vocab: int) -> None:
    for block in (1, 8):
        made = tokens(ids, length, 3, block=block, vocab=vocab)
        assert len(made) == length
        assert 0 <= min(made) <= max(made) < vocab


def test_what_no_id_names_is_the_requests_own() -> None:
    one, other = tokens([5], 20, 1), tokens([5], 20, 2)
    assert one[:8] == other[:8]
    assert one[8:] != other[8:]
    assert tokens([], 12, 1) == tokens([], 12, 1)
    assert tokens([], 12, 1) != tokens([], 12, 2)


def test_ids_of_one_token_are_the_tokens() -> None:
    assert tokens([1, 2, VOCAB + 3], 3, block=1) == [1, 2, 3]


def test_a_vocabulary_of_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 at least"):
        PromptContent(8, 1)


def test_more_blocks_than_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="request 0 of trace 'made' names 3 blocks of 8 tokens, its 16"):
        workload(trace(request(0, 16, 1, [1, 2, 3])), WorkloadSpec(), LONG)


def test_uncached_tokens_are_those_behind_what_came_before() -> None:
    made = trace(
        request(0, 20, 1, [1, 2, 3]),
        request(1, 24, 1, [1, 2, 4]),
        request(2, 16, 1, [1, 2], namespace="other"),
        request(3, 16, 1, [2, 3]),
    )
    assert uncached_tokens(made.requests, 8).tolist() == [20, 8, 16, 0]


# -- arrivals


def test_the_trace_is_compressed() -> None:
    times = [10.0, 12.0, 16.0]
    assert Arrivals(rate_scale=2).times(times, 0) == [0.0, 1.0, 3.0]
    assert Arrivals(rate=1).times(times, 0) == [0.0, 2 / 3, 2.0]
    assert mean_rate(times) == pytest.approx(1 / 3)
    assert Arrivals(rate=float("inf")).times(times, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("process", "cv", "expected"), [("poisson", 1, 1.0), ("bursty", 3, 3.0)])
def test_drawn_gaps_have_the_rate_and_the_variation(process: str, cv: float, expected: float) -> None:
    times = Arrivals(process, rate=5.0, cv=cv).times([0.0] * 40_000, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert 1 / gaps.mean() == pytest.approx(5.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(expected, rel=0.05)
    assert times == Arrivals(process, rate=5.0, cv=cv).times([0.0] * 40_000, seed=1)
    assert times != Arrivals(process, rate=5.0, cv=cv).times([0.0] * 40_000, seed=2)


@pytest.mark.parametrize("changes", [{"rate": 0}, {"rate_scale": -1}, {"cv": 0}, {"cv": float("inf")}])
def test_arrivals_out_of_range(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Arrivals(**changes)  # type: ignore[arg-type]


def test_unknown_arrivals() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'poisson'"):
        Arrivals("poison")


def test_a_trace_of_one_moment_has_no_rate() -> None:
    with pytest.raises(ConfigError, match="'poisson' or 'bursty'"):
        workload(trace(request(0, 4, 1), request(0, 4, 1)), WorkloadSpec(Arrivals(rate=2)), LONG)


# -- which requests


def test_what_does_not_fit_is_left_out_and_counted() -> None:
    made = trace(request(0, 10, 2), request(1, 10, 3), request(2, 0, 1), request(3, 1, 0), request(4, 1, 1))
    work = workload(made, WorkloadSpec(max_requests=4), 12)
    assert [one.num_input_tokens for one in work.requests] == [10, 1]
    assert work.left_out == {"too long or empty": 2, "behind the limit": 1}
    assert work.described()["output_tokens"] == 3, "a prompt without an answer draws one token"


def test_nothing_left_is_refused() -> None:
    with pytest.raises(ConfigError, match="context of 12 tokens"):
        workload(trace(request(0, 10, 3)), WorkloadSpec(), 12)


@pytest.mark.parametrize("changes", [{"max_requests": 0}, {"seed": -1}])
def test_specs_out_of_range(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        WorkloadSpec(**changes)  # type: ignore[arg-type]


def test_high_priority_is_a_share_of_the_small_ones() -> None:
    requests = [request(float(at), 2000 if at % 2 else 100, 1) for at in range(100)]
    work = workload(
        trace(*requests), WorkloadSpec(high_priority_share=0.2, high_priority_below=1000, seed=4), LONG
    )
    high = [number for number, one in enumerate(work.priorities) if one]
    assert len(high) == 10
    assert all(number % 2 == 0 for number in high)
    again = workload(
        trace(*requests), WorkloadSpec(high_priority_share=0.2, high_priority_below=1000, seed=4), LONG
    )
    other = workload(
        trace(*requests), WorkloadSpec(high_priority_share=0.2, high_priority_below=1000, seed=5), LONG
    )
    assert again.priorities == work.priorities != other.priorities


@pytest.mark.parametrize(("share", "below"), [(-0.1, 1), (1.1, 1), (0.5, -1)])
def test_high_priority_out_of_range(share: float, below: int) -> None:
    with pytest.raises(ConfigError, match="high priority"):
        WorkloadSpec(high_priority_share=share, high_priority_below=below)


# -- turns


def test_turns_follow_each_other() -> None:
    made = trace(
        request(0, 8, 1, session="a"),
        request(1, 8, 1, session="b"),
        request(2, 8, 1, session="a", meta={"think_time": 1.5}),
        request(3, 8, 1),
        request(4, 8, 1, session="a"),
    )
    work = workload(made, WorkloadSpec(Arrivals(rate_scale=2), closed_loop=True), LONG)
    assert work.follows == {0: 2, 2: 4}
    assert work.first() == [(0.0, 0), (0.5, 1), (1.5, 3)]
    assert (work.times_s[2], work.times_s[4]) == (1.5, 0.0)


def test_time_to_think_is_drawn() -> None:
    requests = [request(float(at), 8, 1, session=str(at % 10)) for at in range(2000)]
    work = workload(trace(*requests), WorkloadSpec(closed_loop=True, think_s=3.0), LONG)
    pauses = [work.times_s[number] for number in work.follows.values()]
    assert len(pauses) == 1990
    assert np.mean(pauses) == pytest.approx(3.0, rel=0.1)


def test_so_many_agents_begin_at_once() -> None:
    made = trace(*(request(9.0 * at, 8, 2, session=name) for at, name in enumerate("aabc")))
    work = workload(made, WorkloadSpec(closed_loop=True, agents=2, think_s=0.0), LONG)
    assert (work.first(), work.waiting) == ([(0.0, 0), (0.0, 2)], (3,))
    with pytest.raises(ConfigError, match="agents needs a closed loop"):
        WorkloadSpec(agents=2)
    with pytest.raises(ConfigError, match="at least 1"):
        WorkloadSpec(closed_loop=True, agents=0)


def test_a_closed_loop_needs_sessions() -> None:
    with pytest.raises(ConfigError, match="needs a trace with sessions"):
        workload(trace(request(0, 8, 1)), WorkloadSpec(closed_loop=True), LONG)
    with pytest.raises(ConfigError, match="0 or more seconds"):
        WorkloadSpec(closed_loop=True, think_s=-1.0)


def test_requests_have_the_lengths_of_the_trace() -> None:
    made = trace(request(0, 20, 7, [1, 2], session="s", namespace="n"))
    work = workload(made, WorkloadSpec(high_priority_share=1.0), LONG)
    one = RequestMaker(work, VOCAB).make(0, 3.5, 7)
    assert (len(one.tokens), one.scripted_output, one.params.max_tokens) == (20, 7, None)
    assert (one.arrival_s, one.priority, one.namespace.tenant, one.session_id) == (3.5, 1, "n", "s")


@pytest.mark.traces
def test_a_published_trace() -> None:
    if "SAGELLM_TRACES" not in os.environ:
        pytest.skip("SAGELLM_TRACES names no collection of traces")
    read = read_trace(Path(os.environ["SAGELLM_TRACES"]) / "mooncake_conversation_first_half.jsonl.xz")
    work = workload(read, WorkloadSpec(Arrivals(rate=2.0), high_priority_share=0.1), 131_072)
    maker = RequestMaker(work, 128_256)
    assert len(work.requests) == 5606
    assert work.times_s[-1] == pytest.approx(5605 / 2.0)
    seen: dict[int, bytes] = {}
    for number, one in enumerate(work.requests[:300]):
        data = maker.make(number, 0.0, 1).tokens.tobytes()
        assert len(data) == 4 * one.num_input_tokens
        for place, name in enumerate(one.ids.slice(0, one.num_input_tokens // 512)):
            block = data[2048 * place : 2048 * (place + 1)]
            assert seen.setdefault(name, block) == block
    assert len(set(seen.values())) == len(seen) > 1000
