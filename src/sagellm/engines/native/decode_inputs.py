"""A decode step's inputs at fixed addresses, as a recorded step wants them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch

from sagellm.core.blocks import cdiv
from sagellm.core.protocols.fusion import FusedKernel
from sagellm.engines.native.attention import AttentionPlan, KernelCall, Span
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.model import StepInputs

_FIELDS = 7  # token, position, slot, and the four numbers of a span


class DecodeInputs:
    """The inputs of decode steps of up to `max_rows` rows of up to `max_length` tokens.

    `step(b)` is what the model gets for b rows: views of one buffer on the device, whose contents `fill`
    replaces with one copy. Rows that are not taken compute token 0 at position 0 of the pool's scratch block.
    The copy is not waited for: whoever fills again has read the step's result before.
    """

    def __init__(
        self, kv: PagedKV, kernel: FusedKernel, windows: Iterable[int | None], max_rows: int, max_length: int
    ) -> None:
        self._kernel, self._windows = kernel, tuple(windows)
        self._max_rows = max_rows
        self._block_size, self._scratch = kv.block_size, kv.scratch_block
        device = kv.keys[0].device
        most_entries = max_rows * cdiv(max_length, kv.block_size)
        size = _FIELDS * max_rows + cdiv(most_entries, 2)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else self._host.to(device)
        head = self._host[: _FIELDS * max_rows].view(_FIELDS, max_rows).numpy()
        self._tokens, self._positions, self._slots = head[:3]
        self._spans = head[3:].reshape(max_rows, 4)
        self._tables = self._host[_FIELDS * max_rows :].view(torch.int32).numpy()

    def step(self, rows: int, max_position: int) -> StepInputs:
        """The inputs of `rows` rows at positions up to `max_position`, always the same tensors."""
        most = self._max_rows
        tokens, positions, slots = (self._device[i * most : i * most + rows] for i in range(3))
        spans = self._device[3 * most : 3 * most + 4 * rows].view(rows, 4)
        tables = self._device[_FIELDS * most :].view(torch.int32)
        calls = {window: KernelCall(self._kernel, spans, tables, window, rows) for window in self._windows}
        plans = {window: AttentionPlan(call, (), ()) for window, call in calls.items()}
        return StepInputs(tokens, positions, max_position, slots, None, plans)

    def fill(self, tokens: Sequence[int], spans: Sequence[Span], rows: int) -> None:
        """`tokens[i]` is row i's, which `spans[i]` places; the others up to `rows` are padding."""
        count, size = len(spans), self._block_size
        starts, firsts, slots, tables = [], [], [], array("i")
        for span in spans:
            starts.append(span.start)
            firsts.append(len(tables))
            slots.append(span.block_ids[span.start // size] * size + span.start % size)
            tables.extend(span.block_ids[: span.start // size + 1])
        padding = len(tables)
        if rows > count:
            tables.append(self._scratch)
        for field, values, idle in (
            (self._tokens, tokens, 0),
            (self._positions, starts, 0),
            (self._slots, slots, self._scratch * size),
            (self._spans[:, 2], starts, 0),
            (self._spans[:, 3], firsts, padding),
        ):
            field[:count], field[count:rows] = values, idle
        self._spans[:rows, 0], self._spans[:rows, 1] = range(rows), 1
        self._tables[: len(tables)] = tables
        if self._device is not self._host:
            used = _FIELDS * self._max_rows + cdiv(len(tables), 2)
            self._device[:used].copy_(self._host[:used], non_blocking=True)
