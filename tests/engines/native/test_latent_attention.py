"""Latent attention: both forms give the same, and the cache holds one vector per token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.accel.quantization.round_to_nearest import RoundToNearest
from sagellm.core.errors import UnsupportedModelError
from sagellm.core.protocols.fusion import FusedKernel, KernelSet, Scores
from sagellm.engines.native.architectures import read_spec
from sagellm.engines.native.attention import AttentionPlanner, Span
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.footprint import footprint
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.latent_attention import LatentLayer, fewer_expanded
from sagellm.engines.native.latent_spec import LatentSpec
from sagellm.engines.native.matrices import Dense
from sagellm.engines.native.model import NO_KERNELS
from tests.engines.native.driver import attention_of, native_model
from tests.tiny_models import save_tiny

HEADS, BLOCK_SIZE = 4, 4
SPEC = LatentSpec(rank=24, rope_dim=8, nope_dim=12, value_dim=20, query_rank=None, interleaved=True)
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def filled(dtype: torch.dtype) -> PagedKV:
    shape = (1, 64, BLOCK_SIZE, 1, SPEC.width, torch.device("cpu"), dtype)
    kv = PagedKV(*shape, value_dim=SPEC.rank)
    kv.keys[0].copy_(torch.randn(kv.keys[0].shape, generator=torch.Generator().manual_seed(7)))
    return kv


def attended(planner: AttentionPlanner, kv: PagedKV, kernels: KernelSet = NO_KERNELS) -> torch.Tensor:
    """A decode row at position 20, a chunk behind 13 tokens, and a whole prompt of 9."""
    decode, prefill = (
        [Span(0, 1, 20, range(6))],
        [Span(1, 11, 13, range(10, 16)), Span(12, 9, 0, range(20, 23))],
    )
    generator, dtype = torch.Generator().manual_seed(3), kv.keys[0].dtype
    weight = torch.randn(HEADS * (SPEC.nope_dim + SPEC.value_dim), SPEC.rank, generator=generator).to(dtype)
    norm = torch.rand(SPEC.rank, generator=generator).to(dtype)
    layer = LatentLayer.of(SPEC, kernels, None, None, norm, Dense(weight))
    projected = torch.randn(21, HEADS * SPEC.key_dim + SPEC.width, generator=generator).to(dtype)
    slots = torch.tensor(
        [s.block_ids[p // 4] * 4 + p % 4 for s in decode + prefill for p in range(s.start, s.end)]
    )
    angles = torch.randn(21, 2, SPEC.rope_dim // 2, generator=generator).to(dtype).unbind(1)
    plan = planner.plan(decode, (), prefill, None)
    return layer.attend(plan, kv, 0, projected, slots, (angles[0], angles[1]), Scores(0.3))


@pytest.mark.parametrize(
    "expands", [lambda span: True, lambda span: span.start > 0, lambda span: span.start == 0]
)
def test_both_forms_are_the_same(expands: Any) -> None:
    expected = attended(AttentionPlanner(filled(torch.float64)), filled(torch.float64))
    kv = filled(torch.float64)
    torch.testing.assert_close(attended(AttentionPlanner(kv, expands=expands), kv), expected)
    kernel: FusedKernel | None = cpu_kernels(1).attention
    if kernel is None:
        pytest.skip("no C++ compiler")
    for chunks in (True, False):
        kv = filled(torch.float32)
        planner = AttentionPlanner(kv, kernel, chunks=chunks, expands=expands)
        for kernels in (NO_KERNELS, cpu_kernels(2)):
            found = attended(planner, kv, kernels)
            torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=2e-4)


def test_long_chunks_and_whole_prompts_are_expanded() -> None:
    spec = LatentSpec(rank=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=None, interleaved=True)
    for tokens, start, expanded in ((2, 0, True), (512, 4096, True), (256, 1024, True), (64, 4096, False)):
        assert fewer_expanded(spec, 16, Span(0, tokens, start, ())) == expanded
    assert not fewer_expanded(spec, 128, Span(0, 512, 8192, ()))  # too much memory


def test_a_token_takes_one_vector(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deepseek2")
    backend = NativeBackend(tmp_path, num_blocks=4, block_size=8, dtype="bfloat16", compute_dtype="bfloat16")
    schema = backend.get_kv_schema()
    assert schema.bytes_per_token == 3 * (32 + 8) * 2
    pools = {pool.untyped_storage().data_ptr(): pool.untyped_storage().nbytes() for pool in backend._kv.keys}
    assert pools.keys() == {pool.untyped_storage().data_ptr() for pool in backend._kv.values}
    assert sum(pools.values()) == 4 * schema.bytes_per_block
    assert footprint(tmp_path).kv_bytes_per_token == 3 * (32 + 8) * 4


@pytest.mark.parametrize("bits", [8, 4])
def test_absorbed_weights_are_those_of_a_quantized_matrix(bits: int, tmp_path: Path) -> None:
    if cpu_kernels(1).quantized is None:
        pytest.skip("no kernel for codes")
    save_tiny(tmp_path, "deepseek3-halves")
    backend = NativeBackend(
        tmp_path, num_blocks=8, kernels=cpu_kernels, quantizer=RoundToNearest(bits), threads=1
    )
    for layer in native_model(backend)._layers:
        own = attention_of(layer).latent
        assert own is not None
        latent = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
        key, value = own.kv_up.multiply(latent).view(6, 40).split([24, 16], dim=1)
        slack = 0.02 if bits == 4 else 1e-4  # with 4 bits activations have 8
        by_head = own.absorb_value.multiply(latent[:, None].expand(1, 6, -1))[0]
        torch.testing.assert_close(by_head, value, atol=slack, rtol=slack)
        query = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(1))
        products = own.absorb_key.multiply(query)[0] @ latent[0]
        torch.testing.assert_close(products, (query[0] * key).sum(1), atol=20 * slack, rtol=slack)


def test_biases_of_attention_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="with attention_bias is not supported"):
        read_spec({**DEEPSEEK, "attention_bias": True})


def test_defaults_are_those_of_the_family() -> None:
    third, second = (
        read_spec(DEEPSEEK),
        read_spec(
            {
                **DEEPSEEK,
                "architectures": ["DeepseekV2ForCausalLM"],
                "first_k_dense_replace": 3,
                "q_lora_rank": None,
            }
        ),
    )
    assert third.latent == LatentSpec(512, 64, 128, 128, 1536, True)
    assert second.latent == LatentSpec(512, 64, 128, 128, None, True)
    assert (third.head_dim, third.num_kv_heads, third.max_positions, second.max_positions) == (
        576,
        1,
        4096,
        2048,
    )
    assert third.attention_scale == 192**-0.5
