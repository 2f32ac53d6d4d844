"""The KV pool's memory: per layer K and V as [num_blocks, block_size, kv_heads, head_dim].

Where a model mixes windows, its layers are in groups (`deal_layers`), and a block belongs to one group at a
time: the i-th layers of all groups share one pool. Where layers differ in the size of a token's key, a pool
has room for the largest; of smaller ones, as many as fit lie beside each other in each token's row.

A token is one row of a block. So a gather by block table gives [tokens, kv_heads, head_dim] without a
transpose, and consecutive blocks are a view. Attention may read padding behind a sequence's last token, and 0
x NaN is not 0. So the pool starts as zeros, and a block is zeroed when it becomes the last block of a
request. On a CPU a block takes memory when it is first written (`memory.lazy_zeros`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from sagellm.core.blocks import cdiv
from sagellm.core.errors import PlanError
from sagellm.core.plan import BlockCopy
from sagellm.core.types import KVGroup, Window, width
from sagellm.engines.native.folder_files import MAX_POSITIONS
from sagellm.engines.native.memory import lazy_zeros, shared_zeros
from sagellm.engines.native.recurrent.states import RecurrentStates

if TYPE_CHECKING:
    from sagellm.core.shared_pages import SharedPages

LAYOUT = "layer.kv.block.token.head.dim"


LayerKind = tuple[int, Window | None]
"""The KV group of a layer, and its window."""
MAX_GROUPS = 8
_CONTEXT_WINDOWS = 8


def deal_layers(
    windows: Sequence[Window | None], shapes: Sequence[tuple[int, int]] = ()
) -> tuple[KVGroup, ...]:
    """KV groups of layers with these windows; none where all windows are the same.

    `shapes` are KV heads and head dim of each layer, where they differ. All groups have as many columns, each
    for one of the layers with the largest keys, or for as many smaller ones as fit; what is left is padding.
    That number is the one with the smallest memory for a context of eight windows, among those with at most
    `MAX_GROUPS` groups. The layers that see furthest lead: their KV is kept whole.
    """
    sizes = [num_heads * head_dim for num_heads, head_dim in shapes] or [1] * len(windows)
    kinds: dict[tuple[Window | None, int], list[int]] = {}
    for layer, kind in enumerate(zip(windows, sizes, strict=True)):
        kinds.setdefault(kind, []).append(layer)
    if len(set(windows)) == 1:
        return ()
    widest, largest = max(windows, key=_reach), max(sizes)

    def cost(columns: int) -> tuple[int, int]:
        counts = {kind: cdiv(len(kinds[kind]), columns * (largest // kind[1])) for kind in kinds}
        whole = sum(count for (window, _), count in counts.items() if window == widest)
        rest = sum(counts.values()) - whole
        too_many = whole + rest > max(MAX_GROUPS, len(kinds))
        return (1 << 60 if too_many else columns * (_CONTEXT_WINDOWS * whole + rest), -columns)

    columns = min(range(1, len(windows) + 1), key=cost)
    groups: list[KVGroup] = []
    for window, size in sorted(kinds, key=lambda kind: -_reach(kind[0])):
        layers, most = kinds[window, size], columns * (largest // size)
        for first in range(0, len(layers), most):
            own = tuple(layers[first : first + most])
            groups.append(KVGroup(own, None if window == widest else window))
    return tuple(groups)


def _reach(window: Window | None) -> int:
    return MAX_POSITIONS if window is None else width(window)


def layer_kinds(windows: Sequence[Window | None], groups: Sequence[KVGroup]) -> list[LayerKind]:
    """The kind of each layer."""
    group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    return [(group_of.get(layer, 0), window) for layer, window in enumerate(windows)]


def _columns(sizes: Sequence[int], groups: Sequence[KVGroup]) -> list[tuple[int, int]]:
    """The pool of each layer, and where its keys begin in a row."""
    if not groups:
        return [(layer, 0) for layer in range(len(sizes))]
    found: dict[int, tuple[int, int]] = {}
    for group in groups:
        for i, layer in enumerate(group.layers):
            column, beside = divmod(i, max(sizes) // sizes[layer])
            found[layer] = column, beside * sizes[layer]
    return [found[layer] for layer in range(len(sizes))]


class PagedKV:
    """The pools: `keys[i]` and `values[i]` are those of layer i. Layers of several `groups` share them.

    With `has_scratch` the block `scratch_block` follows the pool's
    blocks; padding rows write there. With `value_dim` values are the first so many numbers of the keys.
    `states`: the recurrent states of the batch, where the model has any. `shapes`: KV heads and head dim of
    each layer, where they differ. The last layer, a draft head's, has `num_draft_blocks` blocks of its own
    behind all others, from `first_draft_block` on. With `is_shared` a CPU's pools lie in `shared_pages`, if
    the system has such memory.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
        device: torch.device, dtype: torch.dtype, *, has_scratch: bool = False,
        groups: Sequence[KVGroup] = (), value_dim: int | None = None,
        states: RecurrentStates | None = None, shapes: Sequence[tuple[int, int]] = (),
        num_draft_blocks: int = 0, is_shared: bool = False,
    ) -> None:  # fmt: skip
        self.num_blocks = self.scratch_block = num_blocks
        self.first_draft_block = num_blocks + has_scratch
        self.device = device
        self.block_size = block_size
        zeros = lazy_zeros if device.type == "cpu" else partial(torch.zeros, device=device)
        self.num_groups = max(1, len(groups))
        shapes = shapes or ((num_kv_heads, head_dim),) * num_layers
        sizes = [heads * dim for heads, dim in shapes]
        columns = _columns(sizes, groups)
        widths = [max(sizes) if groups else sizes[i] for i in range(max(columns)[0] + 1)]
        self.value_dim = value_dim
        last = columns[-1][0]
        counts = [num_blocks + has_scratch + num_draft_blocks * (i == last) for i in range(len(widths))]
        pools = [(count, block_size, width) for count, width in zip(counts, widths, strict=True)]
        pools *= 1 if value_dim else 2
        self.shared_pages: SharedPages | None = None
        if is_shared and device.type == "cpu":
            self.shared_pages, self._pools = shared_zeros(pools, dtype)
        else:
            self._pools = [zeros(shape, dtype=dtype) for shape in pools]

        def view(first: int, layer: int) -> torch.Tensor:
            (column, offset), size = columns[layer], sizes[layer]
            own = self._pools[first + column].narrow(2, offset, size)
            return own.view(*own.shape[:2], *shapes[layer])

        self.keys = [view(0, layer) for layer in range(num_layers)]
        self.values = [key[..., :value_dim] for key in self.keys]
        if value_dim is None:
            self.values = [view(len(widths), layer) for layer in range(num_layers)]
        self.states = states
        self.on_layer: Callable[[int], None] | None = None
        """Called in a step with n once the KV of its first n layers is written."""

    def of_last_layer(self) -> PagedKV:
        """The last layer's part, as the pools of a model of one layer."""
        own = copy(self)
        own.keys, own.values, own.num_groups = self.keys[-1:], self.values[-1:], 1
        return own

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None = None
    ) -> None:
        """Store K and V [T, kv_heads, head_dim] at `slots` [T]. A slot is block id x block size + offset in
        the block. `values` is None where they are a part of the keys.
        """
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        if values is not None:
            self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    @cached_property
    def by_slot(self) -> PagedKV:
        """The same memory in blocks of one token: a block's id is a slot."""
        view = copy(self)
        view.block_size, view.num_blocks, view.on_layer = 1, self.num_blocks * self.block_size, None
        view.scratch_block = self.scratch_block * self.block_size
        view._pools, view.keys, view.values = (
            [pool.flatten(0, 1)[:, None] for pool in pools] for pools in (self._pools, self.keys, self.values)
        )
        return view

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the K and V of tokens to other slots, all at once."""
        moved, to = (torch.tensor(slots, device=self.device) for slots in (sources, targets))
        for pool in self._pools:
            tokens = pool.flatten(0, 1)
            tokens.index_copy_(0, to, tokens.index_select(0, moved))

    def state_buffer(self) -> torch.Tensor:
        """Bytes for a kept state, as many as its pages have."""
        assert self.states is not None
        page = sum(own.shape[1] for own in self.as_bytes())
        return torch.empty(cdiv(self.states.num_bytes, page) * page, dtype=torch.uint8, device=self.device)

    def save_state(self, buffer: torch.Tensor, pages: Sequence[int]) -> None:
        """Copy a buffer of `state_buffer` into pages of the pool."""
        ids = torch.tensor(pages, dtype=torch.long, device=self.device)
        for own, part in zip(self.as_bytes(), self._parts(buffer, len(pages)), strict=True):
            own.index_copy_(0, ids, part)

    def load_state(self, pages: Sequence[int]) -> torch.Tensor:
        """The buffer that was copied into these pages."""
        buffer, ids = self.state_buffer(), torch.tensor(pages, dtype=torch.long, device=self.device)
        for own, part in zip(self.as_bytes(), self._parts(buffer, len(pages)), strict=True):
            part.copy_(own.index_select(0, ids))
        return buffer

    def as_bytes(self) -> list[torch.Tensor]:
        """The pools as bytes [num_blocks, bytes of a block]."""
        return [pool.flatten(1).view(torch.uint8) for pool in self._pools]

    def _parts(self, buffer: torch.Tensor, num_pages: int) -> Sequence[torch.Tensor]:
        """The part of a kept state in each pool, [num_pages, bytes of a block]."""
        sizes = [own.shape[1] for own in self.as_bytes()]
        if buffer.numel() != num_pages * sum(sizes):
            raise PlanError(f"a recurrent state of {buffer.numel()} bytes does not fill {num_pages} blocks")
        return torch.split(buffer.view(num_pages, -1), sizes, dim=1)

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero whole blocks: old values (an inf, say) must not be read as padding."""
        ids = torch.tensor(block_ids, dtype=torch.long, device=self.keys[0].device)
        for pool in self._pools:
            pool.index_fill_(0, ids, 0)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks of the pool in order.

        Raises `PlanError` for a block that does not exist, before anything is copied.
        """
        for each in copies:
            if not 0 <= min(each.source, each.target) <= max(each.source, each.target) < self.num_blocks:
                raise PlanError(f"{each}: the device has {self.num_blocks} blocks")
        for each in copies:
            for pool in self._pools:
                pool[each.target].copy_(pool[each.source], non_blocking=True)
