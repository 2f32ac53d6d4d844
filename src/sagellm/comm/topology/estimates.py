"""Estimated bandwidth and latency of links, by kind and label."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sagellm.core.protocols.topology import LinkKind

GB = 1e9
PCIE_EFFICIENCY = 0.83
"""Of a PCIe link's rate that one large copy reaches: 26.3 of 31.5 GB/s, measured on PCIe 4.0 x16."""
PCIE_GB_PER_S = 31.5
"""PCIe 4.0 x16, assumed where no source says a link's speed and width."""
NVLINK_GB_PER_S: Mapping[int, float] = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 14.0625, 6: 25.0, 7: 50.0}
"""One link and direction, by NVML's number of the version: 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0."""
ANY_NVLINK_GB_PER_S = 25.0
"""Where the version is unknown: `nvidia-smi topo` does not say it."""
_NVLINK = re.compile(r"NV(\d{1,3})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes/s of a large copy in one direction, seconds of an empty one."""

    kind: LinkKind
    bandwidth_bytes_per_s: float
    latency_s: float


LATENCY_S: Mapping[LinkKind, float] = {
    LinkKind.NVLINK: 1.1e-6,
    LinkKind.VENDOR: 1.15e-6,
    LinkKind.PIX: 1.2e-6,
    LinkKind.PXB: 1.25e-6,
    LinkKind.PHB: 1.3e-6,
    LinkKind.NODE: 1.35e-6,
    LinkKind.SYS: 1.4e-6,
    LinkKind.NETWORK: 5e-6,
}
"""1.2 to 1.4 us were measured between PCIe GPUs; the differences are made up, so that a nearer kind wins."""
SHARE_OF_PCIE: Mapping[LinkKind, float] = {
    LinkKind.PIX: 1.0,
    LinkKind.PXB: 0.99,
    LinkKind.PHB: 0.98,
    LinkKind.NODE: 0.97,
    LinkKind.SYS: 0.96,
}
"""Of what a PCIe link gives. Made up, so that a nearer kind wins: `NODE` and `SYS` were measured equal."""
NETWORK_GB_PER_S = 12.5
"""100 Gbit/s."""


def pcie(kind: LinkKind, link_gb_per_s: float = PCIE_GB_PER_S) -> Estimate:
    """A path over PCIe; the rate is of its slowest link, in one direction."""
    rate = link_gb_per_s * GB * PCIE_EFFICIENCY * SHARE_OF_PCIE[kind]
    return Estimate(kind, rate, LATENCY_S[kind])


def nvlink(num_links: int, version: int = 0) -> Estimate:
    """Bonded NVLinks. `version`: NVML's number; 0 where it is unknown."""
    rate = num_links * NVLINK_GB_PER_S.get(version, ANY_NVLINK_GB_PER_S) * GB * PCIE_EFFICIENCY
    return Estimate(LinkKind.NVLINK, rate, LATENCY_S[LinkKind.NVLINK])


def vendor_link(gb_per_s: float) -> Estimate:
    """A vendor's own link of that rate."""
    return Estimate(LinkKind.VENDOR, gb_per_s * GB, LATENCY_S[LinkKind.VENDOR])


def network() -> Estimate:
    return Estimate(LinkKind.NETWORK, NETWORK_GB_PER_S * GB, LATENCY_S[LinkKind.NETWORK])


PCIE_LABELS: Mapping[str, LinkKind] = {
    **{kind.name: kind for kind in SHARE_OF_PCIE},
    "SOC": LinkKind.SYS,  # the name of SYS in older drivers
}


def of_label(label: str, own: Mapping[str, Estimate]) -> Estimate | None:
    """The estimate for a cell of a matrix; None for an unknown word.

    `own`: labels of the vendor; one that ends with '#' is followed by a number of bonded links. Of several
    links in one cell ('MLK/MUL') the nearest counts.
    """
    found = [each for part in label.split("/") if (each := _of_word(part, own)) is not None]
    return min(found, key=lambda each: each.kind.distance, default=None)


def _of_word(word: str, own: Mapping[str, Estimate]) -> Estimate | None:
    if word in own:
        return own[word]
    if word in PCIE_LABELS:
        return pcie(PCIE_LABELS[word])
    if (match := _NVLINK.fullmatch(word)) and int(match[1]):
        return nvlink(int(match[1]))
    stem = word.rstrip("0123456789")
    count = word[len(stem) :]
    base = own.get(f"{stem}#")
    if base is None or not 0 < len(count) <= 3 or not int(count):
        return None
    return Estimate(base.kind, int(count) * base.bandwidth_bytes_per_s, base.latency_s)
