"""`Engine.explain` against what the engine then does, and against what another tenant holds."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.clock import ManualClock
from sagellm.core.protocols.prefix_cache import PromptSpan, SpanState
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from tests.builders import TENANT_A, TENANT_B, check_books, fake_engine, request
from tests.engines.kv_scenes import INDEXES, small_engine

BLOCK = 4
POLICIES = ["lru", "adaptive"]


class Prompt(NamedTuple):
    """A prompt of a family, which leaves the others of its family at `num_shared`."""

    family: int
    num_shared: int
    num_tokens: int
    tenant: Namespace = TENANT_A

    def tokens(self, shift: int = 0) -> Tokens:
        """With another shift every token is another one, and equal prompts stay equal."""
        left = [7 * self.num_shared * (place >= self.num_shared) for place in range(self.num_tokens)]
        return Tokens(
            [(31 * self.family + shift + place + left[place]) % 97 for place in range(self.num_tokens)]
        )


def prompts(*tenants: Namespace) -> st.SearchStrategy[list[Prompt]]:
    lengths = st.integers(1, 34)
    made = st.builds(Prompt, st.integers(0, 2), st.integers(0, 20), lengths, st.sampled_from(tenants))
    return st.lists(made, min_size=1, max_size=25)


def explain(engine: Engine, tokens: Tokens, tenant: Namespace = TENANT_A) -> list[PromptSpan]:
    return list(engine.explain(tokens, tenant).spans)


def num_cached(engine: Engine, number: int, tokens: Tokens, tenant: Namespace = TENANT_A) -> int:
    """Serve a request alone; returns the tokens that it reused."""
    assert isinstance(engine.clock, ManualClock)
    engine.clock.advance(1.0)
    engine.add(request(str(number), tokens, 1, namespace=tenant))
    found = 0
    while engine.has_work():
        for output in engine.step():
            found = output.num_cached_tokens
    check_books(engine)
    return found


@settings(max_examples=150)
@given(asked=prompts(TENANT_A, TENANT_B), index=st.sampled_from(INDEXES), policy=st.sampled_from(POLICIES))
def test_the_next_request_reuses_what_is_called_a_hit(asked: list[Prompt], index: str, policy: str) -> None:
    engine = small_engine(policy, index=index, miss_attribution=True)
    for number, prompt in enumerate(asked):
        tokens = prompt.tokens()
        spans = explain(engine, tokens, prompt.tenant)
        assert spans == explain(engine, tokens, prompt.tenant), "asking changes nothing"
        assert [spans[0].start, spans[-1].stop] == [0, len(tokens)]
        assert all(left.stop == right.start for left, right in pairwise(spans))
        assert all(span.start < span.stop for span in spans)
        partial = sum(span.stop - span.start for span in spans if span.state is SpanState.PARTIAL_BLOCK)
        assert partial == len(tokens) % BLOCK
        hit = sum(span.stop - span.start for span in spans if span.state is SpanState.HIT)
        usable = (len(tokens) - 1) // BLOCK * BLOCK  # the last token is always computed
        assert num_cached(engine, number, tokens, prompt.tenant) == min(hit, usable)


@settings(max_examples=150)
@given(asked=prompts(TENANT_A, TENANT_B), index=st.sampled_from(INDEXES), policy=st.sampled_from(POLICIES))
def test_an_explanation_does_not_depend_on_the_texts_of_another_tenant(
    asked: list[Prompt], index: str, policy: str
) -> None:
    """Tenant b asks the same prompts as tenant a in one engine, and prompts of equal lengths in the other."""
    engines = [small_engine(policy, index=index, miss_attribution=True) for _ in range(2)]
    for number, prompt in enumerate(asked):
        told = []
        for engine, shift in zip(engines, (0, 40), strict=True):
            is_own = prompt.tenant == TENANT_A
            tokens = prompt.tokens(0 if is_own else shift)
            found = explain(engine, tokens, prompt.tenant) if is_own else []
            told.append((found, num_cached(engine, number, tokens, prompt.tenant)))
        assert told[0] == told[1]


@pytest.mark.parametrize("index", INDEXES)
def test_the_request_that_is_blamed_is_the_last_that_needed_room(index: str) -> None:
    engine = small_engine(index=index, miss_attribution=True)
    old, others = Tokens(range(17)), [Tokens(range(20 * n, 20 * n + 25)) for n in (1, 2, 3)]
    num_cached(engine, 0, old)
    for number, tokens in enumerate(others, 1):
        num_cached(engine, number, tokens, TENANT_B if number == 2 else TENANT_A)
    evicted = [span for span in explain(engine, old) if span.state is SpanState.EVICTED]
    assert evicted
    for span in evicted:
        assert span.evictor is not None
        assert span.evictor.call in {"1", "2", "3"}
        assert span.evictor.tenant == ("b" if span.evictor.call == "2" else "a")


def test_a_hit_behind_a_window_is_what_the_next_request_reuses() -> None:
    backend = TokenMemoryBackend(num_blocks=16, sliding_window=8)
    engine = fake_engine(backend, miss_attribution=True, eviction="lru")
    for number in range(6):
        tokens = Tokens([*range(12), *range(10 * number + 20, 11 * number + 29)])
        hit = sum(span.stop - span.start for span in explain(engine, tokens) if span.state is SpanState.HIT)
        assert num_cached(engine, number, tokens) == hit
