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
    """What the code has run on: the chip, its simulator, or an emulated link."""

    HARDWARE = "hardware"
    VENDOR_SIMULATOR = "vendor_simulator"
    EMULATION = "emulation"


@dataclass(frozen=True, slots=True)
class InterconnectInfo:
    """Known figures of an interconnect. The vendor's figures are named claims: we have not measured them."""

    name: str
    vendor: str
    maturity: Maturity
    claimed_bandwidth_bytes_per_s: float
    claimed_latency_s: float
    device_type: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether the interconnect can be used here. If not, `reason` names the missing driver, package or
    device."""

    usable: bool
    reason: str = ""


class DomesticCommBackend(CommBackendProtocol, Protocol):
    """Collectives over one maker's interconnect."""

    info: InterconnectInfo

    @staticmethod
    def available() -> Availability:
        """Looks, loads no driver, and never raises. A constructor on a machine where this is not usable
        raises `MissingExtraError` or `SageError` with the same reason."""
