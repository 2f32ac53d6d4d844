"""NVIDIA's management library: GPUs, NVLinks and PCI paths. Starts no CUDA context."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sagellm.comm.topology.estimates import Estimate, nvlink, pcie
from sagellm.core.protocols.topology import Confidence, Device, DeviceKind, Link, LinkKind, TopologyInfo

PROVENANCE = "NVML"
PCIE_GB_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""In first direction, by generation, coding deducted."""
KIND_OF_LEVEL = {10: LinkKind.PIX, 20: LinkKind.PXB, 30: LinkKind.PHB, 40: LinkKind.NODE, 50: LinkKind.SYS}
TYPE_GPU, TYPE_SWITCH = 0, 2
"""What is at the other end of an NVLink. Others, as a Power CPU, are no way to another GPU."""
SWITCH = "switch"
INTERNAL = 0
"""Two GPUs on one board."""
P2P_READ = 0
"""Index of the P2P capability to read. A number: the package's constant has had another type."""
P2P_OK = 0
THROUGH_HOST = 0.5
"""Of the bandwidth, where two GPUs cannot reach each other and copies go through host memory."""


@dataclass(slots=True)
class _Gpu:
    handle: Any
    device: Device
    bus_id: str
    gb_per_s: float
    nvlink_version: int
    num_nvlinks: dict[str, int]
    """By bus id of the GPU at the other end; `SWITCH` for all that end at switches."""


def read_nvml(library: Any) -> TopologyInfo:
    """What the module `pynvml` says.

    Raises the library's own error where there is no driver. What a GPU does not tell is left out.
    """
    library.nvmlInit()
    try:
        found = [_gpu(library, number) for number in range(library.nvmlDeviceGetCount())]
        gpus = [gpu for gpu in found if gpu is not None]
        links = tuple(
            link for first, other in itertools.permutations(gpus, 2) for link in _links(library, first, other)
        )
    finally:
        with suppress(library.NVMLError):
            library.nvmlShutdown()
    return TopologyInfo(tuple(gpu.device for gpu in gpus), links)


def _gpu(library: Any, number: int) -> _Gpu | None:
    """None for a GPU that is lost."""

    def ask(call: Callable[..., Any], *arguments: Any, default: Any) -> Any:
        try:
            return call(*arguments)
        except library.NVMLError:  # an old driver, a virtual GPU, no permission
            return default

    handle = ask(library.nvmlDeviceGetHandleByIndex, number, default=None)
    if handle is None:
        return None
    pci = ask(library.nvmlDeviceGetPciInfo, handle, default=None)
    memory = ask(library.nvmlDeviceGetMemoryInfo, handle, default=None)
    generation = ask(library.nvmlDeviceGetMaxPcieLinkGeneration, handle, default=0)
    width = ask(library.nvmlDeviceGetMaxPcieLinkWidth, handle, default=0)
    ends: dict[str, int] = {}
    for link in range(getattr(library, "NVML_NVLINK_MAX_LINKS", 18)):
        if not ask(library.nvmlDeviceGetNvLinkState, handle, link, default=0):
            continue
        kind = ask(library.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link, default=None)
        end = SWITCH if kind == TYPE_SWITCH else ""
        if kind == TYPE_GPU:
            end = _bus_id(ask(library.nvmlDeviceGetNvLinkRemotePciInfo, handle, link, default=None))
        if end:
            ends[end] = ends.get(end, 0) + 1
    version = ask(library.nvmlDeviceGetNvLinkVersion, handle, 0, default=0) if ends else 0
    name = _text(ask(library.nvmlDeviceGetName, handle, default=""))
    device = Device(
        f"cuda:{number}", DeviceKind.GPU, "nvidia", name, memory.total if memory else 0, pci=_bus_id(pci)
    )
    return _Gpu(
        handle,
        device,
        device.pci,
        PCIE_GB_PER_LANE.get(generation, 0.0) * width,
        version,
        ends,
    )


def _links(library: Any, first: _Gpu, other: _Gpu) -> Iterator[Link]:
    """NVLinks if there are any, else the PCI path."""
    # Through switches each GPU reaches each other at full rate.
    switched = min(gpu.num_nvlinks.get(SWITCH, 0) for gpu in (first, other))
    num_links = first.num_nvlinks.get(other.bus_id, 0) or switched
    if num_links:
        yield _link(first, other, nvlink(num_links, first.nvlink_version), f"NV{num_links}")
        return
    try:
        level = library.nvmlDeviceGetTopologyCommonAncestor(first.handle, other.handle)
    except library.NVMLError:
        return
    kind = LinkKind.PIX if level == INTERNAL else KIND_OF_LEVEL.get(level)
    if kind is None:
        return
    rate = min(first.gb_per_s, other.gb_per_s)
    found = pcie(kind, rate) if rate else pcie(kind)
    detail = kind.name
    with suppress(library.NVMLError):
        if library.nvmlDeviceGetP2PStatus(first.handle, other.handle, P2P_READ) != P2P_OK:
            found = Estimate(kind, THROUGH_HOST * found.bandwidth_bytes_per_s, 2 * found.latency_s)
            detail = f"{detail} without P2P"
    yield _link(first, other, found, detail)


def _link(first: _Gpu, other: _Gpu, found: Estimate, detail: str) -> Link:
    return Link(
        first.device.name, other.device.name, found.kind, found.bandwidth_bytes_per_s, found.latency_s,
        PROVENANCE, Confidence.REPORTED, detail=detail,
    )  # fmt: skip


def _bus_id(pci: Any) -> str:
    """As `/sys` writes it: NVML's domain has eight digits, and its letters are capitals."""
    if pci is None:
        return ""
    domain, _, rest = _text(pci.busId).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
