"""Contract of interconnects of other chips (Ascend HCCS, Cambricon MLU-Link, Hygon xGMI, ...).

Each is a data row, `info`, and five hooks, which go through the vendor's torch. Code for a chip that has not
run on it says so in its `maturity`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from sagellm.core.protocols.collectives import CommBackendProtocol


class Maturity(str, Enum):
    """What the code has run on: the chip, its simulator, or an emulated link."""

    HARDWARE = "hardware"
    VENDOR_SIMULATOR = "vendor_simulator"
    EMULATION = "emulation"


class ChipKernels(str, Enum):
    """What computes what plain operators could: the Triton kernels, or nothing but torch."""

    TRITON = "triton"
    TORCH = "torch"


@dataclass(frozen=True, slots=True)
class ClaimedBandwidth:
    """What a vendor says of a link; it is not measured. `product`: of which product, in which directions."""

    bytes_per_s: float
    product: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class InterconnectInfo:
    """What is known of a vendor's chips. `sources` name where the facts are from.

    `link` and `library`: the link between chips and the vendor's collectives over it. `device_type`: torch's
    name of the devices. `torch_module`: what must be imported for it; empty where torch itself is the
    vendor's build. `backend`: the library's name in `torch.distributed`. `visible_devices`: the variable that
    lists the chips a process may use. `device_files`: patterns below the root, one file for each chip or one
    for all. `topology_labels`: what the cells of `topology_command` mean; `#` stands for a number. `claimed`
    is None where no primary source gives a figure.
    """

    vendor: str
    link: str
    library: str
    device_type: str
    torch_module: str
    backend: str
    visible_devices: str
    device_files: tuple[str, ...]
    topology_command: tuple[str, ...]
    topology_labels: Mapping[str, str]
    sources: tuple[str, ...]
    kernels: ChipKernels = ChipKernels.TORCH
    maturity: Maturity = Maturity.EMULATION
    claimed: ClaimedBandwidth | None = None


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether the chips can be used here. If not, `reason` names the missing device or package.

    `has_device`: whether the kernel driver shows a device, which then only lacks a package.
    """

    usable: bool
    reason: str = ""
    has_device: bool = False


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of a device's memory."""

    free_bytes: int
    total_bytes: int


class DomesticCommBackend(Protocol):
    """One vendor's chips, and collectives over their links."""

    info: InterconnectInfo

    def is_available(self) -> Availability:
        """Looks for device files and packages; loads no driver, imports nothing, never raises."""

    def device_count(self) -> int:
        """Chips that this process may use. This and what follows import the vendor's torch.

        They raise `ConfigError`, with the reason of `is_available`, where the chips cannot be used.
        """

    def set_device(self, index: int) -> None:
        """Make a chip this process's current one. Raises `ConfigError` for one that is not there."""

    def memory_info(self, index: int) -> MemoryInfo: ...

    def init_process_group(
        self, rank: int, world_size: int, store: Any, *, timeout_s: float = 300.0
    ) -> CommBackendProtocol:
        """Collectives over the vendor's library; returns when all ranks have called it.

        Each rank sets its device first. `store`: as of `registry("collectives")`.
        """
