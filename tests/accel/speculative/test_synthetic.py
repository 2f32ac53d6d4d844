"""`Synthetic`: proposals accepted with a given chance, through the native engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from sagellm.accel.speculative.synthetic import Synthetic, synthetic_token
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, SageError
from sagellm.core.protocols.engine import SpeculationCounts
from sagellm.core.protocols.speculative import Asked
from sagellm.core.seeds import request_seed
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine
from sagellm.engines.simulator import TokenMemoryBackend
from tests.builders import run_all


def settings(**speculative: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"dtype": "float32", "max_model_len": 512},
            "kv": {"num_blocks": 256},
            "scheduler": {"max_num_seqs": 8, "max_batched_tokens": 64},
            "speculative": {"method": "synthetic", "num_tokens": 4, "adaptive": False, **speculative},
        }
    )


def answers(config: Config) -> tuple[dict[str, list[int]], SpeculationCounts, int]:
    """Answers of 120 tokens, counts, and the number of steps."""
    engine, num_steps, found = build_engine(config), 0, dict[str, list[int]]()
    for number in range(8):
        params = SamplingParams(
            temperature=number % 2, max_tokens=120, ignore_eos=True, seed=number if number < 4 else None
        )
        engine.add(Request(f"r{number}", Tokens([5, 6, 7 + number]), params))
    while engine.has_work():
        num_steps += 1
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    counts, vocab_size = engine.diagnostics().speculation, engine.capability().vocab_size
    engine.close()
    for number in range(8):
        seed = number if number < 4 else request_seed(config.engine.seed, f"r{number}")
        right = [synthetic_token(seed, position, vocab_size) for position in range(120)]
        assert found[f"r{number}"] == right
    return found, counts, num_steps


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_as_many_are_accepted_as_asked(acceptance: float) -> None:
    _, counts, num_steps = answers(settings(method_options={"acceptance": acceptance}))
    for position, (proposed, accepted) in enumerate(zip(counts.proposed, counts.accepted, strict=True)):
        assert accepted / proposed == pytest.approx(acceptance ** (position + 1), abs=0.06)
    assert (num_steps < 40) == (acceptance == 1.0)


def test_lengths_are_chosen_as_for_any_other_method() -> None:
    _, counts, _ = answers(settings(method_options={"acceptance": 0.5}, adaptive=True))
    assert sum(counts.proposed) > 0


def test_the_log_says_that_answers_are_no_answers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="sagellm.engine"):
        build_engine(settings()).close()
    assert "ANSWERS ARE MADE-UP TOKENS" in caplog.text


def test_a_backend_that_draws_its_own_tokens_is_refused() -> None:
    backend = TokenMemoryBackend(block_size=16)
    backend._capability = replace(backend.capability(), features=frozenset({"speculative_decoding"}))
    with pytest.raises(ConfigError, match="'synthetic' needs a backend that makes up its tokens"):
        build_engine(settings(), backend)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acceptance": 1.5}, "acceptance must be from 0 to 1, got 1.5"),
        ({"acceptance": "most"}, "acceptance"),
        ({"rate": 0.5}, "no option 'rate'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SageError, match=message):
        build_engine(settings(method_options=options))


def test_an_answer_that_goes_on_elsewhere_is_the_same() -> None:
    """Tokens depend on seed and position, whoever drew those before."""
    proposer = Synthetic(97, 0, 1.0)
    prompt = Request("a", Tokens([1, 2, 3]))
    found = proposer.propose([Asked(prompt, Tokens([1, 2, 3, 9, 9]), 3)])[0].token_ids
    seed = request_seed(0, "a")
    assert found == tuple(synthetic_token(seed, position, 97) for position in (2, 3, 4))


def test_another_engine_draws_its_own_tokens_again() -> None:
    config = settings(method="none", method_options={})
    engine = build_engine(config)
    engine.add(Request("a", Tokens([5, 6, 7]), SamplingParams(temperature=0.0, max_tokens=20, seed=1)))
    drawn, vocab_size = run_all(engine)["a"], engine.capability().vocab_size
    engine.close()
    assert drawn != [synthetic_token(1, position, vocab_size) for position in range(20)]
