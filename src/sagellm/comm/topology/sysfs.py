"""What Linux says in `/sys`: NUMA nodes, the PCI tree, network and RDMA devices."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from sagellm.comm.topology.estimates import GB
from sagellm.comm.topology.pci import (
    NIC_BASE_CLASS,
    PciDevice,
    as_device,
    devices_of,
    memory_links,
    pci_links,
    tool_of,
)
from sagellm.comm.topology.rdma import ACTIVE, is_fabric_port
from sagellm.core.numa import cpus_of_node
from sagellm.core.protocols.topology import Device, DeviceKind, Link, LinkKind, TopologyInfo

PROVENANCE = "/sys"
LOCAL_GB_PER_S, LOCAL_DISTANCE = 20.0, 10
"""Copies within a node, as one core makes them; Linux gives a node the distance 10 to itself."""
_BUS_ID = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_SPEED = re.compile(r"([\d.]+) GT/s", re.ASCII)
_OLD_RATES = (2.5, 5.0)


def read_sysfs(root: Path = Path("/")) -> TopologyInfo:
    """Never raises for what is there or missing. A machine that names no node is `cpu:0`."""
    cpus = list(_cpus(root))
    nodes = [device.numa_node for device in cpus if device.numa_node is not None]
    missing: dict[str, str] = {}
    found, folder = [], root / "sys/bus/pci/devices"
    try:
        found = [device for entry in sorted(folder.iterdir()) if (device := _pci_device(entry))]
    except OSError as error:
        missing["/sys/bus/pci"] = error.strerror or str(error)
    named = devices_of(found)
    near = {device.numa_node: device.cpus for device in cpus}
    devices = [
        as_device(name, each, near.get(each.numa_node, "") if each.numa_node is not None else "")
        for name, each in named.items()
    ]
    devices += list(_virtual_nics(root, {name for each in found for name in each.net}))
    links = (
        *pci_links(named, PROVENANCE),
        *memory_links(named, cpus, PROVENANCE),
        *_node_links(root, nodes),
    )
    return TopologyInfo((*cpus, *devices), links, missing)


def _cpus(root: Path) -> Iterator[Device]:
    folder = root / "sys/devices/system/node"
    numbers = sorted(int(name[4:]) for name in _names(folder) if re.fullmatch(r"node\d+", name, re.ASCII))
    for number in numbers:
        text = _read(folder / f"node{number}/cpulist")
        try:
            has_cpus = bool(cpus_of_node(number, root))
        except ValueError:
            text, has_cpus = "", True
        yield Device(
            f"cpu:{number}",
            DeviceKind.CPU,
            model="" if has_cpus else "memory only",
            memory_bytes=_node_memory(folder / f"node{number}/meminfo"),
            numa_node=number,
            cpus=text,
        )
    if not numbers:
        yield Device("cpu:0", DeviceKind.CPU, cpus=_read(root / "sys/devices/system/cpu/online"))


def _node_memory(path: Path) -> int:
    match = re.search(r"MemTotal:\s+(\d+) kB", _read(path), re.ASCII)
    return int(match[1]) << 10 if match else 0


def _node_links(root: Path, nodes: list[int]) -> Iterator[Link]:
    """Between NUMA nodes; the farther a node is, the slower."""
    for node in nodes:
        text = _read(root / f"sys/devices/system/node/node{node}/distance").split()
        distances = [int(word) for word in text if word.isdecimal()]
        if len(distances) != len(nodes):
            continue
        for other, distance in zip(nodes, distances, strict=True):
            if other != node and distance > 0:
                rate = LOCAL_GB_PER_S * GB * LOCAL_DISTANCE / distance
                yield Link(
                    f"cpu:{node}", f"cpu:{other}", LinkKind.SYS, rate, 1e-8 * distance, PROVENANCE,
                    detail=f"distance {distance}",
                )  # fmt: skip


def _pci_device(entry: Path) -> PciDevice | None:
    """An accelerator or a NIC; None for others, and what a guest has.

    A virtual function of an accelerator is a guest's, and what vfio drives is.
    """
    try:
        class_id, vendor = int(_read(entry / "class"), 16) >> 8, int(_read(entry / "vendor"), 16)
        parts = entry.resolve().parts
    except (ValueError, OSError):
        return None
    is_nic = class_id >> 8 == NIC_BASE_CLASS
    if not is_nic and (tool_of(vendor, class_id) is None or (entry / "physfn").exists()):
        return None
    if (entry / "driver").resolve().name == "vfio-pci":
        return None
    node = _read(entry / "numa_node")
    bridges = [part for part in parts[:-1] if _BUS_ID.fullmatch(part) or _BRIDGE.fullmatch(part)]
    rdma = _names(entry / "infiniband")
    # A virtio device has its interfaces one folder further down.
    net = _names(entry / "net") or [
        name
        for virtio in _names(entry)
        if virtio.startswith("virtio")
        for name in _names(entry / virtio / "net")
    ]
    state, layer = _port(entry / "infiniband" / rdma[0]) if rdma else ("", "")
    guid = _read(entry / "infiniband" / rdma[0] / "sys_image_guid") if rdma else ""
    return PciDevice(
        entry.name, class_id, vendor, tuple(bridges), int(node) if node.isdecimal() else None, _rate(entry),
        rdma=tuple(rdma), net=tuple(net), state=state, link_layer=layer,
        is_fabric=bool(rdma) and is_fabric_port(layer, guid) is not False,
    )  # fmt: skip


def _port(folder: Path) -> tuple[str, str]:
    """State and link layer of the first active port, else of the first."""
    ports = [folder / "ports" / number for number in _names(folder / "ports")]
    found = [(_read(port / "state").partition(": ")[2], _read(port / "link_layer")) for port in ports]
    return next((port for port in found if port[0] == ACTIVE), found[0] if found else ("", ""))


def _rate(entry: Path) -> float:
    """The most GB/s of its link in one direction; 0 if unknown."""
    speed, width = _SPEED.match(_read(entry / "max_link_speed")), _read(entry / "max_link_width")
    if speed is None or not width.isdecimal() or int(width) > 32:
        return 0.0
    gt_per_s = float(speed[1])
    coding = 8 / 10 if gt_per_s in _OLD_RATES else 128 / 130
    return gt_per_s * coding / 8 * int(width)


def _virtual_nics(root: Path, known: set[str]) -> Iterator[Device]:
    """Interfaces with hardware that is on no PCI bus."""
    for name in _names(root / "sys/class/net"):
        if name not in known and (root / "sys/class/net" / name / "device").exists():
            yield Device(f"nic:{name}", DeviceKind.NIC, is_fabric=False)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
