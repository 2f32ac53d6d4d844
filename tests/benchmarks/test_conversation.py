"""The conversation experiment: the trace is the peers', and so is what LRU reuses of it."""

from __future__ import annotations

import hashlib
import json
from array import array
from datetime import UTC, datetime
from random import Random

import pytest

from sagellm.benchmarks.conversation import (
    FIRST_PROMPT,
    FORMAT,
    POOLS,
    VARIANTS,
    ConversationMix,
    ConversationOutcome,
    Lognormal,
    PromptReuse,
    as_json,
    as_table,
    conversation_prompts,
    match_table,
    request_table,
    run,
    sharing,
)
from sagellm.benchmarks.reporting import environment
from sagellm.core.errors import ConfigError
from sagellm.core.registry import registry

MULTI, SINGLE, SYSTEM = VARIANTS


def digest(variant: ConversationMix) -> str:
    """Of all prompts, as the int32 bytes of their lengths and tokens."""
    sha = hashlib.sha256()
    for prompt in conversation_prompts(variant, seed=0):
        sha.update(array("i", [len(prompt), *prompt]).tobytes())
    return sha.hexdigest()[:16]


@pytest.mark.parametrize(
    ("variant", "requests", "tokens", "expected"),
    [
        (MULTI, 100, 79_552, "e63e82d4598a3fb5"),
        (SINGLE, 100, 35_031, "ee93636176d1d4ef"),
        (SYSTEM, 100, 47_458, "d71df6131ad31de8"),
    ],
)
def test_the_trace_is_that_of_the_peers(
    variant: ConversationMix, requests: int, tokens: int, expected: str
) -> None:
    prompts = conversation_prompts(variant, seed=0)
    assert (len(prompts), sum(map(len, prompts))) == (requests, tokens)
    assert digest(variant) == expected


def test_each_turn_carries_the_history() -> None:
    variant = ConversationMix("two", num_requests=6, turns=3, system_tokens=4)
    prompts = conversation_prompts(variant, seed=3)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    talks: dict[tuple[int, ...], list[list[int]]] = {}
    for prompt in prompts:
        talks.setdefault(tuple(prompt[:36]), []).append(prompt)
    assert [len(turns) for turns in talks.values()] == [3, 3]
    for first, second, third in talks.values():
        assert second[: len(first)] == first
        assert third[: len(second)] == second


def test_lengths_stay_in_their_range() -> None:
    random = Random(0)
    lengths = [FIRST_PROMPT.draw(random) for _ in range(2000)]
    assert 32 <= min(lengths) < max(lengths) <= 1500
    assert Lognormal(50.0, 0.1, 1, 7).draw(random) == 7


GOLDEN = {
    10_000: (3347, 0.6670, 0.5537, 0.6732),
    1_000: (3062, 0.6102, 0.5156, 0.6158),
    500: (2506, 0.4994, 0.3973, 0.5040),
}


@pytest.mark.parametrize("index", registry("index").names())
def test_lru_reuses_what_the_peers_reuse(index: str) -> None:
    outcomes = run(index=index, variants=[MULTI])
    assert [(one.requests, one.tokens, one.blocks) for one in outcomes] == [(100, 79_552, 5018)] * 3
    found = {one.pool_blocks: (one.reused, one.overall, one.per_request, one.token_hits) for one in outcomes}
    assert found == GOLDEN


def test_single_turns_share_the_system_prompt_alone() -> None:
    outcomes = run(variants=[SINGLE, SYSTEM], pools=[10_000])
    assert [(one.requests, one.reused) for one in outcomes] == [(100, 0), (100, 99 * 8)]


def test_every_pool_and_variant_is_run() -> None:
    outcomes = run(pools=[600, 200], variants=[ConversationMix("small", num_requests=4, turns=2)])
    assert [(one.variant, one.pool_blocks) for one in outcomes] == [("small", 600), ("small", 200)]


def test_sharing_counts_blocks_and_averages_requests() -> None:
    usages = (PromptReuse(16, 1, 1), PromptReuse(60, 4, 1), PromptReuse(60, 5, 0))
    outcome = sharing("x", 9, usages)
    assert outcome == ConversationOutcome("x", 9, 3, 136, 10, 2, 0.2, 0.4167, 0.2353, usages)
    assert {name: count for name, count in outcome.match_lengths().items() if count} == {"0": 1, "1 to 63": 2}
    rows = request_table(outcome).rows
    assert rows[1] == ["1", "60", "4", "1", "3", "25.00%"]
    assert match_table([outcome]).rows == [["x", "9", "1", "2", "0", "0", "0", "0", "0", "0"]]


def test_without_prefix_caching_nothing_is_reused() -> None:
    [outcome] = run(pools=[1000], variants=[MULTI], prefix_caching=False)
    assert (outcome.reused, outcome.token_hits) == (0, 0.0)
    assert outcome.match_lengths()["0"] == outcome.requests == 100


def test_a_pool_that_no_prompt_fits_into_is_refused() -> None:
    with pytest.raises(ConfigError, match="a pool of 20 blocks does not hold the longest prompt: 126 do"):
        run(pools=[20], variants=[MULTI])


@pytest.mark.parametrize(("requests", "turns"), [(10, 3), (0, 1), (5, 0)])
def test_a_variant_that_cannot_be_is_refused(requests: int, turns: int) -> None:
    with pytest.raises(ConfigError, match="no whole number"):
        ConversationMix("x", requests, turns)


def test_the_json_and_the_table() -> None:
    outcome = ConversationOutcome("x", 9, 3, 136, 10, 2, 0.2, 0.4167, 0.2353, (PromptReuse(16, 1, 1),))
    here = environment(datetime(2026, 11, 20, tzinfo=UTC))
    values = json.loads(json.dumps(as_json([outcome], here, {"policy": "lru"})))
    assert list(values) == ["format", "environment", "block_size", "settings", "outcomes"]
    assert (values["format"], values["settings"]) == (FORMAT, {"policy": "lru"})
    assert values["outcomes"][0]["token_hits"] == 0.2353
    assert values["outcomes"][0]["usages"] == [{"num_tokens": 16, "num_blocks": 1, "num_reused": 1}]
    assert values["outcomes"][0]["match_lengths"]["1 to 63"] == 1
    assert len(as_table([outcome], "title").rows) == 1
    assert max(POOLS) == 10_000
