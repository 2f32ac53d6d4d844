"""Recorded decode steps, as far as a CPU can tell: recording is there running the same work again."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from itertools import cycle, pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.core.plan import ExecutionPlan, Prefill
from sagellm.core.protocols.fusion import Capture, FusedKernel, KernelSet
from sagellm.core.types import AttentionChunk, KVGroup, SamplingParams
from sagellm.engines.native import attention, matrices, recorded_steps, rope
from sagellm.engines.native.attention import Span
from sagellm.engines.native.backend import CaptureSource
from sagellm.engines.native.kv_cache import LayerKind, PagedKV
from sagellm.engines.native.model import DecoderModel
from sagellm.engines.native.recorded_steps import DecodeInputs, buckets, cuda_capture
from tests.effort import usual
from tests.engines.native.driver import GREEDY, Driver, RecordingBackend, Running
from tests.tiny_models import DISTINCT, RECURRENT, TINY_MODELS, VOCAB, save_tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernel() -> FusedKernel:
    found = cpu_kernels(1).attention
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@given(st.integers(1, 1024))
def test_buckets_hold_every_batch_and_little_padding(max_rows: int) -> None:
    sizes = buckets(max_rows)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, max_rows)
    for smaller, larger in pairwise(sizes):
        assert larger <= (2 if smaller < 16 else 1.5) * smaller
    assert len(sizes) <= 20


def test_only_cuda_devices_record() -> None:
    assert cuda_capture(CPU) is None


@given(
    starts=st.lists(st.integers(0, 63), max_size=5),
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_what_is_filled_in_is_what_the_model_gets(starts: list[int], padding: int, seed: int) -> None:
    groups = (KVGroup((0,)), KVGroup((1,), 7), KVGroup((2,), AttentionChunk(8)))
    kv = PagedKV(3, 90, 4, 2, 8, CPU, torch.float32, has_scratch=True, groups=groups)
    kinds: tuple[LayerKind, ...] = ((0, None), (1, 7), (2, AttentionChunk(8)))
    inputs = DecodeInputs(kv, None, kinds, 8, 64)  # type: ignore[arg-type]  # it is not called
    table = array("i", range(16))
    inputs.fill([5] * 8, [Span(i, 1, 63, table) for i in range(8)], [[table] * 3] * 8, 8)  # an earlier step
    rows = len(starts) + padding
    step = inputs.step(rows, 63)
    blocks = torch.randperm(90, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [array("i", [blocks.pop() for _ in range(start // 4 + 1)]) for start in starts]
    others = [array("i", reversed(table)) for table in tables]
    spans = [Span(i, 1, start, table) for i, (start, table) in enumerate(zip(starts, tables, strict=True))]
    third = [array("i", [block + 1 for block in table]) for table in tables]
    all_of = [list(own) for own in zip(tables, others, third, strict=True)]
    inputs.fill(list(range(7, 7 + len(starts))), spans, all_of, rows)

    assert step.tokens.tolist() == [*range(7, 7 + len(starts)), *[0] * padding]
    assert step.positions.tolist() == [*starts, *[0] * padding]
    scratch = kv.scratch_block * 4
    assert step.sampled is None
    for (group, window), in_group in zip(kinds, (tables, others, third), strict=True):
        own = [table[start // 4] * 4 + start % 4 for start, table in zip(starts, in_group, strict=True)]
        assert step.slots[group].tolist() == [*own, *[scratch] * padding]
        call = step.attention[group, window].kernel
        assert call is not None
        chunk = window.size if isinstance(window, AttentionChunk) else 64
        assert (call.window, call.num_rows) == (None if window == AttentionChunk(8) else window, rows)
        assert call.spans[:, :3].tolist() == [
            [i, 1, start % chunk] for i, start in enumerate([*starts, *[0] * padding])
        ]
        seen = [table[start // chunk * chunk // 4 :] for table, start in zip(in_group, starts, strict=True)]
        firsts = call.spans[:, 3].tolist()
        for entries, first in zip([*seen, *[[kv.scratch_block]] * padding], firsts, strict=True):
            assert call.tables[first : first + len(entries)].tolist() == list(entries)


def test_chains_are_spans_of_several_tokens_and_leave_others_empty() -> None:
    kv = PagedKV(
        2, 90, 4, 2, 8, CPU, torch.float32, has_scratch=True, groups=(KVGroup((0,)), KVGroup((1,), 7))
    )
    inputs = DecodeInputs(kv, None, ((0, None), (1, 7)), 8, 64)  # type: ignore[arg-type]  # it is not called
    tables = [[array("i", [3, 1, 4]), array("i", [5, 9, 2])], [array("i", [7]), array("i", [8])]]
    inputs.fill(
        [5] * 8, [Span(i, 1, 7, tables[0][0]) for i in range(8)], [tables[0]] * 8, 8
    )  # an earlier step
    spans = [Span(0, 4, 6, tables[0][0]), Span(4, 1, 2, tables[1][0])]
    inputs.fill([11, 12, 13, 14, 15], spans, tables, 6)
    step = inputs.step(6, 63)
    assert step.tokens.tolist() == [11, 12, 13, 14, 15, 0]
    assert step.positions.tolist() == [6, 7, 8, 9, 2, 0]
    scratch = kv.scratch_block
    assert [slots.tolist() for slots in step.slots] == [
        [1 * 4 + 2, 1 * 4 + 3, 4 * 4, 4 * 4 + 1, 7 * 4 + 2, scratch * 4],
        [9 * 4 + 2, 9 * 4 + 3, 2 * 4, 2 * 4 + 1, 8 * 4 + 2, scratch * 4],
    ]
    for group, window in ((0, None), (1, 7)):
        call = step.attention[group, window].kernel
        assert call is not None
        assert call.spans.tolist() == [[0, 4, 6, 0], [4, 1, 2, 3], [5, 1, 0, 4], *[[0] * 4] * 3]
        assert call.tables[:5].tolist() == [*tables[0][group], *tables[1][group], scratch]


class Recorder:
    """Captures by running; counts what is run again."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, device: torch.device) -> Capture:
        return self.capture

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        work()

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def generate(folder: Path, kernel: FusedKernel, recorder: Recorder | None) -> list[Running]:
    """Batches of one to five, prompts in between, preemption, over a pool of NaN."""
    backend = RecordingBackend(
        folder, num_blocks=96, max_num_seqs=6, block_size=8, threads=1, dtype="float32",
        kernels=lambda _: KernelSet(attention=kernel), capture=recorder,
    )  # fmt: skip
    for pool in (*backend._kv.keys, *backend._kv.values):  # whatever an earlier owner left must not be read
        pool.fill_(math.nan)
    driver, generator, done = Driver(backend, (7, 30)), torch.Generator().manual_seed(2), []
    for length in (5, 21, 70, 1, 9):
        done.append(driver.add(torch.randint(3, VOCAB, (length,), generator=generator).tolist(), 12))
        for _ in range(4):
            driver.step()
    driver.preempt(done[-1])
    driver.run()
    return done


TOLERANCE = {"gemma4": 2e-5}
"""Its float32 logits by transformers are 2.1e-5 from those in float64, three times as far as llama's."""


@pytest.mark.parametrize("name", usual(DISTINCT, sorted(TINY_MODELS)))
def test_the_same_tokens_with_graphs_on_and_off(name: str, kernel: FusedKernel, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    recorder = Recorder()
    with_graphs, without = generate(tmp_path, kernel, recorder), generate(tmp_path, kernel, None)
    has_experts = any(word in name for word in ("moe", "mixtral", "gpt-oss", "llama4"))
    has_experts &= name != "llama4-text-part"
    assert recorder.replays == 0 if has_experts or name in RECURRENT else recorder.replays > 10
    for one, other in zip(with_graphs, without, strict=True):
        assert one.outputs == other.outputs
        for ours, theirs in zip(one.logits, other.logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE.get(name, 1e-5), rtol=0)


RECORDED = {"llama", "llama-head80-tied", "llama-biases", "mistral-window", "qwen2", "qwen3"}
RECORDED |= {"gemma2", "gemma3", "glm4", "granite", "olmo3-window-mix", "phi3-longrope-partial", "smollm3"}
RECORDED |= {"mixtral", "qwen3-moe", "llama4-text-part"}
BY_TORCH = {"llama-one-head-each", "opt-post-norm-projected"}  # their activations
DTYPES = ("float32", "bfloat16")
EITHER = list(zip(sorted(RECORDED | BY_TORCH), cycle(DTYPES)))
"""Each model in one of the dtypes."""


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels win every measurement."""
    monkeypatch.setattr(matrices, "time_kernel", lambda *_: {1: (2.0, 1.0)})
    monkeypatch.setattr(attention, "kernel_wins_prefill", lambda *_: True)


def by_kernels(folder: Path, dtype: str, capture: CaptureSource | None) -> tuple[list[Running], set[int]]:
    """Batches of one to ten over a pool of NaN, and which of them are recorded."""
    backend = RecordingBackend(
        folder, num_blocks=128, max_num_seqs=10, block_size=8, threads=2, dtype=dtype, kernels=cpu_kernels,
        capture=capture,
    )  # fmt: skip
    for pool in (*backend._kv.keys, *backend._kv.values):
        pool.fill_(math.nan)
    driver, generator = Driver(backend, (7, 30)), torch.Generator().manual_seed(2)
    done: list[Running] = []
    for length in (5, 21, 70, 1, 9, 8, 3, 16, 2, 4):
        prompt = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        params = SamplingParams(temperature=0.7, seed=length, presence_penalty=0.5) if length == 9 else GREEDY
        done.append(driver.add(prompt, 25 - 2 * len(done), params))
        driver.step()
    driver.preempt(done[1])
    driver.run()
    replays = backend._steps._replays if backend._steps else {}
    return done, {rows for rows, replay in replays.items() if replay is not None}


@pytest.mark.usefixtures("always", "kernel")
@pytest.mark.parametrize(("name", "dtype"), usual(EITHER, product(sorted(RECORDED | BY_TORCH), DTYPES)))
def test_kernels_run_again_give_the_same_bits(name: str, dtype: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    recorded, sizes = by_kernels(tmp_path, dtype, cuda_capture)
    plain, none = by_kernels(tmp_path, dtype, None)
    assert not none
    if name in RECORDED:
        assert {3, 8} <= sizes <= set(range(1, 17))
    else:
        assert not sizes, "torch computes in every step of it"
    for one, other in zip(recorded, plain, strict=True):
        assert one.outputs == other.outputs
        assert all(map(torch.equal, one.logits, other.logits))


@pytest.mark.usefixtures("always", "kernel")
def test_rows_that_outgrow_the_tables_are_recorded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "qwen3")
    lengths: list[int] = []
    extend_to = DecoderModel.extend_to

    def counted(self: DecoderModel, max_position: int) -> None:
        lengths.append(max_position)
        extend_to(self, max_position)

    monkeypatch.setattr(DecoderModel, "extend_to", counted)
    monkeypatch.setattr(recorded_steps, "_FIRST_LENGTH", 8)
    monkeypatch.setattr(rope, "_FIRST_TABLE", 8)
    done: list[Running] = []
    for capture in (cuda_capture, None):
        backend = RecordingBackend(
            tmp_path, num_blocks=32, block_size=8, threads=1, dtype="bfloat16", kernels=cpu_kernels,
            capture=capture,
        )  # fmt: skip
        driver = Driver(backend)
        done.append(driver.add([5, 6, 7], 60))
        driver.run()
    assert lengths == [7, 17, 37, 77]
    assert done[0].outputs == done[1].outputs
    assert all(map(torch.equal, done[0].logits, done[1].logits))


def test_steps_with_prompts_are_not_recorded(kernel: FusedKernel, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    backend = RecordingBackend(
        tmp_path, num_blocks=8, max_num_seqs=2, threads=1, dtype="float32", capture=Recorder(),
        kernels=lambda _: KernelSet(attention=kernel),
    )  # fmt: skip
    assert backend._steps is not None
    assert backend.capability().num_blocks == 8, "the scratch block is nobody's"
    prefill = Prefill(1, "b", 0, 4, samples=True)
    assert backend._steps.can_run(ExecutionPlan(0, decode_rows=(0,), decode_positions=(3,)))
    assert not backend._steps.can_run(ExecutionPlan(0, decode_rows=(0,), prefills=(prefill,)))
    assert not backend._steps.can_run(ExecutionPlan(0))


def test_without_an_attention_kernel_nothing_is_recorded(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    recorder = Recorder()
    backend = RecordingBackend(
        tmp_path, num_blocks=8, threads=1, kernels=lambda _: KernelSet(), capture=recorder
    )
    assert backend._steps is None
    assert backend._kv.keys[0].shape[0] == 8
