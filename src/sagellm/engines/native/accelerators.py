"""Accelerators by torch's name of them: vendor, memory, kernels, and torch's module.

NVIDIA's and AMD's need nothing. Chips of other vendors are found by `comm/interconnect`, whose hooks import
the vendor's torch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from sagellm.comm.interconnect.lookup import interconnect_for, interconnects
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.interconnect import ChipKernels

log = logging.getLogger("sagellm.devices")


def default_device() -> torch.device:
    """A vendor's chip whose device is there, else a GPU, else the CPU.

    A chip that is there and cannot be used is named in a warning.
    """
    for _, chip in interconnects():
        found = chip.is_available()
        if found.has_device:
            try:
                if chip.device_count():
                    return torch.device(chip.info.device_type)
                log.warning(
                    "%s: a chip is there, and this torch sees none: install the vendor's build of torch, or "
                    "check %s", chip.info.vendor, chip.info.visible_devices,
                )  # fmt: skip
            except ConfigError as error:
                log.warning("%s", error)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(device_type: str) -> None:
    """Import the vendor's torch for these devices, if they need it.

    Raises `ConfigError`, with the reason, where the vendor is known and its chips cannot be used.
    """
    chip = None if device_type == "cpu" else interconnect_for(device_type)
    if chip is not None:
        chip.device_count()


def module_of(device: torch.device) -> Any:
    """`torch.cuda` or its counterpart, of a device that is no CPU."""
    return getattr(torch, device.type)


def free_bytes(device: torch.device) -> int:
    """Free memory of a device that is no CPU."""
    module, chip = module_of(device), interconnect_for(device.type)
    given: int | None = device.index
    index: int = module.current_device() if given is None else given
    return int(module.mem_get_info(index)[0]) if chip is None else chip.memory_info(index).free_bytes


def runs_triton(device: torch.device) -> bool:
    """Whether our Triton kernels run there: GPUs, and chips whose row says so."""
    chip = None if device.type == "cpu" else interconnect_for(device.type)
    return device.type == "cuda" if chip is None else chip.info.kernels is ChipKernels.TRITON
