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
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate

import numpy as np
import torch

from sagellm.core.blocks import cdiv
from sagellm.core.plan import ExecutionPlan
from sagellm.core.protocols.fusion import Capture, FusedKernel, Work
from sagellm.core.types import AttentionChunk, first_seen
from sagellm.engines.native.attention import AttentionPlan, KernelCall, Span
from sagellm.engines.native.kv_cache import LayerKind, PagedKV
from sagellm.engines.native.model import DecoderModel, StepInputs
from sagellm.engines.native.rows import BatchRows, Tables

log = logging.getLogger("sagellm.kernels")
MOST_CPU_ROWS = 32
"""Positions of a step on a CPU: of more, launching takes next to nothing beside computing."""
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

    On a CPU steps with token trees are recorded apart: all their rows attend by slot (`branches.py`).
    """

    def __init__(
        self, model: DecoderModel, kv: PagedKV, kernel: FusedKernel, capture: Capture, sizes: Sequence[int],
        max_length: int, *, by_slot: bool = False, before: torch.Tensor | None = None, ahead: int = 0,
        draw_next: FusedKernel | None = None,
    ) -> None:  # fmt: skip
        """`before`: of a draft head, `StepInputs.hidden` of the largest step. `ahead`: how many positions
        `run_next` and `run_greedily` may go on, at most. `draw_next`: the kernel that the second needs.
        """
        self._before = before
        self._hidden: dict[int, torch.Tensor] = {}
        """By size, what the head of the model was given [size, hidden]; the next step overwrites it."""
        self._model, self._kv, self._capture, self._sizes = model, kv, capture, sizes
        self._max_length, self._length, self._kernel, self._is_by_slot = max_length, 0, kernel, by_slot
        self._is_cpu = kv.keys[0].device.type == "cpu"
        self._inputs = DecodeInputs(kv, kernel, model.kinds, sizes[-1], max_length + ahead)
        self.can_run_next = not self._inputs.has_chunks
        self._draws = None if draw_next is None else GreedyDraws(draw_next, max(1, ahead), sizes[-1])
        self._logits = torch.empty(sizes[-1], model.spec.vocab_size, device=kv.keys[0].device)
        self._logits_of = [self._logits[:rows] for rows in range(sizes[-1] + 1)]
        self._replays: dict[int, Work | None] = {}

    def record_all(self) -> None:
        """Record all sizes now, on padding alone. The largest comes first: the memory of the others fits into
        it.
        """
        began_s = time.monotonic()
        self._length = self._max_length
        self._inputs.fill((), (), (), self._sizes[-1])
        for size in reversed(self._sizes):
            self._record(size)
        log.info("recorded decode steps of %s rows in %.1f s", self._sizes, time.monotonic() - began_s)

    def can_run(self, plan: ExecutionPlan) -> bool:
        """Whether the plan's step is recorded or can be: only decode rows, few positions."""
        rows = len(plan.decode_rows) + plan.num_proposed_tokens
        if not rows or plan.prefills:
            return False
        if plan.chains and self._is_cpu and self._inputs.has_chunks:  # a chain may go from one to the next
            return False
        if not self._is_by_slot and plan.has_trees:
            return self._is_cpu and self._with_trees.can_run(plan)
        return self.takes(rows)

    def takes(self, rows: int) -> bool:
        """Whether steps of so many rows are recorded or can be."""
        if rows > self._sizes[-1]:
            return False
        size = self._size(rows)
        return size not in self._replays or self._replays[size] is not None

    def logits(self, plan: ExecutionPlan, rows: BatchRows) -> torch.Tensor:
        """Logits [S, vocab] of the plan's rows, in memory that the next step overwrites.

        On a GPU each position of a chain has a span of its own: all K and V are written before they are read.
        """
        if self._is_by_slot:
            return self.run(*rows.decodes_by_slot(plan))
        if plan.has_trees:
            return self._with_trees.logits(plan, rows)
        return self.run(*rows.decodes(plan, unrolled=not self._is_cpu))

    def run(
        self, tokens: Sequence[int], spans: Sequence[Span], tables: Sequence[Tables], ahead: int = 0
    ) -> torch.Tensor:
        """As `logits`, of rows as `DecodeInputs.fill` takes them."""
        size = self._size(len(tokens))
        self._ensure_length(min(self._max_length, max(span.positions.stop for span in spans) + ahead))
        self._inputs.fill(tokens, spans, tables, size, ahead)
        return self._replayed(size, len(tokens))

    def run_next(self, tokens: Sequence[int]) -> torch.Tensor:
        """As `run`, one position further. The last one computed one token of each row."""
        self._inputs.advance(tokens)
        return self._replayed(self._size(len(tokens)), len(tokens))

    @property
    def can_run_greedily(self) -> bool:
        return self._draws is not None and self.can_run_next and self._inputs.num_kinds == 1

    def run_greedily(
        self, tokens: Sequence[int], spans: Sequence[Span], tables: Sequence[Tables], count: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Steps of one token a row, each on what the last has drawn greedily.

        `tokens`: of the first. Returns what was drawn and its probabilities, both [count, rows].
        """
        assert self._draws is not None
        size, draws = len(tokens), self._draws
        self._ensure_length(min(self._max_length, max(span.positions.stop for span in spans) + count - 1))
        self._inputs.fill(tokens, spans, tables, size, count - 1)
        draws.begin(count)
        for _ in range(count):
            if size in draws.work:
                draws.work[size]()
            else:
                self._record_draws(size, draws)
        return draws.found(count, size)

    def _replayed(self, size: int, num_rows: int) -> torch.Tensor:
        replay = self._replays.get(size)
        if replay is None:
            self._record(size)
        else:
            replay()
        return self._model.limited(self._logits_of[num_rows])

    def hidden(self, rows: int) -> torch.Tensor:
        """The input of the model's head in the last step [rows, hidden]; as `logits`."""
        size = self._size(rows)
        return self._hidden[size] if size == rows else self._hidden[size][:rows]

    @cached_property
    def _with_trees(self) -> RecordedSteps:
        kv, sizes = self._kv.by_slot, self._sizes
        return RecordedSteps(
            self._model, kv, self._kernel, self._capture, sizes, self._max_length, by_slot=True
        )

    def _ensure_length(self, length: int) -> None:
        """Discard recordings that are too short for `length`; new ones have twice the room. Recorded steps
        look positions up in tables of fixed length. A size that could not be recorded stays so.
        """
        if length > self._length:
            self._length = min(self._max_length, max(_FIRST_LENGTH, 2 * length))
            self._replays = {size: None for size, replay in self._replays.items() if replay is None}
            if self._draws is not None:
                self._draws.work.clear()

    def _size(self, rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, rows)]

    def _record(self, size: int) -> None:
        """Record a step by running it on the current inputs."""
        self._model.extend_to(self._length - 1)
        step = self._inputs.step(size, self._length - 1)
        if self._before is not None:
            step = replace(step, hidden=self._before[:size])
        self._replays[size] = self._capture(partial(self._compute, step, size))

    def _record_draws(self, size: int, draws: GreedyDraws) -> None:
        """As `_record`, of a step that draws and moves on. Torch repeats what cannot be recorded."""
        assert self._before is not None
        self._model.extend_to(self._length - 1)
        step = replace(self._inputs.step(size, self._length - 1), hidden=self._before[:size])
        work = partial(self._compute_and_draw, step, draws)
        draws.work[size] = self._capture(work) or work

    @torch.inference_mode()
    def _compute_and_draw(self, step: StepInputs, draws: GreedyDraws) -> None:
        hidden, logits = self._model.hidden(step, self._kv), self._logits_of[len(step.tokens)]
        self._model.product(hidden, logits)
        draws.draw(logits, hidden, step, self._kv.block_size)

    @torch.inference_mode()
    def _compute(self, step: StepInputs, size: int) -> None:
        hidden = self._hidden[size] = self._model.hidden(step, self._kv)
        self._model.product(hidden, self._logits_of[size])


class GreedyDraws:
    """What steps that draw greedily have drawn, at fixed addresses. `work`: by size, such a step."""

    def __init__(self, kernel: FusedKernel, most: int, max_rows: int) -> None:
        self._kernel, self._most = kernel, most
        self._drawn = torch.zeros(most * max_rows, dtype=torch.int64)
        self._chances = torch.zeros(most * max_rows)
        self._state = torch.zeros(2, dtype=torch.int64)
        self.work: dict[int, Work] = {}

    def begin(self, count: int) -> None:
        self._state[:] = torch.tensor((0, count))

    def draw(self, logits: torch.Tensor, hidden: torch.Tensor, step: StepInputs, block_size: int) -> None:
        """Draw behind a step, whose inputs move on to what is drawn."""
        rows = len(logits)
        drawn, chances = (each[: self._most * rows].view(-1, rows) for each in (self._drawn, self._chances))
        [plan] = step.attention.values()
        [slots] = step.slots
        assert plan.kernel is not None
        self._kernel.apply(
            logits, hidden, step.hidden, step.tokens, step.positions, plan.kernel.spans, slots,
            plan.kernel.tables, drawn, chances, self._state, block_size,
        )  # fmt: skip

    def found(self, count: int, rows: int) -> tuple[list[list[int]], list[list[float]]]:
        """The tokens of the last `count` steps and their probabilities."""
        drawn, chances = (each[: count * rows].view(count, rows) for each in (self._drawn, self._chances))
        return drawn.tolist(), chances.tolist()


_FIRST_SPAN, _SPAN = 2, 4


class DecodeInputs:
    """The inputs at fixed addresses of decode steps of up to `max_rows` rows. `step(b)` returns views of one
    device buffer for b rows, and `fill` replaces the buffer's contents with one copy. A row has a token, a
    position, and a slot in each KV group. There are as many spans in sequences, and spans in chunks (of each
    size that layers see); a span of several tokens leaves others empty. Padding rows compute token 0 at
    position 0 of the pool's scratch block. The copy is asynchronous: a caller must have read a step's result
    before it fills again.
    """

    def __init__(
        self, kv: PagedKV, kernel: FusedKernel, kinds: Iterable[LayerKind], max_rows: int, max_length: int
    ) -> None:
        self._kernel, self._kinds = kernel, set(kinds)
        self.num_kinds = len(self._kinds)
        self.has_chunks = any(isinstance(window, AttentionChunk) for _, window in self._kinds)
        self._max_rows, groups = max_rows, kv.num_groups
        chunks = {window: None for _, window in self._kinds if isinstance(window, AttentionChunk)}
        self._block_size, self._scratch = kv.block_size, kv.scratch_block
        device = kv.keys[0].device
        self._entries = cdiv(max_rows * cdiv(max_length, kv.block_size), 2)  # of a table, in int64
        self._first_slot = _FIRST_SPAN + _SPAN * (1 + len(chunks))
        fields = self._first_slot + groups
        size = fields * max_rows + groups * self._entries
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else self._host.to(device)
        head = self._host[: fields * max_rows].view(fields, max_rows).numpy()
        self._tokens, self._positions = head[:_FIRST_SPAN]
        self._first_span = {chunk: _FIRST_SPAN + _SPAN * i for i, chunk in enumerate((None, *chunks))}
        self._spans = {
            chunk: head[first : first + _SPAN].reshape(max_rows, _SPAN)
            for chunk, first in self._first_span.items()
        }
        self._slots = head[self._first_slot :]
        self._first_entry = fields * max_rows
        self._filled: Sequence[Sequence[Sequence[int]]] = ()
        self._tables = self._host[self._first_entry :].view(torch.int32).view(groups, -1).numpy()

    def step(self, rows: int, max_position: int) -> StepInputs:
        """The inputs of `rows` rows at positions up to `max_position`, always the same tensors."""
        columns = self._device[: self._first_entry].view(-1, self._max_rows)[:, :rows]
        plans = {kind: AttentionPlan(self._call(kind, rows), (), ()) for kind in self._kinds}
        slots = list(columns[self._first_slot :])
        return StepInputs(columns[0], columns[1], max_position, slots, None, plans)

    def _call(self, kind: LayerKind, rows: int) -> KernelCall:
        group, window = kind
        chunk, window = (window, None) if isinstance(window, AttentionChunk) else (None, window)
        first = self._first_span[chunk] * self._max_rows
        spans = self._device[first : first + _SPAN * rows].view(rows, _SPAN)
        tables = self._device[self._first_entry :].view(torch.int32).view(len(self._tables), -1)
        return KernelCall(self._kernel, spans, tables[group], window, rows, rows)

    def fill(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        tables: Sequence[Tables],
        rows: int,
        ahead: int = 0,
    ) -> None:
        """`spans[i]` computes the next of `tokens` with `tables[i]`. The other rows are padding.

        `advance` may go on for so many positions `ahead`.
        """
        self._filled = tables
        count, size, num_spans = len(tokens), self._block_size, len(spans)
        starts = [span.start for span in spans]
        places = [span.start + span.num_dropped for span in spans]
        if num_spans < count:
            places = [at for span in spans for at in span.positions]
        num_blocks = [cdiv(span.end + ahead, size) for span in spans]
        firsts = list(accumulate(num_blocks, initial=0))
        padding = firsts.pop()
        for field, values in ((self._tokens, tokens), (self._positions, places)):
            field[:count], field[count:rows] = values, 0
        for chunk, own in self._spans.items():
            begins = [0 if chunk is None else first_seen(chunk, start) for start in starts]
            own[:num_spans, 0] = [span.first_row for span in spans]
            own[:num_spans, 1] = [span.num_tokens for span in spans]
            own[:num_spans, 2] = np.subtract(starts, begins)
            own[:num_spans, 3] = np.add(firsts, np.floor_divide(begins, size))
            padded = num_spans + rows - count
            own[num_spans:padded] = [(row, 1, 0, padding) for row in range(count, rows)] or 0
            own[padded:rows] = 0
        num_entries = padding + (rows > count)
        for group, (slots, entries) in enumerate(zip(self._slots, self._tables, strict=True)):
            slots[:count] = [
                table[group][position // size] * size + position % size
                for table, span in zip(tables, spans, strict=True)
                for position in range(span.start, span.end)
            ]
            slots[count:rows] = self._scratch * size
            used = array("i")
            for table, blocks in zip(tables, num_blocks, strict=True):
                used.extend(table[group][:blocks])
            if rows > count:
                used.append(self._scratch)
            entries[:num_entries] = used
        last = self._first_entry + (len(self._tables) - 1) * self._entries + cdiv(num_entries, 2)
        self._copy(last)

    def advance(self, tokens: Sequence[int]) -> None:
        """Each row computes the next of `tokens`, one position further.

        The layers see no chunks.
        """
        count, size = len(tokens), self._block_size
        self._tokens[:count] = tokens
        self._positions[:count] += 1
        self._spans[None][:count, 2] += 1
        places = self._positions[:count].tolist()
        for group, slots in enumerate(self._slots):
            slots[:count] = [
                table[group][at // size] * size + at % size
                for table, at in zip(self._filled, places, strict=True)
            ]
        self._copy(self._first_entry)

    def _copy(self, count: int) -> None:
        """The first so many numbers to the device."""
        if self._device is not self._host:
            self._device[:count].copy_(self._host[:count], non_blocking=True)
