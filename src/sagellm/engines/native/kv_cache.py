"""The KV pool's memory: per layer K and V as [num_blocks, block_size, kv_heads, head_dim].

A token is one row of a block. So a gather by block table gives [tokens, kv_heads, head_dim] without a
transpose, and consecutive blocks are a view. Attention may read padding behind a sequence's last token, and 0
x NaN is not 0. So the pool starts as zeros, and a block is zeroed when it becomes the last block of a
request. On a CPU a block takes memory when it is first written (`memory.lazy_zeros`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from sagellm.core.blocks import Tier
from sagellm.core.errors import PlanError
from sagellm.core.plan import BlockCopy
from sagellm.engines.native.memory import lazy_zeros

LAYOUT = "layer.kv.block.token.head.dim"


class PagedKV:
    """The pools: `keys[i]` and `values[i]` are those of layer i. Tier "dram" has `num_host_blocks` blocks.
    With `has_scratch` the block `scratch_block` follows the pool's blocks; padding rows write there.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
        device: torch.device, dtype: torch.dtype, num_host_blocks: int = 0, *, has_scratch: bool = False,
    ) -> None:  # fmt: skip
        shape = (num_blocks + has_scratch, block_size, num_kv_heads, head_dim)
        self.num_blocks = self.scratch_block = num_blocks
        self.block_size = block_size
        zeros = lazy_zeros if device.type == "cpu" else partial(torch.zeros, device=device)
        self.keys = [zeros(shape, dtype=dtype) for _ in range(num_layers)]
        self.values = [zeros(shape, dtype=dtype) for _ in range(num_layers)]
        self.num_host_blocks = num_host_blocks
        shape, pinned = (num_host_blocks, *shape[1:]), device.type == "cuda"
        self._host = [torch.empty(shape, dtype=dtype, pin_memory=pinned) for _ in range(2 * num_layers)]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store K and V [T, kv_heads, head_dim] at `slots` [T]. A slot is block id x block size + offset in
        the block.
        """
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero whole blocks: old values (an inf, say) must not be read as padding."""
        ids = torch.tensor(block_ids, dtype=torch.long, device=self.keys[0].device)
        for pool in (*self.keys, *self.values):
            pool.index_fill_(0, ids, 0)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in order: inside the pool, to host memory or back. Raises `PlanError` for a tier
        or a block that does not exist, before anything is copied.
        """
        for copy in copies:
            self._check(copy, copy.source_tier, copy.source_block)
            self._check(copy, copy.target_tier, copy.target_block)
        tiers: dict[str, list[torch.Tensor]] = {Tier.HBM: [*self.keys, *self.values], Tier.DRAM: self._host}
        for copy in copies:
            pairs = zip(tiers[copy.source_tier], tiers[copy.target_tier], strict=True)
            for source, target in pairs:  # on a GPU in the order of its stream, for pinned memory too
                target[copy.target_block].copy_(source[copy.source_block], non_blocking=True)

    def _check(self, copy: BlockCopy, tier: str, block: int) -> None:
        sizes: dict[str, int] = {Tier.HBM: self.num_blocks, Tier.DRAM: self.num_host_blocks}
        if tier not in sizes:
            raise PlanError(f"{copy}: the native backend has the tiers {', '.join(sizes)}")
        if not 0 <= block < sizes[tier]:
            raise PlanError(f"{copy}: there are {sizes[tier]} blocks in {tier}")
