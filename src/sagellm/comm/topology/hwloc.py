"""XML of hwloc (`lstopo --of xml`), forms 2.x and 1.11."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sagellm.comm.topology.pci import PciDevice, as_device, devices_of, memory_links, pci_links
from sagellm.core.protocols.topology import Device, DeviceKind, TopologyInfo

MAX_DEPTH = 64
NETWORK, OPEN_FABRICS = "2", "3"
"""Types of an OS device."""
_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]", re.IGNORECASE)


@dataclass(slots=True)
class _Found:
    nodes: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Memory in bytes and CPUs by NUMA node."""
    devices: list[PciDevice] = field(default_factory=list)


def parse_hwloc(text: str, provenance: str = "hwloc") -> TopologyInfo:
    """NUMA nodes, accelerators, NICs, and their links.

    Raises `ValueError` for text that is no XML of hwloc, declares entities, or is nested too deep.
    """
    if "<!ENTITY" in text:
        raise ValueError("hwloc's XML declares no entities, and this file does")
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        raise ValueError(f"no XML: {error}") from error
    if root.tag != "topology":
        raise ValueError(
            f"the XML is a <{root.tag}>, hwloc's is a <topology>: make it with `lstopo --of xml`"
        )
    found = _Found()
    for child in root.iterfind("object"):
        _walk(child, (), None, found, MAX_DEPTH)
    nodes = found.nodes or {0: (0, "")}
    cpus = [
        Device(f"cpu:{node}", DeviceKind.CPU, memory_bytes=memory, numa_node=node, cpus=near)
        for node, (memory, near) in sorted(nodes.items())
    ]
    named = devices_of(found.devices)
    devices = [
        as_device(
            name, device, nodes.get(device.numa_node, (0, ""))[1] if device.numa_node is not None else ""
        )
        for name, device in named.items()
    ]
    links = (*pci_links(named, provenance), *memory_links(named, cpus, provenance))
    return TopologyInfo((*cpus, *devices), links)


def _walk(element: ET.Element, path: tuple[str, ...], node: int | None, found: _Found, depth: int) -> None:
    """Collect what is below an object. `node`: the NUMA node of what is above."""
    if not depth:
        raise ValueError(f"objects of the XML are nested deeper than {MAX_DEPTH}")
    kind = element.get("type")
    children = element.findall("object")
    local = [child for child in children if child.get("type") == "NUMANode"]
    # hwloc 2: memory is a child beside the PCI bridges of its package; in 1.11 it is above them
    if len(local) == 1 and local[0].find("object") is None:
        node = _number(local[0].get("os_index"))
    elif local:
        node = None
    if kind == "NUMANode":
        node = _number(element.get("os_index"))
        if node is not None:
            found.nodes[node] = (
                _number(element.get("local_memory")) or 0,
                _cpulist(element.get("cpuset", "")),
            )
    elif kind == "Bridge":
        path = (*path, element.get("pci_busid") or f"host bridge {element.get('bridge_pci', '')}")
    elif kind == "PCIDev" and (device := _device(element, path, node)) is not None:
        found.devices.append(device)
    for child in children:
        _walk(child, path, node, found, depth - 1)


def _device(element: ET.Element, path: tuple[str, ...], node: int | None) -> PciDevice | None:
    match = _TYPE.match(element.get("pci_type", ""))
    if match is None:
        return None
    names: Mapping[str, list[str]] = {NETWORK: [], OPEN_FABRICS: []}
    for each in element.iterfind("object[@type='OSDev']"):
        names.get(each.get("osdev_type", ""), []).append(each.get("name", ""))
    info = {each.get("name"): each.get("value", "") for each in element.iterfind("info")}
    try:
        rate = float(element.get("pci_link_speed", "0"))
    except ValueError:
        rate = 0.0
    return PciDevice(
        element.get("pci_busid", ""), int(match[1], 16), int(match[2], 16), path, node, rate,
        info.get("PCIDevice", ""), tuple(names[OPEN_FABRICS]), tuple(names[NETWORK]),
    )  # fmt: skip


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _cpulist(cpuset: str) -> str:
    """A mask as Linux writes a list of CPUs.

    The mask is in words of 32 bits, highest first; an empty one is 0.
    """
    words = [(word.removeprefix("0x") or "0").zfill(8) for word in cpuset.split(",")]
    mask = int("".join(words), 16)
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in _runs(mask))


def _runs(mask: int) -> Iterator[tuple[int, int]]:
    bits = bin(mask)[:1:-1]
    for match in re.finditer("1+", bits):
        yield match.start(), match.end() - 1
