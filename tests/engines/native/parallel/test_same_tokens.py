"""A divided model draws the tokens of the whole one: every family, chunked, preempted, in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.core.types import SamplingParams
from sagellm.engines.native import attention, matrices
from sagellm.engines.native.parallel.split import Split
from sagellm.engines.native.recorded_steps import cuda_capture
from tests.effort import usual
from tests.engines.native.driver import GREEDY, Driver, RecordingBackend, Running
from tests.engines.native.parallel.rank_threads import OPTIONS, first_rank
from tests.tiny_models import RECURRENT, TINY_MODELS, VOCAB, save_tiny

NEAR_TIE = 1e-5
LENGTHS = (5, 33, 46, 70)
NEW_TOKENS = 12
EXPERTS = {name for name in TINY_MODELS if "moe" in name or name.startswith(("mixtral", "gpt-oss", "llama4"))}
EXPERTS -= RECURRENT | {"llama4-text-part"}
NORMED_TOGETHER = {"olmo2", "olmo3-window-mix"}
NO_STAGES = {name for name in TINY_MODELS if name.startswith("gemma4")} - {
    "gemma4-wide-windows",
    "gemma4-moe",
}
DIVIDED = sorted(set(TINY_MODELS) - RECURRENT - NORMED_TOGETHER)
USUAL = {"llama-biases", "qwen3-head80-window", "deepseek2-moe", "gpt-oss", "gemma4", "opt", "phi3"}
SCORED = SamplingParams(temperature=0.8, seed=3, prompt_logprobs=2, logprobs=1, frequency_penalty=0.4)


def prompts(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def generate(backend: RecordingBackend, *, together: bool = True) -> list[Running]:
    """Prompts in chunks that join one step after another, one of them preempted; or each alone."""
    driver, done = Driver(backend, (7, 30), seed=2), []
    for i, prompt in enumerate(prompts()):
        done.append(driver.add(prompt, NEW_TOKENS, SCORED if i == 2 else GREEDY, name=f"r{i}"))
        driver.step() if together else driver.run()
    if together:
        driver.preempt(done[1])
        driver.run()
    return done


def compare(ours: Sequence[Running], reference: Sequence[Running], tolerance: float) -> None:
    """Equal tokens up to a near-tie of the reference's two best logits, and near logits up to there."""
    for mine, theirs in zip(ours, reference, strict=True):
        for i, (token, expected) in enumerate(zip(mine.outputs, theirs.outputs, strict=True)):
            torch.testing.assert_close(mine.logits[i], theirs.logits[i], atol=tolerance, rtol=0)
            if token != expected:
                best, second = theirs.logits[i].topk(2).values.tolist()
                assert best - second <= NEAR_TIE, f"{mine.name}: token {i} is {token}, not {expected}"
                break


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def saved(models: Path, name: str) -> Path:
    if not (models / name).exists():
        save_tiny(models / name, name)
    return models / name


def check_split(folder: Path, split: Split) -> None:
    """In float64, where every token is the same."""
    whole = generate(RecordingBackend(folder, dtype="float64", **OPTIONS))
    with first_rank(folder, split, dtype="float64", split_kv=split.pipeline == 1) as backend:
        parts = generate(backend)
    compare(parts, whole, 1e-9)
    assert [sequence.outputs for sequence in parts] == [sequence.outputs for sequence in whole]
    for mine, theirs in zip(parts, whole, strict=True):
        assert [entry.token_id for entry in mine.logprobs] == [entry.token_id for entry in theirs.logprobs]


@pytest.mark.parametrize("name", usual(USUAL, DIVIDED))
def test_two_ranks_that_share_each_layer(name: str, models: Path) -> None:
    check_split(saved(models, name), Split(0, tensor=2))


@pytest.mark.parametrize("name", usual({"qwen3-moe", "gpt-oss"}, sorted(EXPERTS)))
def test_two_ranks_with_whole_experts(name: str, models: Path) -> None:
    check_split(saved(models, name), Split(0, tensor=2, whole_experts=True))


@pytest.mark.parametrize(
    "name", usual({"gemma2", "opt-post-norm-projected"}, sorted((set(DIVIDED) | NORMED_TOGETHER) - NO_STAGES))
)
def test_two_stages_of_a_pipeline(name: str, models: Path) -> None:
    check_split(saved(models, name), Split(0, pipeline=2))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_four_ranks_of_which_some_share_a_kv_head(name: str, models: Path) -> None:
    check_split(saved(models, name), Split(0, tensor=4))


def test_three_stages(models: Path) -> None:
    check_split(saved(models, "llama"), Split(0, pipeline=3))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels win every measurement."""
    if cpu_kernels(1).attention is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(matrices, "time_kernel", lambda *_: {1: (2.0, 1.0)})
    monkeypatch.setattr(attention, "kernel_wins_prefill", lambda *_: True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", usual({"gemma4-moe"}, DIVIDED))
def test_two_ranks_in_float32_by_kernels(name: str, models: Path) -> None:
    folder, kernels = saved(models, name), dict[str, Any](dtype="float32", kernels=cpu_kernels)
    whole = generate(RecordingBackend(folder, **OPTIONS, **kernels))
    for whole_experts in (False, True) if name in EXPERTS else (False,):
        with first_rank(folder, Split(0, 2, 1, whole_experts), **kernels) as backend:
            compare(generate(backend), whole, 2e-4)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", usual({"llama"}, ["llama", "gemma2", "mixtral", "qwen3"]))
def test_stages_in_float32_by_kernels(name: str, models: Path) -> None:
    folder, kernels = saved(models, name), dict[str, Any](dtype="float32", kernels=cpu_kernels)
    with first_rank(folder, Split(0, pipeline=2), split_kv=False, **kernels) as backend:
        parts = generate(backend)
    compare(parts, generate(RecordingBackend(folder, **OPTIONS, **kernels)), 1e-4)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", usual({"qwen3"}, ["llama-head80-tied", "llama-biases", "qwen3", "smollm3"]))
def test_float32_recorded_alone_and_in_a_batch(name: str, models: Path) -> None:
    """Recorded steps, other runs and other batches have the same bits; the whole model nearly the same."""
    folder, kernels = saved(models, name), dict[str, Any](dtype="float32", kernels=cpu_kernels)
    split, made = Split(0, tensor=2), list[list[Running]]()
    for capture, together in (
        (cuda_capture, True),
        (cuda_capture, True),
        (None, True),
        (cuda_capture, False),
    ):
        with first_rank(folder, split, capture=capture, **kernels) as backend:
            made.append(generate(backend, together=together))
            recorded = backend._steps._replays if backend._steps else {}
        assert any(recorded.values()) == (capture is not None)
    for other in made[1:]:
        for one, same in zip(made[0], other, strict=True):
            assert one.outputs == same.outputs
            assert all(map(torch.equal, one.logits, same.logits))
    whole = RecordingBackend(folder, capture=cuda_capture, **OPTIONS, **kernels)
    compare(made[0], generate(whole), 1e-4)
