"""Contract of interconnects of other chips (Ascend HCCS, Cambricon MLU-Link, Hygon xGMI, ...).

One file per interconnect; each is a `CommBackendProtocol` that also says whether it can run here and how far
it has been tried. Code for a chip that none of us has had in hand says so in its `maturity`, and its
emulation, which runs anywhere, keeps the same contract tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from sagellm.core.protocols.collectives import CommBackendProtocol


class Maturity(str, Enum):
    """What the code has run on: the chip, the maker's simulator, or our emulation of its link alone."""

    HARDWARE = "hardware"
    VENDOR_SIMULATOR = "vendor_simulator"
    EMULATION = "emulation"


@dataclass(frozen=True, slots=True)
class InterconnectInfo:
    """What is known of an interconnect. Figures of the maker are called claims: nobody here measured them."""

    name: str
    vendor: str
    maturity: Maturity
    claimed_bandwidth_bytes_per_s: float
    claimed_latency_s: float
    device_type: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether it can run here; if not, `reason` names the driver, package or device that is missing."""

    usable: bool
    reason: str = ""


class DomesticCommBackend(CommBackendProtocol, Protocol):
    """Collectives over one maker's interconnect."""

    info: InterconnectInfo

    @staticmethod
    def available() -> Availability:
        """Looks, loads no driver, and never raises. A constructor on a machine where this is not usable
        raises `MissingExtraError` or `SageError` with the same reason.
        """
        ...
