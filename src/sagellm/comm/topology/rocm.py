"""Output of `rocm-smi --showtopo`, which `hy-smi --showtopo` prints too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache, partial

from sagellm.comm.topology.estimates import of_label, pcie
from sagellm.comm.topology.tools import Tool
from sagellm.core.protocols.topology import Confidence, Device, Link, LinkKind, TopologyInfo

_NODE = re.compile(r"\s*[A-Z]+\s*\[?(\d+)\]?\s*:\s*\(Topology\) Numa Node:?\s*(-?\d+)\s*", re.ASCII)
PCIE = "PCIE"
HOPS, LINK_TYPE = "hops between two", "link type between two"


def parse_rocm(text: str, tool: Tool) -> TopologyInfo:
    """Devices, links and NUMA nodes.

    A path of several hops gets the bandwidth of one hop and the latency of all. 'PCIE' says nothing about
    bridges: it is `SYS` between NUMA nodes, and assumed to be `NODE` within one. Raises `ValueError` where
    the block of link types is missing, or a row is shorter than its heading.
    """
    blocks = _blocks(text)
    types = next((rows for title, rows in blocks.items() if title.startswith(LINK_TYPE)), None)
    if not types:
        raise ValueError(f"no block 'Link Type between two ...' in the output of {tool.name}")
    hops = next((rows for title, rows in blocks.items() if title.startswith(HOPS)), {})
    nodes = {int(match[1]): int(match[2]) for line in text.splitlines() if (match := _NODE.fullmatch(line))}
    devices, missing = [], dict[str, str]()
    for number in types:
        node = nodes.get(number, -1)
        name = f"{tool.prefix}:{number}"
        devices.append(Device(name, tool.kind, tool.vendor, numa_node=node if node >= 0 else None))
    node_of = {device.name: device.numa_node for device in devices}
    links = tuple(_links(types, hops, node_of, tool, missing))
    return TopologyInfo(tuple(devices), links, missing)


def _blocks(text: str) -> dict[str, dict[int, dict[int, str]]]:
    """Cells by title, row and column. Only blocks with a heading of devices have rows."""
    blocks: dict[str, dict[int, dict[int, str]]] = {}
    rows: dict[int, dict[int, str]] = {}
    columns: list[int] = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith("="):
            rows, columns = blocks.setdefault(line.strip("= \t").lower(), {}), []
            continue
        numbers = [_number(word) for word in words]
        if words and None not in numbers:
            columns = [number for number in numbers if number is not None]
        elif words and columns and (number := _number(words[0])) in columns and number is not None:
            if len(words) - 1 != len(columns):
                raise ValueError(f"row {words[0]} has {len(words) - 1} cells for {len(columns)} columns")
            rows[number] = dict(zip(columns, words[1:], strict=True))
    return blocks


def _number(word: str) -> int | None:
    """Of a device's name: letters, then digits."""
    stem = word.rstrip("0123456789")
    return int(word[len(stem) :]) if stem.isalpha() and stem.isupper() and stem != word else None


def _links(
    types: Mapping[int, Mapping[int, str]],
    hops: Mapping[int, Mapping[int, str]],
    node_of: Mapping[str, int | None],
    tool: Tool,
    missing: dict[str, str],
) -> Iterator[Link]:
    confidence = Confidence.ASSUMED if tool.is_assumed else Confidence.REPORTED
    estimate = cache(partial(of_label, own=tool.labels))
    for row, cells in types.items():
        for column, label in cells.items():
            if row == column or column not in types:
                continue
            found = estimate(label)
            if found is None:
                missing[f"{tool.name}: {label}"] = "not a word for a link that is known here"
                continue
            count = hops.get(row, {}).get(column, "1")
            num_hops = int(count) if count.isdecimal() and 0 < int(count) <= 64 else 1
            ends = f"{tool.prefix}:{row}", f"{tool.prefix}:{column}"
            sure = confidence
            if label == PCIE:
                nodes = {node_of[end] for end in ends}
                found = pcie(LinkKind.SYS if len(nodes) == 2 else LinkKind.NODE)
                sure = Confidence.ASSUMED if None in nodes or len(nodes) == 1 else confidence
            yield Link(
                *ends, found.kind, found.bandwidth_bytes_per_s, num_hops * found.latency_s, tool.provenance,
                sure, detail=label if num_hops == 1 else f"{label} x{num_hops}",
            )  # fmt: skip
