"""Made-up hosts for tests of the chip pool."""

from __future__ import annotations

from collections.abc import Mapping

from sagellm.control_plane.chip_pool import ChipPool
from sagellm.core.protocols.chip_pool import ChipCapability
from sagellm.core.protocols.topology import Device, DeviceKind, Link, LinkKind, TopologyInfo

GIB = 2**30
FIGURES: Mapping[str, tuple[DeviceKind, str, int, float, float]] = {
    "fast": (DeviceKind.GPU, "nvidia", 80 * GIB, 1000e12, 2000e9),
    "wide": (DeviceKind.GPU, "nvidia", 96 * GIB, 150e12, 4000e9),
    "small": (DeviceKind.GPU, "nvidia", 16 * GIB, 60e12, 300e9),
    "npu": (DeviceKind.NPU, "huawei", 64 * GIB, 350e12, 1600e9),
}


def host(
    models: str = "", *, num_cores: int = 8, num_nodes: int = 1, islands: int = 1, memory: int = 64
) -> ChipPool:
    """A pool with accelerators of the models named, and cores dealt to NUMA nodes in equal parts.

    Links: NVLink between chips of the same island (the chips in equal runs), SYS between islands. `memory`:
    GiB of each node.
    """
    names = models.split()
    cores = [(cpu, cpu + num_cores) for cpu in range(num_cores)]
    per_node = num_cores // num_nodes
    devices, chips = [], []
    for node in range(num_nodes):
        cpus = [cpu for core in cores[node * per_node : (node + 1) * per_node] for cpu in core]
        text = ",".join(map(str, cpus))
        devices.append(Device(f"cpu:{node}", DeviceKind.CPU, memory_bytes=memory * GIB, numa_node=node, cpus=text))
        chips.append(ChipCapability(f"cpu:{node}", DeviceKind.CPU, memory * GIB, 1e12, 50e9))
    counts: dict[str, int] = {}
    accelerators = []
    for place, model in enumerate(names):
        kind, vendor, size, flops, rate = FIGURES[model]
        prefix = "cuda" if vendor == "nvidia" else "npu"
        name = f"{prefix}:{counts.setdefault(prefix, 0)}"
        counts[prefix] += 1
        node = place * num_nodes // len(names)
        devices.append(Device(name, kind, vendor, model, size, node))
        chips.append(ChipCapability(name, kind, size, flops, rate, model, vendor))
        accelerators.append((name, place * islands // len(names)))
    links = [
        Link(a, b, LinkKind.NVLINK if x == y else LinkKind.SYS, 400e9 if x == y else 20e9, 1e-6, "a table")
        for a, x in accelerators
        for b, y in accelerators
        if a != b
    ]
    return ChipPool(chips, TopologyInfo(tuple(devices), tuple(links)), cores)
