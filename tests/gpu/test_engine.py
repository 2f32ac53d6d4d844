"""The engine on the device: tokens with graphs on and off, against a CPU, and with overlap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sagellm.benchmarks.engine.session import PromptJob, Session
from sagellm.benchmarks.engine.shapes import SHAPES, write_model
from sagellm.core.clock import MonotonicClock
from sagellm.engines.build import build_engine, load_config
from tests.tiny_models import TINY_MODELS, VOCAB, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]


def tokens_of(folder: Path, vocab: int, device: str, dtype: str, **settings: object) -> list[list[int]]:
    """Greedy tokens of twelve prompts of 3 to 190 tokens, in batches that shrink and grow."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    config = load_config(
        cli={
            "model.name": str(folder), "model.device": device, "model.dtype": dtype, "kv.num_blocks": 400,
            "model.max_model_len": 256, "scheduler.max_num_seqs": 8, "scheduler.max_batched_tokens": 128,
            **named,
        },
        environ={},
    ).config  # fmt: skip
    engine = build_engine(config)
    try:
        random = torch.Generator().manual_seed(4)
        jobs = [
            PromptJob(torch.randint(3, vocab, (3 + 17 * i,), generator=random).tolist(), 4 + 3 * (i % 5))
            for i in range(12)
        ]
        return [answer.token_ids for answer in Session(engine, MonotonicClock()).run(jobs)]
    finally:
        engine.close()


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_a_gpu_gives_a_cpus_tokens_in_float32(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    expected = tokens_of(tmp_path, VOCAB, "cpu", "float32", engine__kernels="off")
    for kernels in ("auto", "off"):
        assert tokens_of(tmp_path, VOCAB, "cuda", "float32", engine__kernels=kernels) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_graphs_change_no_token(dtype: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    recorded, launched = (
        tokens_of(tmp_path, VOCAB, "cuda", dtype, engine__recorded_steps=graphs) for graphs in (True, False)
    )
    if dtype == "float32":
        assert recorded == launched
    else:  # a bucket's GEMM may round otherwise than the batch's; a near tie may then fall the other way
        same = sum(one == other for one, other in zip(recorded, launched, strict=True))
        assert same >= len(recorded) * 3 // 4


def test_overlap_changes_no_token(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    alone = tokens_of(tmp_path, VOCAB, "cuda", "float32")
    assert tokens_of(tmp_path, VOCAB, "cuda", "float32", engine__overlap=True) == alone


def test_a_model_of_random_weights_in_bfloat16(tmp_path: Path) -> None:
    """Two runs of the benchmark's small shape are equal, graphs and all."""
    write_model(SHAPES["tiny"], tmp_path)
    first, second = (tokens_of(tmp_path, 32_000, "cuda", "bfloat16") for _ in range(2))
    assert first == second
