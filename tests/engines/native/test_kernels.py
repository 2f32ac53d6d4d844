"""The engine with and without CPU kernels: the same tokens, the same logits but for the order of sums."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import pytest
import torch

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.accel.fusion.cpu.linear import PackedMatrix
from sagellm.core.config import Config
from sagellm.core.protocols.fusion import KernelSet, KernelSource, LinearKernel
from sagellm.engines.build import build_backend, build_engine, load_config
from sagellm.engines.native import attention, matrices
from sagellm.engines.native.matrices import MEASURED_ROWS, packing_is_faster, time_kernel
from tests.effort import usual
from tests.engines.native.driver import Driver, RecordingBackend, Running, mlp_of, native_model
from tests.tiny_models import VOCAB, save_tiny

MODELS = (
    "llama-head80-tied",
    "llama-biases",
    "llama4-dense-first",
    "mistral-window",
    "qwen3",
    "opt-post-norm-projected",
    "glm4",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-wide-windows",
    "olmo2",
    "phi3-longrope-partial",
    "granite",
)
"""Without experts: rounded otherwise, bfloat16 chooses another expert where two are nearly equal."""
DTYPES = ("float32", "bfloat16", "float16")
LOGIT_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def kernels() -> KernelSet:
    found = cpu_kernels(1)
    if found.linear is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture(scope="module")
def linear(kernels: KernelSet) -> LinearKernel:
    assert kernels.linear is not None
    return kernels.linear


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel wins every measurement."""
    monkeypatch.setattr(matrices, "time_kernel", lambda *_: {1: (2.0, 1.0)})


def generate(folder: Path, dtype: str, kernels: KernelSource | None) -> list[Running]:
    """Three prompts of 5, 21 and 40 tokens, whole and in chunks; all compute in float32."""
    backend = RecordingBackend(
        folder, num_blocks=64, max_num_seqs=6, block_size=8, threads=1, dtype=dtype, compute_dtype="float32",
        kernels=kernels,
    )  # fmt: skip
    done: list[Running] = []
    for chunks in ((10_000,), (1, 7, 16)):
        driver = Driver(backend, chunks)
        generator = torch.Generator().manual_seed(1)
        for length in (5, 21, 40):
            done.append(driver.add(torch.randint(3, VOCAB, (length,), generator=generator).tolist(), 12))
            driver.step()
        driver.run()
    return done


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("name", "dtype"), usual(list(zip(MODELS, cycle(DTYPES))), product(MODELS, DTYPES)))
def test_the_same_tokens_with_kernels_on_and_off(
    name: str, dtype: str, kernels: KernelSet, tmp_path: Path
) -> None:
    save_tiny(tmp_path, name)
    plain = generate(tmp_path, dtype, None)
    for mine, theirs in zip(generate(tmp_path, dtype, lambda _: kernels), plain, strict=True):
        assert mine.outputs == theirs.outputs
        for ours, reference in zip(mine.logits, theirs.logits, strict=True):
            torch.testing.assert_close(ours, reference, atol=LOGIT_TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "dtype"), usual(list(zip(MODELS, cycle(reversed(DTYPES)))), product(MODELS, DTYPES))
)
def test_the_same_logits_with_what_lies_between_matrices_by_kernels(
    name: str, dtype: str, kernels: KernelSet, tmp_path: Path
) -> None:
    """Of one token and of chunks, in the dtype that is computed in; half precision rounds less often here."""
    save_tiny(tmp_path, name)
    steps: list[list[torch.Tensor]] = []
    for used in (replace(kernels, linear=None, attention=None), KernelSet()):
        backend = RecordingBackend(
            tmp_path, num_blocks=64, block_size=8, threads=2, dtype=dtype, compute_dtype=dtype,
            kernels=lambda _, k=used: k,  # type: ignore[misc]
        )  # fmt: skip
        driver = Driver(backend, (1, 7, 30))
        driver.add(list(range(3, 43)), 1)
        driver.add(list(range(40, 20, -1)), 1)
        running = list(driver.joining)
        driver.run()
        steps.append([logits for sequence in running for logits in sequence.logits])
    bound = {"float32": LOGIT_TOLERANCE, "bfloat16": 0.1, "float16": 0.0125}[dtype]
    for ours, reference in zip(*steps, strict=True):
        torch.testing.assert_close(ours, reference, atol=bound * float(reference.abs().max()), rtol=0)


def test_who_does_what_lies_between_matrices(kernels: KernelSet, tmp_path: Path) -> None:
    """What a model does not have, or not in a dtype of the kernels, is torch's."""
    fields = ("add_rms_norm", "rope_to_cache", "silu_and_mul")
    expected = {("qwen3", "float32"): (True, True, True), ("qwen3", "float64"): (False, False, False)}
    expected |= {("opt-post-norm-projected", "bfloat16"): (False, True, False)}
    for (name, dtype), usable in expected.items():
        (tmp_path / name).mkdir(exist_ok=True)
        save_tiny(tmp_path / name, name)
        backend = RecordingBackend(
            tmp_path / name, num_blocks=8, dtype=dtype, compute_dtype=dtype, kernels=lambda _: kernels
        )
        used = native_model(backend)._kernels
        assert tuple(getattr(used, field) is not None for field in fields) == usable


@pytest.mark.usefixtures("always")
def test_matrices_stay_as_they_are_stored(kernels: KernelSet, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama-biases")
    backend = RecordingBackend(
        tmp_path, num_blocks=8, threads=1, dtype="bfloat16", compute_dtype="float32",
        kernels=lambda _: kernels,
    )  # fmt: skip
    layer = native_model(backend)._layers[0]
    up = mlp_of(layer).up
    assert up.bias is not None
    assert layer.mlp_norm.weight is not None
    assert isinstance(up.matrix, PackedMatrix)
    assert up.matrix.dtype == torch.bfloat16
    assert up.bias.dtype == layer.mlp_norm.weight.dtype == torch.float32
    assert backend.get_kv_schema().dtype == "float32"
    assert backend.capability().dtype == "bfloat16"


def test_the_race(linear: LinearKernel) -> None:
    """Every size is measured, and the whole decides."""
    found = time_kernel(linear, torch.float32, torch.bfloat16)
    assert tuple(found) == MEASURED_ROWS
    assert all(seconds > 0 for both in found.values() for seconds in both)


@pytest.mark.parametrize("kernel_s", [0.2, 0.24, 0.3])
def test_matrices_are_packed_where_that_is_faster(
    linear: LinearKernel, kernel_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrices, "time_kernel", lambda *_: {1: (1.0, kernel_s), 8: (1.0, 4.0)})
    assert packing_is_faster(linear, torch.float32, torch.bfloat16) == (kernel_s == 0.2), "by a margin"


def test_without_a_kernel_for_these_dtypes_nothing_is_measured(
    linear: LinearKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrices, "time_kernel", None)
    assert not packing_is_faster(linear, torch.float64, torch.float64)
    assert not packing_is_faster(None, torch.float32, torch.bfloat16)


@pytest.mark.usefixtures("always")
def test_threads_are_the_kernels_own(
    kernels: KernelSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has one where the kernels have theirs, whoever attends to chunks, and all of them without."""
    save_tiny(tmp_path, "llama-biases")
    before = torch.get_num_threads()
    try:
        for source, wins, expected in ((kernels, True, 1), (kernels, False, 1), (None, True, 2)):
            monkeypatch.setattr(attention, "kernel_wins_prefill", lambda *_, wins=wins: wins)
            torch.set_num_threads(3)
            made = RecordingBackend(
                tmp_path, num_blocks=8, threads=2, dtype="bfloat16", compute_dtype="float32",
                kernels=None if source is None else lambda _: kernels,
            )  # fmt: skip
            assert torch.get_num_threads() == expected
            made.close()
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_the_setting_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def none(threads: int) -> KernelSet:
        asked.append(threads)
        return KernelSet()

    monkeypatch.setattr("sagellm.engines.native.from_config.cpu_kernels", none)
    for value in ("auto", "off"):
        build_backend(settings(value)).close()
    assert asked == [1]


def test_without_a_compiler_the_engine_says_so_and_uses_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        engine = build_engine(settings("auto"))
    assert [record.name for record in caplog.records] == ["sagellm.kernels"]
    engine.close()


def settings(kernels: str) -> Config:
    given = {"engine.kernels": kernels, "kv.num_blocks": 8, "model.max_model_len": 64, "engine.threads": 1}
    return load_config(cli=given, environ={}).config
