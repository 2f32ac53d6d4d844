"""Contract of the chip pool: a chip as whoever measured it describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sagellm.core.protocols.topology import Confidence, DeviceKind


@dataclass(frozen=True, slots=True)
class ChipCapability:
    """A GPU, an NPU, or the cores and memory of a NUMA node.

    `name` as topology names it ('cuda:0', 'npu:1', 'cpu:0'). `memory_bytes`: free for an instance.
    `flops`: FLOP/s of large 16-bit matrix products (32-bit ones where the chip has no faster format), and
    `bandwidth_bytes_per_s` of reading its memory, of all its cores. `confidence`: of these two;
    `source` says where they are from.
    """

    name: str
    kind: DeviceKind
    memory_bytes: int
    flops: float
    bandwidth_bytes_per_s: float
    model: str = ""
    vendor: str = ""
    confidence: Confidence = Confidence.ASSUMED
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind is DeviceKind.NIC:
            raise ValueError(f"chip {self.name}: a NIC computes nothing")
        if self.memory_bytes < 0 or not 0 < min(self.flops, self.bandwidth_bytes_per_s) < math.inf:
            raise ValueError(f"chip {self.name}: memory is not negative, FLOP/s and bandwidth are positive")

    def measured(self, flops: float, bandwidth_bytes_per_s: float) -> ChipCapability:
        """The chip with figures of a benchmark on it."""
        return replace(
            self, flops=flops, bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            confidence=Confidence.MEASURED, source="self-benchmark",
        )  # fmt: skip

    @property
    def is_cpu(self) -> bool:
        return self.kind is DeviceKind.CPU
