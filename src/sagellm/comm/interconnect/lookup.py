"""Which vendor's chips a torch device type stands for on this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from sagellm.core.protocols.interconnect import DomesticCommBackend
from sagellm.core.registry import registry

log = logging.getLogger("sagellm.devices")


def interconnects() -> Iterator[tuple[str, DomesticCommBackend]]:
    """Every vendor's, by name: ours, and those of other packages (`sagellm.interconnects`). No emulation.

    One of another package that cannot be loaded is named in a warning.
    """
    found = registry("interconnect")
    for name in found.names():
        try:
            made: DomesticCommBackend = found.create(name)
            device_type, _ = made.info.device_type, made.is_available()
        except Exception as error:  # noqa: BLE001 - no package may keep the engine from other devices
            log.warning("interconnect %r cannot be loaded: %s: %s", name, type(error).__name__, error)
            continue
        if device_type != "cpu":
            yield name, made


def interconnect_for(device_type: str) -> DomesticCommBackend | None:
    """The vendor whose devices torch calls so, the available one before others.

    Several vendors' torch says "cuda"; None for that name means NVIDIA or AMD, which need no vendor's module.
    """
    known = [made for _, made in interconnects() if made.info.device_type == device_type]
    present = [made for made in known if made.is_available().has_device]
    present.sort(key=lambda made: not made.is_available().usable)
    return next(iter(present or (() if device_type == "cuda" else known)), None)
