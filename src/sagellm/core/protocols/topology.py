"""Contract of topology detection: devices, links, and where both are known from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class DeviceKind(str, Enum):
    """`CPU` is the processors and the memory of one NUMA node."""

    CPU = "cpu"
    GPU = "gpu"
    NPU = "npu"
    NIC = "nic"


class LinkKind(str, Enum):
    """How two devices are joined, from near to far, in words of `nvidia-smi`.

    `VENDOR`: another vendor's link between its chips; `Link.detail` has its name. `PIX`: at most one PCIe
    switch; `PXB`: several; `PHB`: a PCIe host bridge; `NODE`: several host bridges of one NUMA node; `SYS`:
    the interconnect between NUMA nodes; `NETWORK`: between hosts.
    """

    NVLINK = "nvlink"
    VENDOR = "vendor"
    PIX = "pix"
    PXB = "pxb"
    PHB = "phb"
    NODE = "node"
    SYS = "sys"
    NETWORK = "network"

    @property
    def distance(self) -> int:
        """0 for the nearest kind."""
        return _NEAR_TO_FAR.index(self)


_NEAR_TO_FAR = tuple(LinkKind)


class Confidence(str, Enum):
    """How well something is known, from measured to assumed from a table."""

    MEASURED = "measured"
    REPORTED = "reported"
    ASSUMED = "assumed"

    @property
    def rank(self) -> int:
        """0 for the best."""
        return tuple(Confidence).index(self)


@dataclass(frozen=True, slots=True)
class Device:
    """One device; `name` is unique in its `TopologyInfo` ('cpu:0', 'cuda:1', 'nic:mlx5_0').

    `cpus`: of its NUMA node or near to it, as Linux writes a list ('0-3,8'). `pci`: its bus id. `state` and
    `link_layer`: of a NIC, in the words of `ibv_devinfo`. `is_fabric`: whether KV and collectives may use a
    NIC; None where no source says.
    """

    name: str
    kind: DeviceKind
    vendor: str = ""
    model: str = ""
    memory_bytes: int = 0
    numa_node: int | None = None
    cpus: str = ""
    pci: str = ""
    state: str = ""
    link_layer: str = ""
    is_fabric: bool | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes < 0 or (self.numa_node is not None and self.numa_node < 0):
            raise ValueError(
                f"device {self.name}: memory and NUMA node are not negative; leave out an unknown one"
            )


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two devices. `detail` is the tool's word ('NV18', 'HCCS', 'PIX').

    `provenance`: the tool or file that says the link is there, and `confidence` how well it knows. The
    figures are estimates for one large copy; `figures` says where they come from.
    """

    source: str
    target: str
    kind: LinkKind
    bandwidth_bytes_per_s: float
    latency_s: float
    provenance: str
    confidence: Confidence = Confidence.REPORTED
    figures: Confidence = Confidence.ASSUMED
    detail: str = ""

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise ValueError(f"link {self.source} -> {self.target}: a device has no link to itself")
        if not 0 < self.bandwidth_bytes_per_s < math.inf or not 0 <= self.latency_s < math.inf:
            raise ValueError(f"link {self.source} -> {self.target}: bandwidth must be > 0 and latency >= 0")

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds for one message, without contention."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class TopologyInfo:
    """Devices and links of a host, one link at most for a direction.

    `missing` says, by source, what could not be asked or not be understood, and why: an absent source is no
    absent link. Raises `ValueError` where two devices have one name, or a link names no device.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {device.name for device in self.devices}
        if len(names) < len(self.devices):
            raise ValueError("two devices of a topology have one name")
        pairs = set()
        for link in self.links:
            for end in (link.source, link.target):
                if end not in names:
                    raise ValueError(f"a link names {end}, which is no device of it")
            pairs.add((link.source, link.target))
        if len(pairs) < len(self.links):
            raise ValueError("a pair of devices has two links in one direction")

    def device(self, name: str) -> Device:
        """Raises `ValueError` for a name that is not there."""
        for device in self.devices:
            if device.name == name:
                return device
        known = ", ".join(device.name for device in self.devices)
        raise ValueError(f"no device {name!r}: there are {known or 'none'}")

    def link(self, source: str, target: str) -> Link | None:
        """The direct link, or None."""
        for link in self.links:
            if link.source == source and link.target == target:
                return link
        return None


class TopologyManager(Protocol):
    """Looks at the machine. Starts no device context, and needs no right beyond reading."""

    def detect(self) -> TopologyInfo:
        """What can be seen from here, always at least one CPU.

        A source that is absent, hangs or is not understood is named in `missing`. Never raises for what a
        machine says.
        """
