"""Which vendor's chips a torch device type stands for on this machine."""

from __future__ import annotations

from collections.abc import Iterator

from sagellm.core.protocols.interconnect import DomesticCommBackend
from sagellm.core.registry import registry


def interconnects() -> Iterator[tuple[str, DomesticCommBackend]]:
    """Every vendor's, by name: ours, and those of other packages (`sagellm.interconnects`). No emulation."""
    found = registry("interconnect")
    for name in found.names():
        made: DomesticCommBackend = found.create(name)
        if made.info.device_type != "cpu":
            yield name, made


def interconnect_for(device_type: str) -> DomesticCommBackend | None:
    """The vendor whose devices torch calls so, the available one before others.

    Several vendors' torch says "cuda"; None for that name means NVIDIA or AMD, which need no vendor's module.
    """
    known = [made for _, made in interconnects() if made.info.device_type == device_type]
    usable = [made for made in known if made.is_available().has_device]
    return next(iter(usable or (() if device_type == "cuda" else known)), None)
