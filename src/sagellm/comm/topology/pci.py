"""Devices of a PCI tree, and how the tree joins them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sagellm.comm.topology.estimates import PCIE_GB_PER_S, pcie
from sagellm.comm.topology.tools import TOOLS, Tool
from sagellm.core.protocols.topology import Device, DeviceKind, Link, LinkKind

NIC_BASE_CLASS = 0x02
IDLE_GB_PER_S = 4.0
"""A GPU that does nothing slows its PCIe link down to its first generation, so less says nothing."""
_TOOL_OF = {vendor: tool for tool in TOOLS for vendor in tool.pci_vendors}


def tool_of(vendor_id: int, class_id: int) -> Tool | None:
    """The row of an accelerator's vendor; None for another PCI device."""
    tool = _TOOL_OF.get(vendor_id)
    return tool if tool and class_id in tool.pci_classes else None


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A function of a PCI device. `path`: its host bridge, then the bridges above it, from the root.

    `class_id` is its base class and subclass. `gb_per_s`: of its link in first direction, 0 where unknown.
    `rdma`: names of its RDMA devices; `net`: of its network interfaces.
    """

    bus_id: str
    class_id: int
    vendor_id: int
    path: tuple[str, ...]
    numa_node: int | None = None
    gb_per_s: float = 0.0
    model: str = ""
    rdma: tuple[str, ...] = ()
    net: tuple[str, ...] = ()
    state: str = ""
    link_layer: str = ""
    is_fabric: bool | None = None

    @property
    def tool(self) -> Tool | None:
        """Of the vendor, for an accelerator."""
        return tool_of(self.vendor_id, self.class_id)

    @property
    def is_nic(self) -> bool:
        return self.class_id >> 8 == NIC_BASE_CLASS and bool(self.rdma or self.net)

    @property
    def rate(self) -> float:
        """GB/s of its link, or what is assumed."""
        return self.gb_per_s if self.gb_per_s > IDLE_GB_PER_S else PCIE_GB_PER_S


def devices_of(found: Iterable[PciDevice]) -> dict[str, PciDevice]:
    """Accelerators and NICs by name.

    The accelerators of each vendor are numbered by bus id. Drivers may number otherwise, so what a vendor's
    own tool says is joined by `manager.aligned`.
    """
    named: dict[str, PciDevice] = {}
    numbers: Counter[str] = Counter()
    for device in sorted(found, key=lambda device: device.bus_id):
        tool = device.tool
        if tool is not None:
            named[f"{tool.prefix}:{numbers[tool.prefix]}"] = device
            numbers[tool.prefix] += 1
        elif device.is_nic:
            named[f"nic:{(device.rdma or device.net)[0]}"] = device
    return named


def as_device(name: str, found: PciDevice, cpus: str = "") -> Device:
    kind = found.tool.kind if found.tool else DeviceKind.NIC
    is_fabric = bool(found.rdma) if found.is_fabric is None else found.is_fabric
    return Device(
        name, kind, found.tool.vendor if found.tool else "", found.model, 0, found.numa_node, cpus,
        found.bus_id, found.state, found.link_layer, is_fabric if kind is DeviceKind.NIC else None,
    )  # fmt: skip


def kind_between(first: PciDevice, other: PciDevice) -> LinkKind:
    """As `nvidia-smi topo` names paths, and NCCL: by the bridges between two devices."""
    common = 0
    for above, other_above in zip(first.path, other.path, strict=False):
        if above != other_above:
            break
        common += 1
    if common == 0:
        nodes = {first.numa_node, other.numa_node}
        return LinkKind.SYS if len(nodes) == 2 and None not in nodes else LinkKind.NODE
    if common == 1:
        return LinkKind.PHB
    below = max(len(first.path), len(other.path)) - common
    return LinkKind.PIX if below <= 1 else LinkKind.PXB


def pci_links(named: Mapping[str, PciDevice], provenance: str) -> Iterator[Link]:
    """Both directions between accelerators, and between accelerators and NICs."""
    for (name, first), (other_name, other) in itertools.permutations(named.items(), 2):
        if first.is_nic and other.is_nic:
            continue
        kind = kind_between(first, other)
        found = pcie(kind, min(first.rate, other.rate))
        yield Link(
            name, other_name, kind, found.bandwidth_bytes_per_s, found.latency_s, provenance,
            detail=kind.name,
        )  # fmt: skip


def memory_links(named: Mapping[str, PciDevice], cpus: Sequence[Device], provenance: str) -> Iterator[Link]:
    """Between devices and the memory of their NUMA nodes, or of the only node."""
    cpu_of = {cpu.numa_node: cpu.name for cpu in cpus if cpu.numa_node is not None}
    only = cpus[0].name if len(cpus) == 1 else None
    for name, device in named.items():
        cpu = only if device.numa_node is None else cpu_of.get(device.numa_node)
        if cpu is None:
            continue
        found = pcie(LinkKind.PHB, device.rate)
        for pair in ((name, cpu), (cpu, name)):
            yield Link(
                *pair, LinkKind.PHB, found.bandwidth_bytes_per_s, found.latency_s, provenance,
                detail=LinkKind.PHB.name,
            )  # fmt: skip
