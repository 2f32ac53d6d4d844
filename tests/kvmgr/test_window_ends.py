"""Which windows of a cached prefix are kept, and which branches are given up."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from sagellm.core.binding import Binding
from sagellm.core.config import KVConfig
from sagellm.core.plan import Chunk, Draft, RequestState, StepStart
from sagellm.core.types import KVGroup, Request, Tokens
from sagellm.engines.build_kv import build_kv
from sagellm.kvmgr.manager import KVCacheManager

BLOCK, WINDOW = 4, 41


def manager(num_pages: int, num_windowed: int = 5) -> KVCacheManager:
    windows = (None, *[WINDOW] * num_windowed)
    groups = tuple(KVGroup((i,), window) for i, window in enumerate(windows))
    return build_kv(KVConfig(block_size=BLOCK), num_pages, groups=groups, max_chunk=1 << 20)


def serve(kv: KVCacheManager, name: str, tokens: Iterable[int]) -> int:
    """Compute a prompt in one step, then release it; returns the tokens that it reused."""
    state = RequestState.of(Request(name, Tokens(tokens)))
    hit = kv.quotes.match(state)
    chunk = Chunk(state, hit.num_tokens, len(state.tokens) - hit.num_tokens, hit)
    binding = Binding(Draft(StepStart(0, 0.0), 1 << 20, [], [], {name: chunk}))
    kv.bind(binding)
    kv.executed(binding)
    state.num_prefilled = len(state.tokens)
    kv.commit(state)
    kv.release(state)
    kv.check()
    return hit.num_tokens


def num_ends(kv: KVCacheManager) -> int:
    assert kv._pages is not None
    return sum(len(rule._ends) for rule in kv._pages.rules)


@pytest.mark.parametrize(("num_pages", "least"), [(2000, 0.85), (6000, 0.9)])
def test_an_agent_that_drops_its_reasoning(num_pages: int, least: float) -> None:
    """Each turn leaves a branch. With all of them kept, a third of the tokens was reused at 2,000 pages."""
    kv, draw = manager(num_pages), random.Random(1)
    histories = [[1_000 * i + j for j in range(40)] for i in range(6)]
    found = total = 0
    for turn in range(30):
        for i, history in enumerate(histories):
            reasoning, answer, question = ([draw.randrange(10**6) for _ in range(n)] for n in (24, 8, 12))
            total += len(history)
            found += serve(kv, f"{turn}.{i}", [*history, *reasoning, *answer])
            history += answer + question
    assert found > least * total
    assert num_ends(kv) <= 9 * len(histories)


def test_a_prompt_that_many_conversations_begin_with_keeps_its_window() -> None:
    kv, system = manager(20_000), list(range(80))
    for i in range(8):
        history = [*system, 10_000 + i]
        for turn in range(8):
            history += [100_000 + 1_000 * i + 20 * turn + j for j in range(15)]
            found = serve(kv, f"{i}.{turn}", history)
            if turn == 0 and i >= 2:
                assert found == len(system)


def test_an_abandoned_branch_that_is_used_again_stays() -> None:
    kv, common = manager(20_000), list(range(60))
    side = [*common, *range(500, 540)]
    serve(kv, "common", common)
    serve(kv, "side", side)
    serve(kv, "side again", [*side, 7])
    history = list(common)
    for turn in range(10):
        history += range(1_000 + 20 * turn, 1_016 + 20 * turn)
        serve(kv, f"turn {turn}", history)
    assert serve(kv, "side once more", [*side, 8]) == len(side)
