"""What overlap gains on a device of the cost model.

Layers of a prefill run beside transfers of KV, or beside collectives.
The cost model prices whole steps; here all layers of a step take the same share of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from sagellm.benchmarks.reporting import PLOT_COLORS, new_figure
from sagellm.comm.overlap.managers import CriticalPathManager
from sagellm.comm.overlap.patterns import Tasks, double_buffered, ping_pong, sent_by_layer
from sagellm.core.errors import ConfigError, UnknownNameError, nearest
from sagellm.core.protocols.overlap import OverlapSchedule
from sagellm.engines.simulator.cost_model import CostModel, StepShape

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """A prompt of `num_tokens` behind `num_cached` that have KV. `chunk`: tokens of a step."""

    cost_model: CostModel
    num_tokens: int = 8192
    num_cached: int = 0
    chunk: int = 2048
    network_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.chunk < 1 or self.num_cached < 0:
            raise ConfigError("a prompt and a chunk have at least 1 token, and 0 or more are cached")
        if self.network_bytes_per_s is not None and not 1 <= self.network_bytes_per_s < math.inf:
            raise ConfigError("a network moves 1 byte per second or more, and not infinitely many")

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(start, number of tokens) of each chunk."""
        first, stop = self.num_cached, self.num_cached + self.num_tokens
        return [(start, end - start) for start, end in pairwise([*range(first, stop, self.chunk), stop])]

    @property
    def bytes_per_layer(self) -> float:
        """Of the KV of one token."""
        model = self.cost_model.model
        return model.kv_bytes_per_token / model.num_layers

    def layers_s(self, start: int, number: int) -> list[float]:
        """Seconds of each layer of a chunk."""
        layers = self.cost_model.model.num_layers
        return [self.cost_model.step_s(StepShape(prefills=((start, number),))) / layers] * layers


@dataclass(frozen=True, slots=True)
class OverlapEstimate:
    """A planned schedule, and what the same work takes when nothing overlaps."""

    title: str
    schedule: OverlapSchedule
    alone_s: float


def kv_send(case: PrefillCase) -> OverlapEstimate:
    """Disaggregated prefill: KV of a layer is sent while the next are computed."""
    rate = case.network_bytes_per_s or case.cost_model.device.network
    compute_s: list[float] = []
    send_s: list[float] = []
    for start, number in case.chunks:
        layers_s = case.layers_s(start, number)
        compute_s += layers_s
        send_s += [number * case.bytes_per_layer / rate] * len(layers_s)
    title = f"KV of {case.num_tokens} tokens sent at {rate / 1e9:g} GB/s while they are computed"
    return _estimate(title, sent_by_layer(compute_s, send_s))


def kv_load(case: PrefillCase) -> OverlapEstimate:
    """Cached KV is loaded by layer from host memory while the rest is computed.

    The loads belong to the first chunk; later chunks find them done.
    """
    cost = case.cost_model
    rate = min(cost.tensor_parallel, cost.model.num_kv_heads) * cost.device.pcie
    first, *rest = case.chunks
    layers_s = case.layers_s(*first)
    loads_s = [case.num_cached * case.bytes_per_layer / rate] * len(layers_s)
    later_s = [second for chunk in rest for second in case.layers_s(*chunk)]
    fetch_s, compute_s = loads_s + [0.0] * len(later_s), layers_s + later_s
    title = (
        f"KV of {case.num_cached} tokens loaded at {rate / 1e9:g} GB/s while {case.num_tokens} are computed"
    )
    return _estimate(title, double_buffered(fetch_s, compute_s, num_buffers=len(compute_s)))


def micro_batches(case: PrefillCase) -> OverlapEstimate:
    """Tensor parallelism: half of a chunk computes while collectives sum the other.

    Halves read the weights twice, so this may take longer than whole chunks without overlap.
    """
    cost = case.cost_model
    if cost.num_devices < 2:
        raise ConfigError("one device has no collectives to hide: give --tensor-parallel 2 or more")
    stages = 2 * cost.model.num_layers
    compute_s: list[float] = []
    comm_s: list[float] = []
    alone_s = 0.0
    for start, number in case.chunks:
        half = (number + 1) // 2
        halves = [(start, half), (start + half, number - half)] if number > 1 else [(start, half)]
        steps_s = sum(cost.step_s(StepShape(prefills=(each,))) for each in halves)
        sums_s = sum(cost.collectives_s(tokens, tokens) for _, tokens in halves)
        # Of each half alike: the second attends to the first, too, and the sum of both is what counts.
        compute_s += [(steps_s - sums_s) / (2 * stages)] * stages
        comm_s += [sums_s / (2 * stages)] * stages
        alone_s += cost.step_s(StepShape(prefills=((start, number),)))
    title = f"{case.num_tokens} tokens in two micro-batches on {cost.num_devices} devices"
    return _estimate(title, ping_pong(compute_s, comm_s), alone_s)


PATTERNS = {"kv-send": kv_send, "kv-load": kv_load, "micro-batches": micro_batches}


def estimate(pattern: str, case: PrefillCase) -> OverlapEstimate:
    """The estimate of a pattern by name. Raises `UnknownNameError`."""
    if pattern not in PATTERNS:
        raise UnknownNameError(f"no pattern {pattern!r}.{nearest(pattern, PATTERNS)}")
    return PATTERNS[pattern](case)


def _estimate(title: str, tasks: Tasks, alone_s: float | None = None) -> OverlapEstimate:
    schedule = CriticalPathManager().schedule(*tasks)
    return OverlapEstimate(title, schedule, schedule.serial_s if alone_s is None else alone_s)


def gantt_figure(found: OverlapEstimate) -> Figure:
    """Draws the lanes over time, computation and communication in their colors."""
    lanes = list(found.schedule.idle_shares)
    figure = new_figure(10.5, 1.2 + 0.6 * len(lanes))
    axes = figure.subplots()
    for row, lane in enumerate(lanes):
        slots = [slot for slot in found.schedule.slots if slot.task.lane == lane]
        spans = [(1e3 * slot.start_s, 1e3 * slot.task.duration_s) for slot in slots]
        colors = [PLOT_COLORS[slot.task.name in found.schedule.comm] for slot in slots]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colors, edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlim(0, 1e3 * found.schedule.makespan_s)
    axes.set_xlabel("ms")
    axes.set_title(f"{found.title}: {found.schedule.hidden_fraction:.0%} hidden", fontsize=9)
    return figure
