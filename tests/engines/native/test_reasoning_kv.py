"""Dropped KV of reasoning in the native backend: the slow twin is transformers with these tokens masked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.accel.speculative.heads import Heads
from sagellm.core.clock import ManualClock
from sagellm.core.config import Config, KVConfig
from sagellm.core.errors import ConfigError
from sagellm.core.features import DROPPED_BLOCKS
from sagellm.core.plan import RequestState
from sagellm.core.protocols.speculative import Asked, Proposal
from sagellm.core.types import Request, RequestOutput, Tokens
from sagellm.engines.build import build_engine
from sagellm.engines.build_kv import build_kv
from sagellm.engines.engine import Engine
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.head_files import HEAD_FILE, HEAD_KIND, TRAINED_FOR, HeadKind, head_mark
from sagellm.engines.native.headed_backend import HeadedBackend
from sagellm.engines.speculation import Speculation
from sagellm.kvmgr.scheduler_ir import PassPipeline
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from tests.builders import OneByOne, check_books, random_tree
from tests.builders import request as request_of
from tests.engines.native.random_heads import head_tensors, save_head
from tests.tiny_models import VOCAB, save_tiny

SIZE, THINK = 4, 3
MARKERS: dict[str, Any] = {"reasoning_token_ids": (THINK, VOCAB - 1), "temperature": 0.0, "logprobs": 0}
Drops = list[tuple[int, range]]
"""Computed tokens when blocks were dropped, and their places."""


class Guesses(OneByOne):
    """Proposes tokens at random, half of them trees; of few token ids, so that some are right."""

    def __init__(self, backend: NativeBackend) -> None:
        self.random = random.Random(0)

    def propose_one(self, request: Request, tokens: Tokens, num_tokens: int) -> Any:
        likely = tokens.tolist()[-6:]
        return random_tree(self.random, likely, VOCAB, num_tokens)

    def observe(self, request_id: str, num_accepted: int) -> None: ...

    def forget(self, request: Request, tokens: Tokens) -> None: ...


class RepeatingHead(Heads):
    """Medusa with blocks of zeros: they propose what the model has drawn last, as often as is asked."""

    def __init__(self, backend: NativeBackend) -> None:
        assert isinstance(backend, HeadedBackend)
        super().__init__(backend.drafter, 0.0)

    def propose(self, asked: Sequence[Asked]) -> Sequence[Proposal]:
        proposals = super().propose(asked)
        for each, proposal in zip(asked, proposals, strict=True):
            assert proposal.token_ids == (each.tokens[-1],) * each.num_tokens
        return proposals


def engine_of(
    folder: Path, dtype: str, kernels: bool, proposer: type[Guesses | RepeatingHead] | None, overlap: bool
) -> tuple[Engine, dict[str, Drops]]:
    options: dict[str, Any] = {
        "device": "cpu", "dtype": dtype, "compute_dtype": dtype, "block_size": SIZE, "num_blocks": 64,
        "max_num_seqs": 3, "max_model_len": 96, "threads": 1, "kernels": cpu_kernels if kernels else None,
        "capture": (lambda _: None) if kernels else None,
    }  # fmt: skip
    if proposer is RepeatingHead:
        zeros = {name: torch.zeros_like(each) for name, each in head_tensors(folder, kind="medusa").items()}
        save_file(
            zeros,
            folder / HEAD_FILE,
            {TRAINED_FOR: head_mark(folder, Checkpoint(folder)), HEAD_KIND: "medusa"},
        )
        backend: NativeBackend = HeadedBackend(folder, head=folder, **options)
    else:
        backend = NativeBackend(folder, **options)
    kv = build_kv(KVConfig(block_size=SIZE), backend.capability().num_blocks, clock=ManualClock())
    engine = Engine(
        backend, kv, PassPipeline([PriorityBasedPass()]), clock=ManualClock(), overlap=overlap,
        speculation=None if proposer is None else Speculation(proposer(backend), 3),
        compress_reasoning=True,
    )  # fmt: skip
    drops: dict[str, Drops] = {}
    drop = kv.dropped.drop

    def noted(state: RequestState, places: range) -> None:
        drops.setdefault(state.request_id, []).append((state.num_computed, places))
        drop(state, places)

    kv.dropped.drop = noted  # type: ignore[method-assign]
    return engine, drops


def masked_logprobs(model: PreTrainedModel, tokens: list[int], drops: Drops) -> torch.Tensor:
    """Log-probabilities [T, vocab] where no token sees those whose KV was dropped before it was computed."""
    hidden = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    for num_computed, places in drops:
        hidden[num_computed:, places.start * SIZE : places.stop * SIZE] = True
    mask = torch.zeros(hidden.shape, dtype=model.dtype).masked_fill(hidden, torch.finfo(model.dtype).min)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), attention_mask=mask[None, None]).logits[0]
    found: torch.Tensor = logits.log_softmax(-1)
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "has_kernels", "proposer", "overlap"),
    [
        ("float64", False, None, False),
        ("float64", False, Guesses, True),
        ("float64", False, RepeatingHead, True),
        ("float32", True, None, False),
        ("float32", True, Guesses, False),
        ("float32", True, RepeatingHead, False),
    ],
)
def test_tokens_see_all_but_what_was_dropped(
    name: str, dtype: str, has_kernels: bool, proposer: type[Guesses | RepeatingHead] | None, overlap: bool,
    tmp_path: Path, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if has_kernels:
        request.getfixturevalue("kernels")  # skips where there is no compiler
    model = save_tiny(tmp_path, name).to(getattr(torch, dtype)).eval()
    engine, drops = engine_of(tmp_path, dtype, has_kernels, proposer, overlap)
    assert isinstance(engine.backend, NativeBackend)
    assert DROPPED_BLOCKS in engine.backend.capability().features
    assert (engine.backend._steps is not None) is has_kernels
    prompts = {"a": [9, 8, 7, 6, 5, THINK], "b": [11, 12, THINK], "exact": [9, 8, 7, 6, 5, 4]}
    outputs: list[RequestOutput] = []
    for number, (request_id, prompt) in enumerate(prompts.items()):
        more = {"max_reasoning_kv_tokens": 16 + 8 * number} if request_id != "exact" else {}
        engine.add(request_of(request_id, prompt, 70, **more, **MARKERS))
        outputs += engine.step()
    while engine.has_work():
        outputs += engine.step()
        check_books(engine)
    assert set(drops) == {"a", "b"}
    assert all(len(own) > 2 for own in drops.values())
    for request_id, prompt in prompts.items():
        own = [each for each in outputs if each.request_id == request_id]
        drawn = [token for each in own for token in each.new_token_ids]
        found = torch.tensor([e.logprob for each in own for e in each.logprobs], dtype=model.dtype)
        expected = masked_logprobs(model, [*prompt, *drawn], drops.get(request_id, []))[len(prompt) - 1 : -1]
        picked = expected.gather(1, torch.tensor(drawn)[:, None])[:, 0]
        tolerance = 5e-6 if dtype == "float64" else 2e-4
        torch.testing.assert_close(found, picked, atol=tolerance, rtol=0)
        torch.testing.assert_close(picked, expected.amax(1), atol=tolerance, rtol=0)
        if request_id in drops:
            whole = masked_logprobs(model, [*prompt, *drawn], [])[len(prompt) - 1 : -1]
            assert (whole - expected).abs().max() > 10 * tolerance, "the drops make no difference"
    if proposer is not None:
        assert engine.speculation is not None
        assert engine.speculation.num_accepted > 0
    engine.close()


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_with_a_head_that_has_kv_nothing_is_dropped(kind: HeadKind, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    save_head(tmp_path, kind=kind)
    settings = {"model": {"name": str(tmp_path)}, "speculative": {"method": "heads"}}
    config = Config.model_validate(settings | {"kv": {"compress_reasoning": True, "num_blocks": 32}})
    with pytest.raises(ConfigError, match="no draft head that is a layer"):
        build_engine(config)


@pytest.mark.parametrize("name", ["mistral-window", "llama4"])
def test_a_model_with_windows_drops_nothing(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    backend = NativeBackend(tmp_path, device="cpu", block_size=8, num_blocks=16, max_model_len=64, threads=1)
    assert DROPPED_BLOCKS not in backend.capability().features
    backend.close()
