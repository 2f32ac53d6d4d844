"""Approximate reuse on real models: the answer is that of copied KV, and exact requests keep theirs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.blended import BlendModel, joined, part_of
from sagellm.core.errors import ConfigError
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import Engine
from sagellm.engines.native.backend import NativeBackend
from tests.tiny_models import save_tiny

TEXT = random.Random(3).choices(range(5, 200), k=50)
SOURCE, PROMPT = [1, 2, 3, *TEXT, 4], [9, 9, 7, 31, 8, *TEXT, 77, 12]


def engine(folder: Path, **settings: Any) -> Engine:
    given = {
        "model.name": str(folder), "model.dtype": "float32", "kv.block_size": 4, "kv.num_blocks": 60,
        "engine.threads": 1, "kv.approximate_reuse": True, "kv.approximate_recompute_tokens": 5, **settings,
    }  # fmt: skip
    return build_engine(load_config(cli=given, environ={}).config)


def ask(asked: Engine, name: str, prompt: list[int]) -> tuple[list[int], list[float], int]:
    """The greedy tokens, their log-probabilities, and how many tokens of the prompt were copied."""
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    asked.add(Request(name, Tokens(prompt), params, approximate_reuse=name.startswith("~")))
    drawn: list[int] = []
    logprobs: list[float] = []
    num_copied = 0
    while asked.has_work():
        for output in asked.step():
            assert output.error is None
            drawn += output.new_token_ids
            logprobs += [entry.logprob for entry in output.logprobs]
            num_copied = max(num_copied, output.num_approximate_tokens)
        asked.check()
    return drawn, logprobs, num_copied


def same(ours: tuple[list[int], list[float], int], theirs: tuple[list[int], list[float], int]) -> None:
    assert ours[0] == theirs[0]
    assert ours[1] == pytest.approx(theirs[1], abs=1e-4)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "glm", "phi3-longrope-partial"])
def test_the_answer_is_that_of_copied_kv(kind: str, overlap: bool, tmp_path: Path) -> None:
    save_tiny(tmp_path, kind)
    asked = engine(tmp_path, **{"engine.overlap": overlap})
    exact = ask(asked, "exact", PROMPT)
    asked.clear_cache()
    ask(asked, "~first", [90])
    ask(asked, "source", SOURCE)
    moved = ask(asked, "~moved", PROMPT)
    assert moved[2] == 35  # four slices of 10, of which 5 tokens are computed
    same(ask(asked, "again", PROMPT), exact)
    plain = NativeBackend(tmp_path, device="cpu", dtype="float32", num_blocks=32, max_num_seqs=1)
    model = BlendModel(plain._model)  # type: ignore[arg-type]
    start, stop = 5 + 7 + 5, 5 + 7 + 40
    copied = model.moved(part_of(model.kv_of(SOURCE[: 10 + 40]), 15), start - 15)
    cached = joined([model.kv_of(PROMPT[:start]), copied])
    logits = model.logits([*PROMPT, *moved[0][:-1]], cached, start, None).logits[len(PROMPT) - stop - 1 :]
    assert logits.argmax(-1).tolist() == moved[0]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(moved[0])[:, None])[:, 0].tolist()
    assert moved[1] == pytest.approx(expected, abs=1e-4)
    assert moved[1] != pytest.approx(exact[1], abs=1e-6)
    plain.close()
    asked.close()


def test_with_all_computed_again_the_answer_is_exact(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    asked = engine(tmp_path, **{"kv.approximate_recompute_tokens": 26})
    exact = ask(asked, "exact", PROMPT)
    asked.clear_cache()
    ask(asked, "~first", SOURCE)
    same(ask(asked, "~moved", PROMPT), exact)
    asked.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(dtype: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    asked = engine(tmp_path, **{"model.dtype": dtype})
    ask(asked, "~first", SOURCE)
    drawn, _, num_copied = ask(asked, "~moved", PROMPT)
    assert (len(drawn), num_copied) == (6, 35)
    asked.close()


@pytest.mark.parametrize("kind", ["mistral-window", "deepseek2", "rope-dynamic"])
def test_a_model_whose_keys_cannot_be_moved_is_an_error_at_start(kind: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, kind)
    with pytest.raises(ConfigError, match=r"kv\.approximate_reuse needs a model whose layers"):
        engine(tmp_path)


def test_it_needs_prefix_caching_and_a_backend_that_moves_kv(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    with pytest.raises(ConfigError, match="prefix_caching is off"):
        engine(tmp_path, **{"kv.prefix_caching": False})
    with pytest.raises(ConfigError, match="moves no KV"):
        engine(tmp_path, **{"engine.backend": "simulator"})
