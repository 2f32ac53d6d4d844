"""Which chips a process may see, by the variables that each vendor's runtime reads."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping

from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.protocols.chip_pool import ChipCapability
from sagellm.core.registry import registry

_VARIABLES = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}
_INTERCONNECTS = {"huawei": "ascend", "mthreads": "moore_threads"}
"""Vendors that topology and `comm/interconnect` name differently."""
_IN_PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""CUDA's own order is the fastest first; NVML and nvidia-smi number GPUs by PCI id."""


def variable_of(vendor: str) -> str | None:
    """The variable that lists the chips a process may use; None for an unknown vendor."""
    if vendor in _VARIABLES:
        return _VARIABLES[vendor]
    try:
        chip = registry("interconnect").create(_INTERCONNECTS.get(vendor, vendor))
    except UnknownNameError:
        return None
    found: str = chip.info.visible_devices
    return found or None


def chip_number(name: str) -> str:
    """The number in 'cuda:3'."""
    return name.rpartition(":")[2]


def environment_of(chips: Collection[ChipCapability], pool: Iterable[ChipCapability]) -> dict[str, str]:
    """Variables for a process that may use `chips` and none of the others of the pool.

    Raises `ConfigError` for a chip whose vendor has no known variable: it could not be isolated.
    """
    environment: dict[str, str] = {}
    for vendor in dict.fromkeys(chip.vendor for chip in pool if not chip.is_cpu):
        own = [chip for chip in chips if chip.vendor == vendor]
        variable = variable_of(vendor)
        if variable is None:
            if own:
                raise ConfigError(f"{own[0].name}: no variable is known that isolates chips of {vendor!r}")
            continue
        environment[variable] = ",".join(chip_number(chip.name) for chip in own)
        if vendor == "nvidia":
            environment |= _IN_PCI_ORDER
    return environment


def visible_chips(
    chips: Iterable[ChipCapability], environ: Mapping[str, str] = os.environ
) -> list[ChipCapability]:
    """Those of `chips` that this process may use itself.

    Raises `ConfigError` where a variable lists them otherwise than by number.
    """
    found = []
    for chip in chips:
        variable = None if chip.is_cpu else variable_of(chip.vendor)
        listed = None if variable is None else environ.get(variable)
        if listed is not None:
            numbers = [part.strip() for part in listed.split(",") if part.strip()]
            if not all(number.isascii() and number.lstrip("-").isdigit() for number in numbers):
                raise ConfigError(f"{variable}={listed}: list chips by number, as in {variable}=0,1")
            # CUDA uses those in front of the first number that is none of a chip
            numbers = numbers[: next((i for i, n in enumerate(numbers) if n.startswith("-")), None)]
            if chip_number(chip.name) not in numbers:
                continue
        found.append(chip)
    return found
