"""Our generator: repeatable, and of the shape that it promises."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sagellm.benchmarks.traces import Trace, read_trace, write_trace
from sagellm.benchmarks.traces.summary import summarize
from sagellm.benchmarks.traces.synth import PROFILES, SUBAGENT, profile, synthesize
from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError, UnknownNameError

GOLDEN = Path(__file__).parents[1] / "golden" / "traces"
KEPT: dict[str, dict[str, Any]] = {
    "chat": {"duration_s": 600.0, "sessions_per_s": 0.15},
    "agents": {
        "duration_s": 3000.0, "block_tokens": 1024, "sessions_per_s": 0.004, "turns": 20, "subagents": 0.1,
    },
    "tenants": {"duration_s": 120.0, "block_tokens": 256, "num_system_prompts": 12},
}  # fmt: skip
"""The arguments in the README of the kept traces."""


@pytest.mark.parametrize("kind", KEPT)
def test_the_kept_traces_are_what_the_generator_makes(tmp_path: Path, kind: str) -> None:
    kept = GOLDEN / f"{kind}.jsonl"
    write_trace(synthesize(kind, **KEPT[kind]), tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == kept.read_bytes()
    assert kept.stat().st_size < 100_000


FIGURES = {
    "chat": (296, 6742, 2063),
    "agents": (339, 9924, 798),
    "tenants": (282, 2718, 637),
}


@pytest.mark.parametrize("kind", FIGURES)
def test_figures_of_the_kept_traces(kind: str) -> None:
    summary = summarize(read_trace(GOLDEN / f"{kind}.jsonl"))
    assert (summary.requests, summary.blocks, summary.unique_blocks) == FIGURES[kind]


def small(kind: str, **changes: Any) -> Trace:
    return synthesize(kind, **({"duration_s": 300.0} | changes))


@pytest.mark.parametrize("kind", PROFILES)
def test_the_seed_decides(kind: str) -> None:
    assert small(kind) == small(kind)
    assert small(kind, seed=1).requests != small(kind).requests


@pytest.mark.parametrize("kind", PROFILES)
def test_requests_are_in_order_and_within_the_duration(kind: str) -> None:
    requests = small(kind).requests
    times = [request.time_s for request in requests]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 300
    for request in requests:
        assert len(request.ids) == cdiv(request.num_input_tokens, 64)
        assert request.num_output_tokens >= 1


def test_a_prompt_carries_the_turns_before_it() -> None:
    """Whole blocks of a prompt begin the next one; a partial block does not come again."""
    turns: defaultdict[Any, list[Any]] = defaultdict(list)
    for request in small("chat", duration_s=2000.0).requests:
        turns[request.session].append(request)
    compared = 0
    for of_session in turns.values():
        assert [one.meta["turn"] for one in of_session] == list(range(1, len(of_session) + 1))
        for before, after in pairwise(of_session):
            whole = before.num_input_tokens // 64
            assert after.ids.tolist()[:whole] == before.ids.tolist()[:whole]
            if before.num_input_tokens % 64:
                assert before.ids[whole] not in after.ids.tolist()
            assert after.num_input_tokens > before.num_input_tokens + before.num_output_tokens
            assert after.time_s > before.time_s
            compared += 1
    assert compared > 100


def test_system_prompts_are_shared_by_a_zipf_law() -> None:
    requests = small("shared_prompts", duration_s=2000.0, num_system_prompts=4, zipf=1.0).requests
    by_first_block = Counter(request.ids[0] for request in requests)
    assert len(by_first_block) == 4
    shares = [count / len(requests) for _, count in by_first_block.most_common()]
    assert shares == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.03)


def test_arrivals_are_poisson() -> None:
    """Mean and deviation of the gaps are equal, and the mean is the rate's."""
    times = [one.time_s for one in small("shared_prompts", duration_s=4000.0).requests]
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.5, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)


def test_tenants_have_their_rates_and_nothing_in_common() -> None:
    trace = small("tenants", duration_s=2000.0)
    counts = Counter(request.tenant for request in trace.requests)
    assert [counts[f"tenant-{n}"] / len(trace.requests) for n in (1, 2, 3)] == pytest.approx(
        [0.8, 0.1, 0.1], abs=0.02
    )
    ids: defaultdict[str, set[int]] = defaultdict(set)
    for request in trace.requests:
        ids[request.tenant] |= set(request.ids)
        assert request.namespace.tenant == request.tenant
        assert str(request.session).startswith(f"{request.tenant}/")
    assert sum(map(len, ids.values())) == len(set.union(*ids.values()))


def test_any_kind_can_have_tenants() -> None:
    trace = small("chat", tenants=(3, 1), sessions_per_s=1.0)
    assert summarize(trace).tenants.keys() == {"tenant-1", "tenant-2"}
    assert summarize(small("tenants", tenants=[1])).tenants == {}


def test_subagents_have_a_prompt_of_their_own() -> None:
    requests = small("agents", duration_s=4000.0).requests
    first = {request.ids[0] for request in requests if request.meta.get("type") == SUBAGENT}
    others = {request.ids[0] for request in requests if "type" not in request.meta}
    assert len(first) == 1
    assert not first & others
    assert not [one for one in small("agents", subagents=0.0).requests if "type" in one.meta]


def test_a_session_ends_before_its_prompt_is_too_long() -> None:
    trace = small("agents", duration_s=2000.0, max_input_tokens=20_000)
    assert 15_000 < max(request.num_input_tokens for request in trace.requests) <= 20_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"duration_s": 0.0}, "duration_s must be greater than 0"),
        ({"block_tokens": 0}, "block_tokens at least 1"),
        ({"tenants": []}, "tenants must be shares greater than 0, for example 8,1,1"),
        ({"tenants": [1, 0]}, "tenants must be shares greater than 0"),
        ({"turns": 0}, "turns must be at least 1, got 0"),
        ({"turns": float("nan")}, "turns must be at least 1, got nan"),
        ({"think_s": -1}, "think_s must be at least 0, got -1"),
        ({"sessions_per_s": 0}, "sessions_per_s must be greater than 0"),
        ({"subagents": 1.5}, "subagents at most 1"),
        ({"system_tokens": 1.5}, "system_tokens must be a whole number, got 1.5"),
        ({"zipf": "steep"}, "zipf must be a number, got 'steep'"),
        ({"zipf": True}, "zipf must be a number, got True"),
    ],
)
def test_what_cannot_be_generated_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small("chat", **changes)


def test_unknown_names_are_answered_with_the_known() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown kind of trace 'chats'\. Did you mean 'chat'"):
        profile("chats")
    with pytest.raises(UnknownNameError, match="a profile has no 'turn'; it has sessions_per_s, turns"):
        profile("chat", turn=3)
