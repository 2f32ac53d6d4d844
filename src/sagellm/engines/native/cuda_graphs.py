"""Decode steps recorded once for each bucket of batch sizes and replayed: a step's several hundred launches
become one, where launching them takes longer than computing them (CUDA graphs).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial

import torch

from sagellm.core.plan import ExecutionPlan
from sagellm.core.protocols.fusion import FusedKernel
from sagellm.engines.native.cuda_inputs import DecodeInputs
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.model import DecoderModel
from sagellm.engines.native.rows import BatchRows

Work = Callable[[], object]
Capture = Callable[[Work], Work]
"""Runs some work on fixed tensors and returns what runs it again."""

log = logging.getLogger("sagellm.kernels")
_WARM_UPS = 2


def buckets(max_rows: int) -> list[int]:
    """Batch sizes to record, ascending, the last `max_rows`: powers of two and, from 24 on, those times 3/4,
    so that at most half of a batch is padding, a third of a larger one.
    """
    sizes = {max_rows}
    power = 1
    while power < max_rows:
        sizes |= {power} | ({power * 3 // 2} if power >= 16 else set())
        power *= 2
    return sorted(size for size in sizes if size <= max_rows)


def cuda_capture(device: torch.device) -> Capture | None:
    """How work is recorded on a CUDA device, all of it sharing its memory; None for other devices."""
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


class DecodeGraphs:
    """The decode steps of up to `max_rows` rows, recorded at the beginning, the largest first: the others'
    memory fits into its.
    """

    def __init__(
        self, model: DecoderModel, kv: PagedKV, kernel: FusedKernel, capture: Capture, max_rows: int,
        max_length: int, windows: Iterable[int | None],
    ) -> None:  # fmt: skip
        began_s = time.monotonic()
        self._sizes = buckets(max_rows)
        self._inputs = DecodeInputs(kv, kernel, windows, max_rows, max_length)
        self._logits = torch.empty(max_rows, model.spec.vocab_size, device=kv.keys[0].device)
        self._inputs.fill((), (), max_rows)
        self._replays: dict[int, Work] = {}
        for size in reversed(self._sizes):
            step, out = self._inputs.step(size), self._logits[:size]
            self._replays[size] = capture(partial(model.forward, step, kv, out))
        log.info("recorded decode steps of %s rows in %.1f s", self._sizes, time.monotonic() - began_s)

    def takes(self, plan: ExecutionPlan) -> bool:
        """Whether the plan's step is recorded: one token of each row."""
        return bool(plan.decode_rows) and not plan.prefills

    def logits(self, plan: ExecutionPlan, rows: BatchRows) -> torch.Tensor:
        """Logits [S, vocab] of the plan's rows, in memory that the next step writes to."""
        tokens, spans = rows.decodes(plan)
        size = self._sizes[bisect_left(self._sizes, len(spans))]
        self._inputs.fill(tokens, spans, size)
        self._replays[size]()
        return self._logits[: len(spans)]
