"""Contract of topology detection: the devices, and the cost of a byte between two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class DeviceKind(str, Enum):
    CPU = "cpu"
    GPU = "gpu"
    NPU = "npu"
    NIC = "nic"


class LinkKind(str, Enum):
    """How two devices are joined, from near to far. Other vendors' chips use `VENDOR`."""

    SELF = "self"
    NVLINK = "nvlink"
    VENDOR = "vendor"
    PCIE = "pcie"
    NUMA = "numa"
    NETWORK = "network"


class Confidence(str, Enum):
    """Where a figure comes from: measured beats reported by the system beats a table."""

    MEASURED = "measured"
    REPORTED = "reported"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Device:
    """One device; `name` is unique in its `TopologyInfo` ('cpu:0', 'cuda:1', 'nic:eth0')."""

    name: str
    kind: DeviceKind
    node: str = "localhost"
    memory_bytes: int = 0
    numa_node: int | None = None
    vendor: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two devices. `detail` is the maker's word ('HCCS', 'MLU-Link', 'xGMI', 'NV4')."""

    source: str
    target: str
    kind: LinkKind
    bandwidth_bytes_per_s: float
    latency_s: float
    confidence: Confidence
    detail: str = ""

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError(f"link {self.source} -> {self.target}: bandwidth must be > 0 and latency >= 0")

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds for one message, without contention."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class TopologyInfo:
    """Devices and links of one or more nodes. `missing` says, by source, what could not be asked and why."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    def link(self, source: str, target: str) -> Link | None:
        """The direct link with the most bandwidth, or None without a direct one."""
        direct = [link for link in self.links if (link.source, link.target) == (source, target)]
        return max(direct, key=lambda link: link.bandwidth_bytes_per_s, default=None)


class TopologyManager(Protocol):
    """Looks at the machine. Starts no device context, and needs no right beyond reading."""

    def detect(self) -> TopologyInfo:
        """What can be seen from here, always at least one CPU. A source that is absent (no driver, no tool,
        no permission) is named in `missing`; only a machine that contradicts itself raises `SageError`."""

    def measure(self, info: TopologyInfo, *, budget_s: float) -> TopologyInfo:
        """The same devices with measured links, as far as the budget goes. The other links keep their
        confidence."""
