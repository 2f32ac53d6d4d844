"""Output of CUDA's sample `p2pBandwidthLatencyTest`: measured figures of links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from sagellm.core.protocols.topology import Confidence, Link, LinkKind, TopologyInfo

TEST = "p2pBandwidthLatencyTest"
_BANDWIDTH, _LATENCY = "Unidirectional P2P=Enabled Bandwidth", "P2P=Enabled Latency"


def parse_p2p(text: str) -> dict[tuple[str, str], tuple[float, float | None]]:
    """Bytes/s and seconds from one CUDA device to another.

    Raises `ValueError` without a matrix of unidirectional bandwidth, P2P enabled. Figures that are not above
    zero are left out. The test numbers devices as CUDA does: set CUDA_DEVICE_ORDER=PCI_BUS_ID for it.
    """
    bandwidth, latency = _matrix(text, _BANDWIDTH), _matrix(text, _LATENCY)
    if not bandwidth:
        raise ValueError(f"no matrix 'Unidirectional P2P=Enabled Bandwidth' in the output of {TEST}")
    return {
        pair: (rate * 1e9, latency[pair] * 1e-6 if pair in latency else None)
        for pair, rate in bandwidth.items()
        if rate > 0 and pair[0] != pair[1]
    }


def with_measured(
    info: TopologyInfo, figures: Mapping[tuple[str, str], tuple[float, float | None]]
) -> TopologyInfo:
    """The same topology, with measured figures where there are any.

    A pair without a link gets one of the farthest kind: bytes were copied, and no source says how.
    """
    names = {device.name for device in info.devices}
    missing = dict(info.missing)
    if unknown := sorted({name for pair in figures for name in pair} - names):
        missing[TEST] = f"figures of {', '.join(unknown)}, which no other source names, are left out"
    links = {(link.source, link.target): link for link in info.links}
    for pair, (rate, latency_s) in figures.items():
        if not names.issuperset(pair):
            continue
        link = links.get(pair) or Link(*pair, LinkKind.SYS, rate, 0.0, TEST, Confidence.MEASURED)
        links[pair] = replace(
            link,
            bandwidth_bytes_per_s=rate,
            latency_s=link.latency_s if latency_s is None else latency_s,
            figures=Confidence.MEASURED,
        )
    return replace(info, links=tuple(links.values()), missing=missing)


def _matrix(text: str, title: str) -> dict[tuple[str, str], float]:
    lines = iter(text.splitlines())
    for line in lines:
        if line.strip().startswith(title):
            return dict(_cells(lines))
    return {}


def _cells(lines: Iterator[str]) -> Iterator[tuple[tuple[str, str], float]]:
    columns = next(lines, "").split()[1:]
    for line in lines:
        words = line.split()
        if len(words) != len(columns) + 1 or not words[0].isdecimal():
            return
        for column, word in zip(columns, words[1:], strict=True):
            try:
                figure = float(word)
            except ValueError:
                continue
            if figure < float("inf"):
                yield (f"cuda:{words[0]}", f"cuda:{column}"), figure
