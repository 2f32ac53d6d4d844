"""Attention on one rank and MLPs on others: the tokens of one rank, in micro-batches or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.comm.collectives.shared_memory import SharedMemoryBackend
from sagellm.comm.collectives.torch_distributed import TorchDistributedBackend
from sagellm.core.errors import CommError, EngineFailedError, PlanError
from sagellm.core.plan import Chain, ExecutionPlan, PhasePlacement, Prefill
from sagellm.core.types import SamplingParams
from sagellm.engines.native import attention, matrices
from sagellm.engines.native.model import DecoderModel
from sagellm.engines.native.parallel.attention_model import AttentionModel, micro_batches
from sagellm.engines.native.parallel.backends import ATTENTION, FFN
from sagellm.engines.native.parallel.ffn_rank import FfnRank
from sagellm.engines.native.parallel.split import Split
from sagellm.engines.native.recorded_steps import cuda_capture
from tests.effort import usual
from tests.engines.native.driver import Driver, RecordingBackend, Running
from tests.engines.native.parallel.rank_threads import OPTIONS, RecordingAttentionRank, first_rank
from tests.engines.native.parallel.test_same_tokens import EXPERTS, compare, generate, saved
from tests.tiny_models import TINY_MODELS

ONE, TWO = Split(0, ffn=1), Split(0, ffn=2)
USUAL = {"llama-biases", "opt-post-norm-projected", "gemma4", "gemma4-moe", "gpt-oss", "qwen3-next"}
DIVIDED = sorted(set(TINY_MODELS) - {"gemma4-moe"})
BATCH_DEPENDENT = {"gemma4", "gemma4-text-part", "llama-one-head-each"}
"""Torch computes a part of these and rounds by the number of rows, so micro-batches change bits."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def check_in_float64(folder: Path, split: Split) -> None:
    whole = generate(RecordingBackend(folder, dtype="float64", **OPTIONS))
    with first_rank(folder, split, dtype="float64") as backend:
        parts = generate(backend)
    compare(parts, whole, 1e-9)
    assert [sequence.outputs for sequence in parts] == [sequence.outputs for sequence in whole]
    for mine, theirs in zip(parts, whole, strict=True):
        assert [entry.token_id for entry in mine.logprobs] == [entry.token_id for entry in theirs.logprobs]


@pytest.mark.parametrize("name", usual(USUAL, sorted(TINY_MODELS)))
def test_one_rank_for_mlps(name: str, models: Path) -> None:
    check_in_float64(saved(models, name), ONE)


@pytest.mark.parametrize("name", usual({"llama-biases", "gpt-oss"}, DIVIDED))
def test_two_ranks_for_mlps(name: str, models: Path) -> None:
    check_in_float64(saved(models, name), TWO)


@pytest.mark.parametrize("name", usual({"qwen3-moe"}, sorted(EXPERTS - {"gemma4-moe"})))
def test_two_ranks_for_whole_experts(name: str, models: Path) -> None:
    check_in_float64(saved(models, name), Split(0, ffn=2, whole_experts=True))


def test_micro_batches_take_turns(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a layer's MLP has answered for one of them, the other one attends."""
    events: list[tuple[str, int]] = []
    attended, add = DecoderModel._attended, DecoderModel._add

    def watched_attended(self: DecoderModel, index: int, batch: Any) -> torch.Tensor:
        events.append(("attends", index))
        return attended(self, index, batch)

    def watched_add(self: DecoderModel, index: int, batch: Any, delta: torch.Tensor) -> None:
        events.append(("has its MLP", index))
        add(self, index, batch, delta)

    with first_rank(saved(models, "llama"), ONE, dtype="float64") as backend:
        driver = Driver(backend)
        for prompt in ([5, 6, 7, 8, 9], [9, 8, 7, 6]):
            driver.add(prompt, 2)
        monkeypatch.setattr(DecoderModel, "_attended", watched_attended)
        monkeypatch.setattr(DecoderModel, "_add", watched_add)
        driver.step()
        assert events[:6] == [
            ("attends", 0), ("attends", 0), ("has its MLP", 0), ("attends", 1), ("has its MLP", 0),
            ("attends", 1),
        ]  # fmt: skip
        assert len(events) == 2 * 2 * backend.spec.num_layers
        driver.run()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels win every measurement."""
    if cpu_kernels(1).attention is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(matrices, "time_kernel", lambda *_: {1: (2.0, 1.0)})
    monkeypatch.setattr(attention, "kernel_wins_prefill", lambda *_: True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", usual({"llama", "qwen3-moe", "qwen3-next"}, sorted(TINY_MODELS)))
def test_float32_has_the_bits_of_one_rank(name: str, models: Path) -> None:
    """Where a row's bits depend on no other row, micro-batches change none either."""
    folder, kernels = saved(models, name), dict[str, Any](dtype="float32", kernels=cpu_kernels)
    whole = generate(RecordingBackend(folder, **OPTIONS, **kernels))
    with first_rank(folder, ONE, **kernels) as backend:
        parts = generate(backend)
    compare(parts, whole, 1e-4)
    for one, same in zip(parts, whole, strict=True) if name not in BATCH_DEPENDENT else ():
        assert one.outputs == same.outputs
        assert all(map(torch.equal, one.logits, same.logits))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("split", [ONE, TWO])
@pytest.mark.parametrize(
    "name", usual({"llama", "qwen3-moe"}, ["llama", "llama-biases", "qwen3", "qwen3-moe"])
)
def test_recorded_steps(name: str, split: Split, models: Path) -> None:
    """They are recorded on all ranks, and have the bits of steps that are not."""
    folder, kernels = saved(models, name), dict[str, Any](dtype="float32", kernels=cpu_kernels)
    made = list[list[Running]]()
    for capture in (cuda_capture, None):
        with first_rank(folder, split, capture=capture, **kernels) as backend:
            made.append(generate(backend))
            recorded = backend._steps._replays if backend._steps else {}
        assert any(recorded.values()) == (capture is not None)
    for one, same in zip(*made, strict=True):
        assert one.outputs == same.outputs
        assert all(map(torch.equal, one.logits, same.logits))
    compare(made[0], generate(RecordingBackend(folder, capture=cuda_capture, **OPTIONS, **kernels)), 1e-4)


@pytest.mark.parametrize("kind", [SharedMemoryBackend, TorchDistributedBackend])
def test_messages_that_fit_no_ring(kind: Any, models: Path) -> None:
    """Both ways are full at once: each rank must take in what comes while it sends."""
    options = {"max_num_seqs": 2, "num_blocks": 160, "max_model_len": 512, "dtype": "float64"}
    outputs = []
    for split in (None, ONE):
        prompts = [[3 + (i * step) % 250 for i in range(500)] for step in (3, 7)]
        if split is None:
            driver = Driver(RecordingBackend(saved(models, "llama"), **{**OPTIONS, **options}))
            done = [driver.add(prompt, 2) for prompt in prompts]
            driver.run()
        else:
            with first_rank(saved(models, "llama"), split, kind, **options) as backend:
                driver = Driver(backend)
                done = [driver.add(prompt, 2) for prompt in prompts]
                driver.run()
        outputs.append([sequence.outputs for sequence in done])
    assert outputs[0] == outputs[1]


def test_scored_prompts_are_one_batch(models: Path) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    with first_rank(saved(models, "llama"), ONE, dtype="float64") as backend:
        driver = Driver(backend)
        for prompt in ([5, 6, 7, 8, 9], [9, 8, 7, 6]):
            driver.add(prompt, 1, params)
        result = driver.step()
    whole = Driver(RecordingBackend(saved(models, "llama"), dtype="float64", **OPTIONS))
    for prompt in ([5, 6, 7, 8, 9], [9, 8, 7, 6]):
        whole.add(prompt, 1, params)
    expected = whole.step()
    assert result.token_ids == expected.token_ids
    assert result.prompt_logprobs.keys() == expected.prompt_logprobs.keys()
    for row, entries in result.prompt_logprobs.items():
        for mine, theirs in zip(entries, expected.prompt_logprobs[row], strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-9)


def test_a_failure_within_a_step_ends_the_engine(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The FFN rank waits for what never comes, until the first rank has left."""

    def fail(*_: object) -> torch.Tensor:
        raise ZeroDivisionError("a bug")

    def run() -> None:
        with first_rank(saved(models, "llama"), ONE, SharedMemoryBackend) as backend:
            driver = Driver(backend)
            driver.add([5, 6, 7], 4)
            driver.step()
            assert isinstance(backend._model, AttentionModel)
            monkeypatch.setattr(backend._model, "_attention", fail)
            with pytest.raises(EngineFailedError, match="rank 0 failed: a bug"):
                driver.step()

    with pytest.raises(CommError, match=r"has closed its group|has left"):
        run()


def test_a_plan_that_cannot_be_executed_leaves_the_ranks_as_they_were(models: Path) -> None:
    with first_rank(saved(models, "llama"), ONE) as backend:
        driver = Driver(backend)
        sequence = driver.add([5, 6, 7], 4)
        driver.step()
        with pytest.raises(PlanError, match="no request has joined"):
            backend.execute(ExecutionPlan(1, decode_rows=(5,), decode_positions=(3,)))
        backend.fail_with = ZeroDivisionError("a bug")
        with pytest.raises(ZeroDivisionError):  # behind the logits: the FFN rank has done its part
            driver.step()
        driver.run()
        assert len(sequence.outputs) == 4


def test_the_error_of_an_ffn_rank_ends_the_engine(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug of the FFN rank")

    def run() -> None:
        with first_rank(saved(models, "llama"), ONE, SharedMemoryBackend) as backend:
            driver = Driver(backend)
            driver.add([5, 6, 7], 4)
            driver.step()
            monkeypatch.setattr(FfnRank, "_answer", fail)
            with pytest.raises(EngineFailedError, match="a bug of the FFN rank"):
                driver.step()

    with pytest.raises(ZeroDivisionError, match="of the FFN rank"):
        run()


def test_plans_place_halves_where_they_are(models: Path) -> None:
    with first_rank(saved(models, "llama"), ONE) as backend:
        assert "af_separation" in backend.capability().features
        assert isinstance(backend, RecordingAttentionRank)
        backend.execute(ExecutionPlan(0, placements=(("r", PhasePlacement(attention=ATTENTION, ffn=FFN)),)))
        for placement, words in (
            (PhasePlacement(ffn="f0"), "r: FFN on 'f0'; this engine computes it on 'ffn'"),
            (PhasePlacement(attention="a0"), "r: attention on 'a0'; .* on 'attention'"),
        ):
            with pytest.raises(PlanError, match=words):
                backend.execute(ExecutionPlan(0, placements=(("r", placement),)))


@given(st.lists(st.integers(0, 4), max_size=8), st.lists(st.integers(1, 9), max_size=4), st.integers(1, 12))
def test_micro_batches_are_the_plan_cut_once(chains: list[int], chunks: list[int], fewest: int) -> None:
    plan = ExecutionPlan(
        0, decode_rows=tuple(range(len(chains))), decode_positions=tuple(10 + i for i in range(len(chains))),
        prefills=tuple(
            Prefill(len(chains) + i, f"r{i}", 0, n, samples=i % 2 == 0) for i, n in enumerate(chunks)
        ),
        chains=tuple(Chain(row, (7,) * n) for row, n in enumerate(chains) if n),
    )  # fmt: skip
    parts = micro_batches(plan, fewest)
    assert sum((part.decode_rows for part in parts), ()) == plan.decode_rows
    assert sum((part.decode_positions for part in parts), ()) == plan.decode_positions
    assert sum((part.prefills for part in parts), ()) == plan.prefills
    assert sum((part.chains for part in parts), ()) == plan.chains
    assert sum((part.sample_rows for part in parts), ()) == plan.sample_rows
    sizes = [1 + n for n in chains] + chunks
    best = max((min(sum(sizes[:i]), sum(sizes[i:])) for i in range(1, len(sizes))), default=0)
    assert len(parts) == (2 if best >= fewest else 1)
    if len(parts) == 2:
        assert min(part.num_tokens for part in parts) == best
