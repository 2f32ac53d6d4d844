"""Decode steps recorded once per batch size, so that a replay is one call.

This pays where launching a step's hundreds of kernels takes long beside what they compute. On a GPU (CUDA
graphs) batches are padded to buckets, and all buckets are recorded at start. On a CPU, for a few rows only,
the kernels' own calls are recorded (`KernelSet.record`) when a batch size first comes.
"""

from __future__ import annotations

import logging
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from sagellm.core.blocks import cdiv
from sagellm.core.plan import ExecutionPlan
from sagellm.core.protocols.fusion import Capture, FusedKernel, Work
from sagellm.engines.native.attention import AttentionPlan, KernelCall, Span
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.model import DecoderModel, StepInputs
from sagellm.engines.native.rows import BatchRows

log = logging.getLogger("sagellm.kernels")
MOST_CPU_ROWS = 8
_FIRST_LENGTH = 1024
_WARM_UPS = 2


def buckets(max_rows: int) -> list[int]:
    """Batch sizes to record, ascending, the last `max_rows`. Powers of two and, from 24 on, those times 3/4:
    at most half of a batch is padding, a third of a larger one.
    """
    sizes = {max_rows}
    power = 1
    while power < max_rows:
        sizes |= {power} | ({power * 3 // 2} if power >= 16 else set())
        power *= 2
    return sorted(size for size in sizes if size <= max_rows)


def cuda_capture(device: torch.device) -> Capture | None:
    """How to record work on a CUDA device; None for other devices. All recordings share one memory pool."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Work) -> Work:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # kernels are compiled and libraries make room before, not while
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            work()
        return graph.replay

    return capture


class RecordedSteps:
    """The decode steps of up to `sizes[-1]` rows. Each is padded to one of the ascending `sizes` and recorded
    when it is first run.
    """

    def __init__(
        self, model: DecoderModel, kv: PagedKV, kernel: FusedKernel, capture: Capture, sizes: Sequence[int],
        max_length: int, windows: Iterable[int | None],
    ) -> None:  # fmt: skip
        self._model, self._kv, self._capture, self._sizes = model, kv, capture, sizes
        self._max_length, self._length = max_length, 0
        self._inputs = DecodeInputs(kv, kernel, windows, sizes[-1], max_length)
        self._logits = torch.empty(sizes[-1], model.spec.vocab_size, device=kv.keys[0].device)
        self._logits_of = [self._logits[:rows] for rows in range(sizes[-1] + 1)]
        self._replays: dict[int, Work | None] = {}

    def record_all(self) -> None:
        """Record all sizes now, on padding alone. The largest comes first: the memory of the others fits into
        it.
        """
        began_s = time.monotonic()
        self._length = self._max_length
        self._inputs.fill((), (), self._sizes[-1])
        for size in reversed(self._sizes):
            self._record(size)
        log.info("recorded decode steps of %s rows in %.1f s", self._sizes, time.monotonic() - began_s)

    def can_run(self, plan: ExecutionPlan) -> bool:
        """Whether the plan's step is recorded or can be: only decode rows, few enough."""
        rows = len(plan.decode_rows)
        if not rows or plan.prefills or rows > self._sizes[-1]:
            return False
        size = self._size(rows)
        return size not in self._replays or self._replays[size] is not None

    def logits(self, plan: ExecutionPlan, rows: BatchRows) -> torch.Tensor:
        """Logits [S, vocab] of the plan's rows, in memory that the next step overwrites."""
        tokens, spans = rows.decodes(plan)
        size = self._size(len(spans))
        self._ensure_length(max(span.end for span in spans))
        self._inputs.fill(tokens, spans, size)
        replay = self._replays.get(size)
        if replay is None:
            self._record(size)
        else:
            replay()
        return self._logits_of[len(spans)]

    def _ensure_length(self, length: int) -> None:
        """Discard recordings that are too short for `length`; new ones have twice the room. Recorded steps
        look positions up in tables of fixed length. A size that could not be recorded stays so.
        """
        if length > self._length:
            self._length = min(self._max_length, max(_FIRST_LENGTH, 2 * length))
            self._replays = {size: None for size, replay in self._replays.items() if replay is None}

    def _size(self, rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, rows)]

    def _record(self, size: int) -> None:
        """Record a step by running it on the current inputs."""
        self._model.extend_to(self._length - 1)
        step = self._inputs.step(size, self._length - 1)
        work = partial(self._model.forward, step, self._kv, self._logits_of[size])
        self._replays[size] = self._capture(work)


_FIELDS = 7  # token, position, slot, and the four numbers of a span


class DecodeInputs:
    """The inputs at fixed addresses of decode steps of up to `max_rows` rows. `step(b)` returns views of one
    device buffer for b rows, and `fill` replaces the buffer's contents with one copy. Padding rows compute
    token 0 at position 0 of the pool's scratch block. The copy is asynchronous: a caller must have read a
    step's result before it fills again.
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
        """Row i computes `tokens[i]` at `spans[i]`; the others up to `rows` are padding."""
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
