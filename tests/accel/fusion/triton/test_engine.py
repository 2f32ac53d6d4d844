"""A model on Triton's kernels, recorded steps and all, gives torch's tokens."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from sagellm.accel.fusion.triton import triton_kernels
from sagellm.core.protocols.fusion import Capture, KernelSet, Work
from sagellm.core.types import SamplingParams
from sagellm.engines.native import attention
from tests.accel.fusion.triton.scenes import interpreted
from tests.engines.native.driver import Driver, RecordingBackend, Running
from tests.tiny_models import VOCAB, save_tiny

NAMES = ("llama", "qwen3-head80-window", "qwen3-moe", "deepseek3-moe-groups", "gpt-oss", "gemma3")
DRAWN = SamplingParams(temperature=0.8, top_k=30, top_p=0.95, seed=3)


def run_again(_: torch.device) -> Capture:
    def capture(work: Work) -> Work:
        work()
        return work

    return capture


def generate(folder: Path, kernels: KernelSet, device: str) -> list[Running]:
    """Two prompts, one in chunks beside decode; greedy and drawn. A pool of NaN: padding is not read."""
    backend = RecordingBackend(
        folder, device=device, num_blocks=24, max_num_seqs=3, max_model_len=64, block_size=8, threads=1,
        dtype="float32", kernels=lambda _: kernels, cuda_kernels=lambda: kernels, capture=run_again,
    )  # fmt: skip
    for pool in (*backend._kv.keys, *backend._kv.values):
        pool.fill_(math.nan)
    driver, generator, done = Driver(backend, (9, 5)), torch.Generator().manual_seed(2), []
    for length, params in ((5, SamplingParams(temperature=0.0)), (13, DRAWN)):
        prompt = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        done.append(driver.add(prompt, 3, params, name=f"r{length}"))
        driver.step()
    driver.run()
    return done


@pytest.mark.parametrize("name", interpreted(NAMES[:1], NAMES))
@pytest.mark.parametrize("chunks", [True, False], ids=["all by kernel", "decode by kernel"])
def test_the_same_tokens_as_torch(
    name: str, chunks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "kernel_wins_prefill", lambda *_: chunks)
    save_tiny(tmp_path, name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mine, theirs = generate(tmp_path, triton_kernels(), device), generate(tmp_path, KernelSet(), device)
    for one, other in zip(mine, theirs, strict=True):
        assert one.outputs == other.outputs
        for ours, reference in zip(one.logits, other.logits, strict=True):
            torch.testing.assert_close(ours, reference, atol=1e-4, rtol=0)
