"""Propose and verify without an engine: the tokens of an engine, in fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from sagellm.accel.speculative.decoder import LoopDecoder
from sagellm.accel.speculative.prompt_lookup import PromptLookup
from sagellm.accel.speculative.suffix import Suffix
from sagellm.core.config import Config
from sagellm.core.errors import CapacityError
from sagellm.core.protocols.speculative import Proposal
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.backend_verifier import BackendVerifier
from sagellm.engines.build import build_engine
from sagellm.engines.native.backend import NativeBackend
from tests.builders import OneByOne
from tests.tiny_models import VOCAB, save_tiny

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.0, frequency_penalty=0.7, max_tokens=40, ignore_eos=True),
)


class Knowing(OneByOne):
    """Proposes the right tokens, and a wrong one for every fifth."""

    def __init__(self, answer: list[int]) -> None:
        self._answer = answer

    def propose_one(self, request: Request, tokens: Tokens, num_tokens: int) -> Proposal:
        done = len(tokens) - len(request.tokens)
        coming = enumerate(self._answer[done : done + num_tokens], done)
        return Proposal(tuple((token + (place % 5 == 4)) % VOCAB for place, token in coming))

    def observe(self, request_id: str, num_accepted: int) -> None: ...

    def forget(self, request: Request, tokens: Tokens) -> None: ...


def backend(folder: Path, num_blocks: int = 16) -> NativeBackend:
    return NativeBackend(
        folder, num_blocks=num_blocks, max_num_seqs=2, block_size=8, threads=1, dtype="float32"
    )


def by_engine(folder: Path, params: SamplingParams) -> list[int]:
    engine = build_engine(Config.model_validate({"kv": {"block_size": 8}}), backend(folder))
    engine.add(Request("r", Tokens(PROMPT), params))
    tokens: list[int] = []
    while engine.has_work():
        for output in engine.step():
            tokens += output.new_token_ids
    return tokens


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_tokens_are_those_of_an_engine(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    verifier = BackendVerifier(backend(tmp_path))
    for number, params in enumerate(PARAMS):
        expected = by_engine(tmp_path, params)
        made = Request(str(number), Tokens(PROMPT), params)
        for proposer in (PromptLookup(), Knowing(expected)):  # of one request, to compare them
            result = LoopDecoder(5).generate(proposer, verifier, made)
            assert list(result.token_ids) == expected
            assert result.num_steps + result.num_accepted == len(expected)
        assert result.acceptance_rate > 0.5


def test_a_generation_ends_at_a_stop_token_within_what_was_accepted(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    all_tokens = by_engine(tmp_path, PARAMS[0])
    stop = all_tokens[len(all_tokens) // 2]
    params = SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=(stop,))
    result = LoopDecoder(8).generate(
        Suffix(), BackendVerifier(backend(tmp_path)), Request("r", Tokens(PROMPT), params)
    )
    assert list(result.token_ids) == all_tokens[: all_tokens.index(stop) + 1]


def test_without_proposals_each_step_draws_a_token(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    result = LoopDecoder(0).generate(
        Suffix(), BackendVerifier(backend(tmp_path)), Request("r", Tokens(PROMPT), PARAMS[0])
    )
    assert (result.num_steps, result.num_proposed, result.acceptance_rate) == (60, 0, 0.0)


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    verifier = BackendVerifier(backend(tmp_path, num_blocks=3))
    with pytest.raises(CapacityError, match=r"more than the 3 blocks of 8"):
        LoopDecoder().generate(Suffix(), verifier, Request("r", Tokens(PROMPT), PARAMS[0]))
    with pytest.raises(ValueError, match=r"set params\.max_tokens"):
        LoopDecoder().generate(
            Suffix(), verifier, Request("r", Tokens(PROMPT), SamplingParams(max_tokens=None))
        )
    with pytest.raises(ValueError, match="at least 0, got -1"):
        LoopDecoder(-1)
