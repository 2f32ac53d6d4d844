"""Format of the KV of a vLLM worker, and which models have a store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm import __version__
from vllm.v1.kv_cache_interface import FullAttentionSpec, group_kernel_blocks

from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import FORMAT_VERSION, BlockFormat, Buffer
from sagellm.engines.native.block_bytes import PoolBytes
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.hub import model_folder
from sagellm.engines.native.model_fingerprint import model_fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def refusal(config: VllmConfig, kv: KVCacheConfig) -> str:
    """Why KV of this model is not stored; empty if it is."""
    parallel, model = config.parallel_config, config.model_config
    groups = kv.kv_cache_groups
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching is switched off"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism gives each rank other layers"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism spreads a block over several ranks"
    if model.runner_type != "generate":
        return f"it is for models that generate, not for the runner {model.runner_type}"
    if config.speculative_config is not None:
        return "speculative decoding writes KV that is taken back"
    if config.load_config.load_format == "dummy" or config.weight_transfer_config is not None:
        return "its weights are not those of the files in its folder"
    if model.enable_sleep_mode:
        return "sleep mode frees the memory that it copies"
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups; one is supported"
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
        return f"its KV cache is of the kind {type(spec).__name__}; full attention is supported"
    return ""


class DeviceBytes(PoolBytes):
    """Blocks of the device.

    A copy of marked blocks waits for what the device was given before their mark.
    """

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        super().__init__(pools)
        self._marked: dict[int, torch.cuda.Event] = {}

    def follow_steps(self) -> None:
        """Does nothing: a copy waits for the marks of its own blocks."""

    def mark(self, block_ids: Iterable[int]) -> None:
        """The steps so far may still write, zero or read these blocks. For the model's thread."""
        if self._stream is not None:
            self._marked.update(dict.fromkeys(block_ids, torch.cuda.current_stream().record_event()))

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        self._wait_for(block_ids)
        super().read_blocks(block_ids, target)

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        self._wait_for(block_ids)
        super().write_blocks(block_ids, data)

    def _wait_for(self, block_ids: Sequence[int]) -> None:
        """Wait for their marks. A past one costs nothing, so it stays until the next."""
        for event in {self._marked[block_id] for block_id in block_ids if block_id in self._marked}:
            event.synchronize()


def rows_of(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> dict[str, torch.Tensor]:
    """The KV of each layer as bytes [num_blocks, bytes of a block].

    By the layer's name. Layers that share their KV come once. Raises `KVDataError` where a block has gaps.
    """
    rows: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, cache in kv_caches.items():
        if cache.data_ptr() in seen:
            continue
        seen.add(cache.data_ptr())
        blocks = group_kernel_blocks(cache, num_blocks)
        inner = list(zip(blocks.shape[1:], blocks.stride()[1:], strict=True))
        num_values = blocks[0].numel()
        if sum((size - 1) * stride for size, stride in inner) + 1 != num_values:
            raise KVDataError(f"blocks of the layer {name} have gaps: shape {blocks.shape}")
        flat = blocks.as_strided((num_blocks, num_values), (blocks.stride(0), 1))
        rows[name] = flat.view(torch.uint8)
    return rows


def block_format(
    config: VllmConfig, kv: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor], rank: int
) -> BlockFormat:
    """Format of the blocks of this rank.

    Its digest covers weights, tokenizer, configuration and dtypes of the model, layers, layout and size of a
    block, rank and number of ranks, and vLLM's version. Raises `SageError` where the weights are not files
    that can be read.
    """
    model, rows = config.model_config, rows_of(kv_caches, kv.num_blocks)
    folder = model_folder(model.model, model.revision, offline=True, check=lambda _: None)
    weights = _fingerprint(folder, str(model.dtype))
    layers = [
        (name, cache.dtype, cache.shape[1:], cache.stride()[1:])
        for name, cache in ((name, kv_caches[name]) for name in rows)
    ]
    facts = (
        FORMAT_VERSION, __version__, weights, str(model.dtype), model.quantization, model.max_model_len,
        json.dumps(model.hf_config.to_dict(), sort_keys=True, default=repr),
        config.cache_config.cache_dtype, kv.kv_cache_groups[0].kv_cache_spec, layers,
        rank, config.parallel_config.tensor_parallel_size,
    )  # fmt: skip
    digest = blake2b(repr(facts).encode(), digest_size=16).digest()
    return BlockFormat(digest, sum(row.shape[1] for row in rows.values()))


def _fingerprint(folder: Path, dtype: str) -> str:
    checkpoint = Checkpoint(folder)
    try:
        return model_fingerprint(folder, checkpoint, dtype)
    finally:
        checkpoint.close()
