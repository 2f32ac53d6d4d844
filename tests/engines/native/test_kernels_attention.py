"""Steps whose attention a kernel does: against the engine's own twin, and tokens against torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.core.blocks import cdiv
from sagellm.core.protocols.fusion import FusedKernel, KernelSet
from sagellm.engines.native import attention
from sagellm.engines.native.attention import (
    AttentionPlanner,
    Span,
    attend,
    attention_planner,
)
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.measure import torch_threads
from tests.effort import usual
from tests.engines.native.attention_reference import attention_reference
from tests.engines.native.driver import Driver, RecordingBackend, Running
from tests.tiny_models import DISTINCT, TINY_MODELS, VOCAB, save_tiny

KV_HEADS, HEADS, DIM, BLOCK_SIZE = 2, 6, 24, 4


@pytest.fixture(scope="module")
def kernel() -> FusedKernel:
    found = cpu_kernels(1).attention
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def pool(num_blocks: int = 160, dtype: torch.dtype = torch.float32) -> PagedKV:
    kv = PagedKV(1, num_blocks, BLOCK_SIZE, KV_HEADS, DIM, torch.device("cpu"), dtype)
    kv.keys[0].normal_()
    kv.values[0].normal_()
    return kv


@settings(max_examples=40)
@given(
    decode=st.lists(st.integers(0, 150), max_size=5),
    prefill=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), max_size=2),
    window=st.none() | st.integers(1, 90),
    seed=st.integers(0, 99),
    chunks=st.booleans(),
    num_chains=st.integers(0, 2),
)
def test_a_step_by_kernel_and_by_both(
    kernel: FusedKernel, decode: list[int], prefill: list[tuple[int, int]], window: int | None, seed: int,
    chunks: bool, num_chains: int,
) -> None:  # fmt: skip
    if not decode and not prefill:
        return
    torch.manual_seed(seed)
    kv, free = pool(400), torch.randperm(400).tolist()
    spans: list[Span] = []
    for start, tokens in [(start, 1) for start in sorted(decode, reverse=True)] + prefill:
        table = [free.pop() for _ in range(cdiv(start + tokens, BLOCK_SIZE))]
        first = spans[-1].first_row + spans[-1].num_tokens if spans else 0
        spans.append(Span(first, tokens, start, table))
    num_rows = spans[-1].first_row + spans[-1].num_tokens
    query = torch.randn(num_rows, HEADS, DIM)
    slots = [s.block_ids[p // 4] * 4 + p % 4 for s in spans for p in range(s.start, s.end)]
    key, value = kv.keys[0].flatten(0, 1)[slots], kv.values[0].flatten(0, 1)[slots]
    planner = AttentionPlanner(kv, kernel, chunks=chunks)
    first, stop = len(decode), len(decode) + num_chains
    plan = planner.plan(spans[:first], spans[first:stop], spans[stop:], window)
    found = attend(plan, kv, 0, query, key, value)
    expected = attention_reference(spans, kv, 0, query, window)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_without_support_for_the_pool_torch_does_all(kernel: FusedKernel) -> None:
    assert attention_planner(pool(dtype=torch.float64), HEADS, kernel, kernel).reads_padding
    assert attention_planner(pool(), HEADS, None, None).reads_padding
    assert not attention_planner(pool(), HEADS, kernel, kernel).reads_padding


def test_torch_computes_only_long_chunks_on_several_threads() -> None:
    kv = pool(400)
    table = torch.randperm(400).tolist()
    spans = [Span(0, 300, 0, table[:75]), Span(300, 8, 20, table[75:82])]
    planner = AttentionPlanner(kv, chunk_threads=2)
    plan = planner.plan((), (), spans, None)
    assert [chunk.threads for chunk in plan.prefill] == [2, None]
    query, key = torch.randn(308, HEADS, DIM), torch.randn(308, *kv.keys[0].shape[2:])
    with torch_threads(1):
        found = attend(plan, kv, 0, query, key, key)
        assert torch.get_num_threads() == 1
        expected = attend(AttentionPlanner(kv).plan((), (), spans, None), kv, 0, query, key, key)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("torch_s", [2.0, 1.04, 0.5])
def test_who_does_chunks_is_measured(
    kernel: FusedKernel, torch_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch does unless the kernel, which takes a second, is faster by a margin."""
    torch_is_slow = torch_s == 2.0

    def in_turns(device: torch.device, runs: Sequence[Callable[[], object]], _: int) -> tuple[float, float]:
        for run in runs:
            run()
        return torch_s, 1.0

    monkeypatch.setattr(attention, "in_turns", in_turns)
    monkeypatch.setattr(attention, "recorded", lambda case, build, measure: measure())
    plan = attention_planner(pool(), HEADS, kernel, kernel).plan((), (), [Span(0, 3, 0, [0])], None)
    assert (plan.kernel is None) != torch_is_slow
    assert bool(plan.prefill) != torch_is_slow


@pytest.fixture(params=["kernel for all", "kernel for decode"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    for_all = bool(request.param == "kernel for all")
    monkeypatch.setattr(attention, "kernel_wins_prefill", lambda *_: for_all)
    return for_all


def generate(folder: Path, kernels: KernelSet) -> list[Running]:
    """Prompts of 5 to 70 tokens, whole, in chunks and preempted, over a pool of NaN."""
    backend = RecordingBackend(
        folder, num_blocks=96, max_num_seqs=6, block_size=8, threads=1, dtype="float32",
        kernels=lambda _: kernels,
    )  # fmt: skip
    for each in (*backend._kv.keys, *backend._kv.values):  # whatever an earlier owner left must not be read
        each.fill_(math.nan)
    done: list[Running] = []
    for sizes in ((10_000,), (1, 7, 16)):
        driver = Driver(backend, sizes)
        generator = torch.Generator().manual_seed(2)
        for length in (5, 21, 70):
            done.append(driver.add(torch.randint(3, VOCAB, (length,), generator=generator).tolist(), 12))
            driver.step()
        driver.preempt(done[-1])
        driver.run()
    return done


@pytest.mark.parametrize("name", usual(DISTINCT, sorted(TINY_MODELS)))
def test_the_same_tokens_with_the_kernel_on_and_off(
    name: str, kernel: FusedKernel, chunks: bool, tmp_path: Path
) -> None:
    save_tiny(tmp_path, name)
    mine, theirs = generate(tmp_path, KernelSet(attention=kernel)), generate(tmp_path, KernelSet())
    for one, other in zip(mine, theirs, strict=True):
        assert one.outputs == other.outputs
        for ours, reference in zip(one.logits, other.logits, strict=True):
            torch.testing.assert_close(ours, reference, atol=1e-4, rtol=0)
