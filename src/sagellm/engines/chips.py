"""Chips of a machine with their FLOP/s and bandwidth: from data sheets, or measured on them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from sagellm.core.protocols.chip_pool import ChipCapability
from sagellm.core.protocols.topology import Confidence, Device, DeviceKind, TopologyInfo
from sagellm.engines.simulator.devices import DEVICES, DeviceSpec

CORE_FLOPS, NODE_BANDWIDTH = 50e9, 20e9
"""Assumed of a CPU core and of the memory of a NUMA node, which no data sheet here says."""
CHIP_FLOPS, CHIP_BANDWIDTH = 50e12, 500e9
"""Assumed of an accelerator that is in no table: slower than those that are, so that it is chosen last."""
_SHEETS: tuple[tuple[str, str], ...] = (
    (r"h100.*pcie", "h100-pcie"), (r"h100", "h100-80g"), (r"h200", "h200"), (r"b200", "b200"),
    (r"a100.*40g", "a100-40g"), (r"a100", "a100-80g"), (r"l40s", "l40s"), (r"\bl4\b", "l4"),
    (r"\ba10\b", "a10"), (r"rtx pro 6000", "rtx-pro-6000"), (r"rtx a6000", "rtx-a6000"), (r"rtx 5090", "rtx5090"),
    (r"rtx 4090", "rtx4090"), (r"mi300x", "mi300x"), (r"910b", "ascend-910b"), (r"310p", "ascend-310p"),
)  # fmt: skip
"""Parts of the names that drivers give, the more special before the more general."""
_TORCH_TYPES = {"rocm": "cuda", "hcu": "cuda", "maca": "cuda", "xpu": "cuda"}
"""Torch's names of devices whose tools call them otherwise: these vendors' torch says cuda."""


def sheet_of(model: str) -> DeviceSpec | None:
    """The data sheet of a chip by the name that its driver gives."""
    name = " ".join(re.split(r"[\s_-]+", model.lower()))
    return next((DEVICES[preset] for pattern, preset in _SHEETS if re.search(pattern, name)), None)


def known_chips(
    topology: TopologyInfo, num_cores: Mapping[str, int], free_bytes: Mapping[str, int] | None = None
) -> list[ChipCapability]:
    """Every accelerator and NUMA node with CPUs, with figures of its data sheet or assumed ones.

    `num_cores`: physical cores that may be used, by CPU chip. `free_bytes`: by name, where it is known;
    otherwise all memory counts.
    """
    free, found = free_bytes or {}, []
    for device in topology.devices:
        if device.kind is DeviceKind.NIC or (device.kind is DeviceKind.CPU and not num_cores.get(device.name)):
            continue
        size = free.get(device.name, device.memory_bytes)
        if device.kind is DeviceKind.CPU:
            flops, rate, source = CORE_FLOPS * num_cores[device.name], NODE_BANDWIDTH, "a usual CPU"
        else:
            flops, rate, source, size = _of_sheet(device, size)
        found.append(
            ChipCapability(
                device.name, device.kind, size, flops, rate, device.model, device.vendor,
                Confidence.ASSUMED, source,
            )
        )  # fmt: skip
    return found


def _of_sheet(device: Device, size: int) -> tuple[float, float, str, int]:
    sheet = sheet_of(device.model)
    if sheet is None:
        return CHIP_FLOPS, CHIP_BANDWIDTH, "a usual accelerator", size
    return sheet.peak_flops("bfloat16"), sheet.bandwidth, sheet.source, size or sheet.memory_bytes


def measured_chips(chips: Iterable[ChipCapability]) -> list[ChipCapability]:
    """The chips with what a second of reading memory and multiplying matrices reaches on each.

    Torch loads each chip's runtime in this process, so it must see them all. The CPU is measured once, with
    all threads of torch, and divided by the NUMA nodes.
    """
    from sagellm.engines.native.accelerators import load
    from sagellm.engines.native.measure import matrix_flops, read_bandwidth

    known = list(chips)
    num_nodes = sum(chip.is_cpu for chip in known)
    cpu = (matrix_flops("cpu") / num_nodes, read_bandwidth("cpu") / num_nodes) if num_nodes else (0.0, 0.0)
    found = []
    for chip in known:
        if chip.is_cpu:
            found.append(chip.measured(*cpu))
            continue
        kind, _, number = chip.name.partition(":")
        device = f"{_TORCH_TYPES.get(kind, kind)}:{number}"
        load(device.partition(":")[0])
        found.append(chip.measured(matrix_flops(device), read_bandwidth(device)))
    return [replace(chip, source=f"{chip.source} of this machine") for chip in found]
