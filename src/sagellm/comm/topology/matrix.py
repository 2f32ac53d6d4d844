"""Matrices of `nvidia-smi topo -m` and the tools that print the same form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from sagellm.comm.topology.estimates import PCIE_LABELS, of_label
from sagellm.comm.topology.tools import Tool
from sagellm.core.protocols.topology import Confidence, Device, DeviceKind, Link, TopologyInfo

MAX_DEVICES = 256
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_AFFINITY = re.compile(r"(?:CPU|NUMA|Node) Affinity|GPU NUMA ID")
_CPUS = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*", re.ASCII)
_FIRST = re.compile(r"\d+")
_LEGEND = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)\s*", re.ASCII)
SELF, UNKNOWN = ("X",), ("NA", "N/A", "-")
_CELLS = {*SELF, *UNKNOWN, *PCIE_LABELS}
"""Words that stand in rows and not in a heading."""


@dataclass(slots=True)
class _Row:
    """A row of the matrix: its cells, and what stands behind them, by heading."""

    name: str
    cells: list[str]
    affinity: dict[str, str] = field(default_factory=dict)
    is_ambiguous: bool = False


def parse_matrix(text: str, tool: Tool) -> TopologyInfo:
    """Devices and links of a tool's output.

    Raises `ValueError` for text without a matrix, and for a row that has fewer cells than the heading.
    Columns without a row are devices, too: a container may see a part of the machine.
    """
    lines = _ESCAPES.sub("", text).splitlines()
    names, headings, first = _heading(lines, tool)
    legend = {match[1]: match[2] for line in lines if (match := _LEGEND.fullmatch(line))}
    rows = list(_rows(lines[first:], names, headings))
    if not rows:
        raise ValueError(f"the matrix of {tool.name} has a heading and no rows")
    device_of = {name: _device_name(name, tool, legend) for name in names}
    by_name = {row.name: row for row in rows}
    devices = [_device(name, device_of[name], by_name.get(name), tool) for name in names]
    missing: dict[str, str] = {}
    if unclear := [row.name for row in rows if row.is_ambiguous]:
        missing[f"{tool.name}: affinity"] = f"the CPUs of {', '.join(unclear)} cannot be told from the rest"
    links = dict(_links(rows, names, device_of, tool, missing))
    return TopologyInfo(tuple(devices), tuple(links.values()), missing)


def _heading(lines: Sequence[str], tool: Tool) -> tuple[list[str], list[str], int]:
    """Names of the columns, headings behind them, number of the next line."""
    for number, line in enumerate(lines):
        match = _AFFINITY.search(line)
        names = (line[: match.start()] if match else line).split()
        if not names or not _number(names[0], tool) or not set(names).isdisjoint(_CELLS):
            continue
        if len(set(names)) < len(names) or len(names) > MAX_DEVICES:
            raise ValueError(f"the matrix of {tool.name} names a column twice, or has over {MAX_DEVICES}")
        return names, _AFFINITY.findall(line), number + 1
    rows = " or ".join(f"{row}0" for row in tool.rows)
    raise ValueError(f"no matrix of {tool.name}: no line of columns {rows}, ...")


def _rows(lines: Sequence[str], names: Sequence[str], headings: Sequence[str]) -> Iterator[_Row]:
    known, seen = set(names), set[str]()
    for line in lines:
        words = line.split(maxsplit=len(names) + 1)
        if not words or words[0] not in known:
            if seen and line.strip():
                return  # the legend, in which the words of columns come again
            continue
        if words[0] in seen:
            raise ValueError(f"the matrix has two rows {words[0]}")
        if len(words) <= len(names):
            raise ValueError(f"row {words[0]} has {len(words) - 1} cells for {len(names)} columns")
        seen.add(words[0])
        row = _Row(words[0], words[1 : len(names) + 1])
        rest = _behind(line, words[: len(names) + 1])
        row.affinity, row.is_ambiguous = _by_heading(rest, headings)
        yield row


def _behind(line: str, words: Sequence[str]) -> str:
    """The line behind its first words."""
    end = 0
    for word in words:
        end = line.index(word, end) + len(word)
    return line[end:]


def _by_heading(rest: str, headings: Sequence[str]) -> tuple[dict[str, str], bool]:
    """Cells behind the matrix, and whether they could not be told apart.

    With tabs, an empty cell is seen. With spaces, a row with fewer cells than headings is read by form: a
    list or range is of CPUs, a number alone is of a NUMA node, if there is a heading for it.
    """
    if not headings or not rest.strip():
        return {}, False
    cells = [cell.strip() for cell in rest.split("\t")]
    if "\t" in rest and len(cells) > len(headings):
        return dict(zip(headings, cells[1:], strict=False)), False
    cells = rest.split()
    if len(cells) >= len(headings):
        return dict(zip(headings, cells, strict=False)), False
    found: dict[str, str] = {}
    nodes = [heading for heading in headings if heading != "CPU Affinity"]
    for cell in cells:
        if "-" in cell or "," in cell:
            found["CPU Affinity"] = cell
        elif cell.isdecimal() and nodes:
            found.setdefault(nodes[0], cell)
    # A list of CPUs whose node is not beside it may have the node's digits at its end.
    is_ambiguous = "CPU Affinity" in found and any(h != "GPU NUMA ID" and h not in found for h in nodes)
    return ({}, True) if is_ambiguous else (found, False)


def _number(name: str, tool: Tool) -> str:
    """The digits in a name of the vendor's devices; empty for another device."""
    stem = name.rstrip("0123456789")
    return name[len(stem) :] if stem in tool.rows else ""


def _device_name(name: str, tool: Tool, legend: Mapping[str, str]) -> str:
    number = _number(name, tool)
    return f"{tool.prefix}:{int(number)}" if number else f"nic:{legend.get(name, name)}"


def _device(name: str, full_name: str, row: _Row | None, tool: Tool) -> Device:
    if not _number(name, tool):
        return Device(full_name, DeviceKind.NIC)
    affinity = row.affinity if row else {}
    # Of several nodes the first has the CPUs; the others are memory of GPUs.
    node = _FIRST.match(affinity.get("NUMA Affinity", affinity.get("Node Affinity", "")))
    cpus = affinity.get("CPU Affinity", "")
    return Device(
        full_name,
        tool.kind,
        tool.vendor,
        numa_node=int(node[0]) if node else None,
        cpus=cpus if _CPUS.fullmatch(cpus) else "",
    )


def _links(
    rows: Sequence[_Row],
    names: Sequence[str],
    device_of: Mapping[str, str],
    tool: Tool,
    missing: dict[str, str],
) -> Iterator[tuple[tuple[str, str], Link]]:
    """One for each cell; two where the column has no row."""
    confidence = Confidence.ASSUMED if tool.is_assumed else Confidence.REPORTED
    provenance = tool.provenance
    estimate = cache(partial(of_label, own=tool.labels))
    have_rows = {row.name for row in rows}
    for row in rows:
        for column, label in zip(names, row.cells, strict=True):
            if column == row.name or label in SELF or label in UNKNOWN:
                continue
            found = estimate(label)
            if found is None:
                missing[f"{tool.name}: {label}"] = "not a word for a link that is known here"
                continue
            pairs = [(row.name, column)] if column in have_rows else [(row.name, column), (column, row.name)]
            for source, target in pairs:
                key = device_of[source], device_of[target]
                yield key, Link(
                    *key, found.kind, found.bandwidth_bytes_per_s, found.latency_s, provenance, confidence,
                    detail=label,
                )  # fmt: skip
