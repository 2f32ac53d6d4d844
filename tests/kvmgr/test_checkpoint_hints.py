"""Hints and retention settings of clients move checkpoints of recurrent states in their order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from sagellm.core.binding import Binding
from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.kv_hints import HintStatus, KVHintsEnvelope
from sagellm.core.plan import Chunk, Draft, RequestState, StepStart
from sagellm.core.types import NO_ACCOUNT, Namespace, Request, Retention, Tokens
from sagellm.engines.build_kv import build_kv
from sagellm.kvmgr.manager import KVCacheManager

BLOCK = 4
LENGTH = 8 * BLOCK + 1


class Hinted:
    """A manager for 60 blocks, and the requests that it has served."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.kv: KVCacheManager = build_kv(
            KVConfig(block_size=BLOCK), 60, state_pages=3, max_chunk=1 << 20, clock=self.clock
        )

    def serve(self, tokens: Iterable[int], **options: Any) -> int:
        """Compute a prompt in one step; returns the blocks that it reused."""
        self.clock.advance(1.0)
        state = self.waiting(tokens, **options)
        hit = self.kv.quotes.match(state)
        chunk = Chunk(state, hit.num_tokens, len(state.tokens) - hit.num_tokens, hit)
        binding = Binding(Draft(StepStart(0, 0.0), 1 << 20, [], [], {state.request_id: chunk}))
        self.kv.bind(binding)
        self.kv.executed(binding)
        state.num_prefilled = len(state.tokens)
        self.kv.commit(state)
        self.kv.release(state)
        self.kv.check()
        return hit.num_blocks

    def waiting(self, tokens: Iterable[int], **options: Any) -> RequestState:
        return RequestState.of(Request("r", Tokens(tokens), **options))

    def cached(self, *numbers: int) -> list[int]:
        """Those of the prompts of which a request would reuse anything."""
        return [n for n in numbers if self.kv.quotes.match(self.waiting([n] * LENGTH)).num_blocks]

    def fill(self) -> None:
        """Two prompts, the first used before the second; there is room for both."""
        for number in (1, 2):
            self.serve([number] * LENGTH)
        assert self.cached(1, 2) == [1, 2]

    def shrink(self) -> None:
        """Take the room of one prompt, some time later."""
        self.clock.advance(20.0)
        self.kv.allocator.make_room(60 - 17, NO_ACCOUNT)
        self.kv.check()


def act(hinted: Hinted, action: str, number: int, **payload: Any) -> None:
    tokens = [number] * LENGTH
    actions = [{"action_type": action, "payload": {"token_ids": tokens, **payload}}]
    envelope = KVHintsEnvelope.parse({"actions": actions})
    assert hinted.kv.hints.apply(envelope, Namespace())[0].status is HintStatus.APPLIED


def test_without_a_hint_the_prompt_that_was_used_first_goes_first() -> None:
    hinted = Hinted()
    hinted.fill()
    hinted.shrink()
    assert hinted.cached(1, 2) == [2]


@pytest.mark.parametrize("action", ["session.end", "session.supersede"])
def test_an_ended_session_goes_first(action: str) -> None:
    hinted = Hinted()
    hinted.fill()
    act(hinted, action, 2)
    hinted.shrink()
    assert hinted.cached(1, 2) == [1]


@pytest.mark.parametrize(("action", "payload"), [("kv.expect", {}), ("kv.retain", {"duration_s": 1000})])
def test_what_is_expected_or_retained_goes_last(action: str, payload: dict[str, Any]) -> None:
    hinted = Hinted()
    hinted.fill()
    act(hinted, action, 1, **payload)
    hinted.shrink()
    assert hinted.cached(1, 2) == [1]


def test_what_waiting_requests_reuse_goes_last_until_they_leave() -> None:
    hinted = Hinted()
    hinted.fill()
    hinted.kv.hints.expect([hinted.kv.quotes.match(hinted.waiting([1] * LENGTH))])
    hinted.shrink()
    assert hinted.cached(1, 2) == [1]
    hinted.kv.hints.expect([])
    hinted.serve([3] * LENGTH)
    hinted.shrink()
    assert hinted.cached(1, 3) == [3]


def test_a_session_that_is_used_again_has_not_ended() -> None:
    hinted = Hinted()
    hinted.fill()
    act(hinted, "session.end", 2)
    hinted.serve([2] * LENGTH)
    hinted.shrink()
    assert hinted.cached(1, 2) == [2]


def test_a_retained_prompt_outlives_later_ones() -> None:
    hinted = Hinted()
    hinted.serve([1] * LENGTH, retention=(Retention(0, None, 100, 1000.0),))
    hinted.serve([2] * LENGTH)
    hinted.shrink()
    assert hinted.cached(1, 2) == [1]


def test_a_breakpoint_inside_a_prompt_has_a_checkpoint() -> None:
    """The first request to leave a prompt at the breakpoint of another finds it."""
    hinted = Hinted()
    hinted.serve([*[1] * 18, *[2] * 15], retention=(Retention(0, 18, 50, 1800.0),))
    assert hinted.serve([*[1] * 18, *[3] * 15]) == 4


def test_the_four_deepest_breakpoints_have_a_checkpoint() -> None:
    """A client that marks every block, or marks without a bonus, cannot fill the pool with states."""
    hinted = Hinted()
    marks = tuple(Retention(0, depth * BLOCK, 50, 1800.0) for depth in range(1, 7))
    hinted.serve([1] * LENGTH, retention=(*marks, Retention(0, 7 * BLOCK, 0, 1800.0)))
    assert [hinted.serve([*[1] * (n * BLOCK), *[n] * 5]) for n in (2, 4, 6)] == [0, 4, 6]


def test_a_breakpoint_without_a_bonus_has_none() -> None:
    hinted = Hinted()
    hinted.serve([1] * LENGTH, retention=(Retention(0, 3 * BLOCK, 0, 1800.0),))
    assert hinted.serve([*[1] * (3 * BLOCK), *[2] * 5]) == 0
