"""What every registered proposer must do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.protocols.speculative import Asked, Proposal, Proposer
from sagellm.core.registry import registry
from sagellm.core.types import Namespace, Request, Tokens
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.speculation import Speculation
from tests.builders import expected_tokens, fake_engine, request, run_all
from tests.effort import examples

TREES, OTHERS = "suffix with branches", {"draft_model", "heads", "self_draft", "synthetic"}
PROPOSERS = [*(name for name in registry("proposer").names() if name not in OTHERS), TREES]
"""Those that go by text alone; of the others see their own tests in tests/accel/speculative."""
texts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def made(name: str) -> Any:
    if name == TREES:
        return registry("proposer").create("suffix", branches=3)
    return registry("proposer").create(name)


def asked(name: str, tokens: list[int], tenant: str = "") -> Request:
    return Request(name, Tokens(tokens), namespace=Namespace(tenant))


@pytest.mark.parametrize("name", PROPOSERS)
@settings(max_examples=examples(40), deadline=None)
@given(
    prompts=st.lists(texts, min_size=1, max_size=3), parts=st.lists(texts, max_size=5), most=st.integers(1, 8)
)
def test_proposals_are_short_and_of_known_tokens(
    name: str, prompts: list[list[int]], parts: list[list[int]], most: int
) -> None:
    proposer: Proposer = made(name)
    requests = [asked(str(number), prompt) for number, prompt in enumerate(prompts)]
    tokens = [Tokens(prompt) for prompt in prompts]
    for part in [[], *parts]:
        for one, text in zip(requests, tokens, strict=True):
            text.extend(part)
            before = text.tolist()
            proposal = proposer.propose([Asked(one, text, most)])[0]
            assert text.tolist() == before
            assert len(proposal.token_ids) <= most
            assert set(proposal.token_ids) <= {token for each in tokens for token in each}
            assert all(0 <= chance <= 1 for chance in (*proposal.probabilities, *proposal.acceptance))
            proposer.observe(one.request_id, 0)
    for one, text in zip(requests, tokens, strict=True):
        proposer.forget(one, text)
    proposer.forget(asked("never seen", [1, 2]), Tokens([1, 2, 3]))


@pytest.mark.parametrize("name", PROPOSERS)
def test_the_same_calls_give_the_same_proposals(name: str) -> None:
    def run() -> list[Proposal]:
        proposer, found = made(name), []
        for turn in range(4):
            one = asked(str(turn), [1, 2, 3, 1, 2, turn])
            tokens = Tokens(one.tokens)
            for token in (4, 1, 2, 3, 4, 1, 2):
                tokens.append(token)
                found.append(proposer.propose([Asked(one, tokens, 4)])[0])
            proposer.forget(one, tokens)
        return found

    assert run() == run()


@pytest.mark.parametrize("name", PROPOSERS)
def test_nothing_of_one_tenant_is_proposed_to_another(name: str) -> None:
    proposer, secret = made(name), [*range(100, 140)]
    for number in range(3):
        one = asked(f"a{number}", [1, 2, 3, 4], "a")
        tokens = Tokens([1, 2, 3, 4, *secret])
        proposer.propose([Asked(one, tokens, 8)])
        proposer.forget(one, tokens)
    for tenant in ("b", ""):
        other = asked(f"of {tenant}", [1, 2, 3, 4], tenant)
        tokens = Tokens(other.tokens)
        for token in secret[:20]:
            assert not set(proposer.propose([Asked(other, tokens, 8)])[0].token_ids) - set(tokens)
            tokens.append(token)


@pytest.mark.parametrize("name", PROPOSERS)
def test_it_keeps_nothing_of_requests_that_have_ended(name: str) -> None:
    """An id may come again, with other tokens."""
    proposer = made(name)
    for prompt in ([5, 6, 5, 6, 5], [7], [8, 9, 8, 9, 8, 9]):
        one = asked("again", prompt)
        found = proposer.propose([Asked(one, Tokens(prompt), 4)])[0].token_ids
        assert set(found) <= set(prompt)
        proposer.forget(one, Tokens(prompt))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", PROPOSERS)
def test_an_engine_gives_the_same_tokens(name: str, overlap: bool) -> None:
    backend = TokenMemoryBackend()
    speculation = Speculation(made(name), 5)
    engine = fake_engine(backend, speculation=speculation, overlap=overlap)
    prompts = {f"{turn}{letter}": [turn, 3, 1, 3, 1, 3] for turn in range(2) for letter in "abc"}
    for turn in range(2):
        for letter in "abc":
            engine.add(request(f"{turn}{letter}", prompts[f"{turn}{letter}"], 24))
        found = run_all(engine)
        for one, tokens in found.items():
            assert tokens == expected_tokens(TokenMemoryBackend(), prompts[one], 24)
    engine.close()
