"""Dropped KV of reasoning: which blocks go and when, what stays exact, and that no other request sees it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.accel.cot.reasoning import ReasoningTracker
from sagellm.core.blocks import NO_PAGE, cdiv
from sagellm.core.config import Config
from sagellm.core.errors import BookkeepingError, ConfigError, RequestError, UnsupportedParameterError
from sagellm.core.protocols.cot import EarlyExit
from sagellm.core.types import SamplingParams, Tokens
from sagellm.engines.build import build_engine
from sagellm.engines.engine import Engine
from sagellm.engines.llm import RequestOptions
from sagellm.engines.llm.accelerations import Accelerations
from sagellm.engines.reasoning_kv import PART_DROPPED
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.speculation import Speculation
from tests.approximate_memory import ApproximateMemory, check_index
from tests.builders import (
    PreemptAtRandom,
    RandomProposer,
    check_books,
    expected_tokens,
    fake_engine,
    request,
    run_all,
)
from tests.effort import examples

THINK, END, SIZE = 95, 96, 4
MARKERS: dict[str, Any] = {"reasoning_token_ids": (THINK, END)}


def compressed_answer(prompt: Sequence[int], limit: int, num_tokens: int, num_cached: int) -> list[int]:
    """The slow twin: at each token, the blocks that a request with `limit` blocks still has.

    Whole blocks of the first `num_cached` tokens are in the prefix index.
    """
    backend, tokens = TokenMemoryBackend(), Tokens(prompt)
    dropped: set[int] = set()
    while len(tokens) < len(prompt) + num_tokens:
        seen = Tokens([token for at, token in enumerate(tokens) if at // SIZE not in dropped])
        tokens.append(backend.answer(seen))
        start = start_of_reasoning(prompt, tokens.tolist()[len(prompt) :])
        if start is not None:
            first = max(cdiv(start, SIZE), num_cached // SIZE + 1)
            left = [block for block in range(first, (len(tokens) - 1) // SIZE) if block not in dropped]
            if len(left) >= limit:
                dropped.update(left[: len(left) - limit + max(1, limit // PART_DROPPED)])
    return tokens.tolist()[len(prompt) :]


def start_of_reasoning(prompt: Sequence[int], outputs: Sequence[int]) -> int | None:
    """Where the reasoning begins that is open behind these tokens."""
    tracker = ReasoningTracker.behind(prompt, (THINK, END), ())
    start = len(prompt) if tracker.is_inside else None
    for at, token in enumerate(outputs, len(prompt)):
        tracker.push(token)
        if not tracker.is_inside:
            start = None
        elif start is None:
            start = at
    return start


def blocks_held(engine: Engine, name: str) -> int:
    return len(engine.kv._tables[name].block_ids) - engine.kv.block_table(name).count(NO_PAGE)


@settings(max_examples=examples(60))
@given(
    length=st.integers(1, 20),
    limit=st.integers(4, 9),
    num_tokens=st.integers(1, 90),
    caching=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_tokens_are_those_of_the_blocks_that_stay(
    length: int, limit: int, num_tokens: int, caching: bool, seed: int
) -> None:
    draw = random.Random(seed)
    prompt = [*(draw.randrange(95) for _ in range(length - 1)), THINK]
    engine = fake_engine(compress_reasoning=True, prefix_caching=caching)
    asked = request(
        "r", prompt, num_tokens, max_reasoning_kv_tokens=limit * SIZE + draw.randrange(SIZE), **MARKERS
    )
    engine.add(asked)
    expected = compressed_answer(prompt, limit, num_tokens, length if caching else 0)
    assert run_all(engine)["r"] == expected
    assert engine.reasoning_kv is not None
    assert engine.diagnostics().num_dropped_tokens == engine.reasoning_kv.num_tokens
    assert engine.kv.block_states().active == 0


def test_a_long_reasoning_takes_bounded_memory() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=64, max_model_len=256), compress_reasoning=True)
    prompt = [5, 6, 7, THINK]
    unlikely: dict[str, Any] = {"reasoning_token_ids": (THINK, END), "logit_bias": {}}
    engine.add(request("r", prompt, 200, max_reasoning_kv_tokens=32, **unlikely))
    most = 0
    while engine.has_work():
        engine.step()
        check_books(engine)
        if "r" in engine.kv._tables:
            tokens = engine._request_table.states["r"].tokens.tolist()
            if start_of_reasoning(prompt, tokens[len(prompt) :]) == len(prompt):
                most = max(most, blocks_held(engine, "r"))
    assert most <= 1 + 1 + 32 // SIZE + 1
    assert engine.diagnostics().num_dropped_tokens > 0


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10**6),
    overlap=st.booleans(),
    host_blocks=st.sampled_from([0, 40]),
    num_proposed=st.sampled_from([0, 3]),
    share=st.sampled_from([0.0, 0.05]),
    pool=st.sampled_from(["free_list", "buddy"]),
)
def test_no_other_request_sees_what_was_computed_behind_dropped_blocks(
    seed: int, overlap: bool, host_blocks: int, num_proposed: int, share: float, pool: str
) -> None:
    """Forks, aborts, preemption, tiers, speculation, compaction and small memory: exact ones stay exact."""
    draw, backend = random.Random(seed), ApproximateMemory(num_blocks=40, max_model_len=120)
    proposer = RandomProposer(backend, seed, trees=True)
    engine = fake_engine(
        backend, compress_reasoning=True, overlap=overlap, host_blocks=host_blocks, pool=pool,
        speculation=Speculation(proposer, num_proposed) if num_proposed else None,
    )  # fmt: skip
    if share:
        engine.set_passes([PreemptAtRandom(seed, share), *engine.scheduler.passes])
    tokens: dict[str, list[int]] = {}
    prompts: dict[str, list[int]] = {}
    for number in range(8):
        compressed = draw.random() < 0.6
        prompt = [*[1, 2, 3, 4, 5][: draw.randrange(6)], THINK]
        name = f"~{number}" if compressed else f"{number}"
        more = {"max_reasoning_kv_tokens": draw.choice([16, 24]), **MARKERS} if compressed else {}
        prompts[name] = prompt
        engine.add(request(name, prompt, draw.randrange(1, 100), **more))
        for _ in range(draw.randrange(40)):
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            check_books(engine)
            check_index(engine)
        running = [s.request_id for s in engine._request_table.running]
        if running and draw.random() < 0.3:
            engine.fork(draw.choice(running), f"~fork {number}")
        if running and draw.random() < 0.2:
            engine.compact()
        if running and draw.random() < 0.2:
            engine.abort(draw.choice(running))
    for name, more_tokens in run_all(engine).items():
        tokens.setdefault(name, []).extend(more_tokens)
    check_index(engine)
    engine.clear_cache()
    for name, found in tokens.items():
        if not name.startswith("~"):
            assert found == expected_tokens(backend, prompts[name], len(found))


def test_the_next_turn_is_exact() -> None:
    backend = ApproximateMemory(max_model_len=256)
    engine = fake_engine(backend, compress_reasoning=True)
    prompt = [1, 2, 3, 4, 5, THINK]
    engine.add(request("~r", prompt, 80, max_reasoning_kv_tokens=16, **MARKERS))
    answer = run_all(engine)["~r"]
    check_index(engine)
    assert engine.diagnostics().num_dropped_tokens > 0
    engine.add(request("next", [*prompt, *answer], 4))
    assert run_all(engine)["next"] == expected_tokens(backend, [*prompt, *answer], 4)


def test_switched_off_new_requests_keep_all() -> None:
    engine = fake_engine(compress_reasoning=True)
    controller = Accelerations(None, engine.reasoning_kv)
    controller.switch("reasoning_kv", on=False)
    prompt = [5, THINK]
    engine.add(request("r", prompt, 60, max_reasoning_kv_tokens=16, **MARKERS))
    assert run_all(engine)["r"] == expected_tokens(TokenMemoryBackend(), prompt, 60)
    controller.switch("reasoning_kv", on=True)
    engine.add(request("s", prompt, 60, max_reasoning_kv_tokens=16, **MARKERS))
    run_all(engine)
    report = {each.name: each for each in controller.report()}["reasoning_kv"]
    assert (report.is_exact, report.saved["kv_tokens"] > 0) == (False, True)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UnsupportedParameterError, match=r"kv\.compress_reasoning: true"):
        fake_engine().add(request("r", [1], max_reasoning_kv_tokens=64, **MARKERS))
    engine = fake_engine(compress_reasoning=True)
    with pytest.raises(RequestError, match="needs reasoning_token_ids"):
        engine.add(request("r", [1], max_reasoning_kv_tokens=64))
    with pytest.raises(RequestError, match="must be at least 16, 4 blocks of 4 tokens, got 15"):
        engine.add(request("r", [1], max_reasoning_kv_tokens=15, **MARKERS))
    with pytest.raises(RequestError, match="max_reasoning_kv_tokens must be at least 1"):
        SamplingParams(max_reasoning_kv_tokens=0)
    with pytest.raises(RequestError, match="early_exit goes without max_reasoning_kv_tokens"):
        RequestOptions(SamplingParams(max_reasoning_kv_tokens=64), early_exit=EarlyExit())
    config = Config.model_validate({"engine": {"backend": "simulator"}, "kv": {"compress_reasoning": True}})
    with pytest.raises(ConfigError, match=r"kv\.compress_reasoning needs the native backend"):
        build_engine(config)


def test_only_computed_blocks_behind_the_first_own_one_are_dropped() -> None:
    engine = fake_engine(compress_reasoning=True)
    engine.add(request("r", [5, 6, 7, 8, 9, THINK], 40, max_reasoning_kv_tokens=64, **MARKERS))
    for _ in range(20):
        engine.step()
    state, dropped = engine._request_table.states["r"], engine.kv.dropped
    places = dropped.droppable(state, 6)
    assert places == range(2, state.num_computed // SIZE)
    for wrong in (range(1, 3), range(2, places.stop + 1), range(3, 3)):
        with pytest.raises(BookkeepingError, match="r has no blocks to drop"):
            dropped.drop(state, wrong)
    dropped.drop(state, places[:2])
    check_books(engine)
    assert dropped.droppable(state, 6) == places[2:]
    with pytest.raises(BookkeepingError):
        dropped.drop(state, places)
