"""A topology as text: a matrix, JSON, Graphviz' DOT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json as from_json_text

from sagellm.core.protocols.topology import Confidence, Device, DeviceKind, Link, TopologyInfo

COLORS = {"nvlink": "#2e7d32", "vendor": "#2e7d32", "pix": "#1565c0", "pxb": "#1976d2", "phb": "#6d6d6d"}
FAR_COLOR = "#b0b0b0"
GB = 1e9


def to_json(info: TopologyInfo) -> str:
    """What `from_json` reads."""
    return TypeAdapter(TopologyInfo).dump_json(info, indent=2, exclude_defaults=True).decode()


def from_json(text: str) -> TopologyInfo:
    """A declared topology. Raises `ValueError` that names each wrong field."""
    try:
        info = TypeAdapter(TopologyInfo).validate_json(text)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}" for each in error.errors()[:5]
        )
        raise ValueError(f"the declared topology is wrong: {wrong}") from error
    _refuse_unknown(from_json_text(text))
    return info


def _refuse_unknown(given: object) -> None:
    """Raise `ValueError` for a field that no device or link has."""
    known = {"devices": Device, "links": Link}
    if not isinstance(given, dict):
        return
    for key, items in given.items():
        if key not in known:
            if key != "missing":
                raise ValueError(f"the declared topology is wrong: {key}: there are devices, links, missing")
            continue
        names = {each.name for each in fields(known[key])}
        for number, item in enumerate(items if isinstance(items, list) else ()):
            if isinstance(item, dict) and (odd := sorted(item.keys() - names)):
                known_names = ", ".join(sorted(names))
                raise ValueError(
                    f"the declared topology is wrong: {key}.{number}.{odd[0]}: there are {known_names}"
                )


def matrix(info: TopologyInfo) -> str:
    """Links between accelerators, NICs and NUMA nodes, then what the devices are.

    `?` stands behind a label that is assumed, `-` where no source joins two devices.
    """
    devices = sorted(info.devices, key=lambda device: device.kind is DeviceKind.CPU)
    names = [device.name for device in devices]
    labels = {
        (link.source, link.target): (link.detail or link.kind.name).replace(" ", "_")
        + ("?" if link.confidence is Confidence.ASSUMED else "")
        for link in info.links
    }
    rows = [["", *names]]
    rows += [
        [name, *("X" if name == other else labels.get((name, other), "-") for other in names)]
        for name in names
    ]
    facts = [["device", "NUMA", "CPUs", "PCI", "memory", "what"], *(_facts(device) for device in devices)]
    lines = [*_aligned(rows), "", *_aligned(facts)]
    lines += [f"not known: {source}: {reason}" for source, reason in info.missing.items()]
    return "\n".join(lines)


def links_table(info: TopologyInfo) -> str:
    """Each link with its estimates and its source."""
    rows = [["from", "to", "kind", "label", "GB/s", "us", "figures", "says"]]
    rows += [
        [
            link.source, link.target, link.kind.name, link.detail, f"{link.bandwidth_bytes_per_s / GB:.1f}",
            f"{link.latency_s * 1e6:.1f}", link.figures.value, f"{link.provenance} ({link.confidence.value})",
        ]
        for link in info.links
    ]  # fmt: skip
    return "\n".join(_aligned(rows))


def dot(info: TopologyInfo) -> str:
    """An undirected graph; NUMA nodes are boxes around their devices."""
    lines = ["graph topology {", "  node [shape=box, fontname=sans];"]
    nodes = sorted({device.numa_node for device in info.devices if device.numa_node is not None})
    for node in (None, *nodes):
        inside = [f"{_quoted(each.name)};" for each in info.devices if each.numa_node == node]
        if node is None:
            lines += [f"  {each}" for each in inside]
        else:
            lines += [f"  subgraph cluster_{node} {{ label={_quoted(f'NUMA node {node}')};"]
            lines += [f"    {each}" for each in inside] + ["  }"]
    lines += [f"  {edge}" for edge in _edges(info)]
    return "\n".join([*lines, "}"])


def _edges(info: TopologyInfo) -> Iterator[str]:
    done = set()
    for link in info.links:
        pair = frozenset((link.source, link.target))
        if pair in done:
            continue
        done.add(pair)
        label = _quoted(f"{link.detail or link.kind.name} {link.bandwidth_bytes_per_s / GB:.0f} GB/s")
        color = COLORS.get(link.kind.value, FAR_COLOR)
        yield f'{_quoted(link.source)} -- {_quoted(link.target)} [label={label}, color="{color}"];'


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _facts(device: Device) -> list[str]:
    what = [device.vendor, device.model, device.link_layer, device.state]
    if device.kind is DeviceKind.NIC and device.is_fabric is False:
        what.append("not for KV and collectives")
    node = "-" if device.numa_node is None else str(device.numa_node)
    memory = f"{device.memory_bytes / 2**30:.0f} GiB" if device.memory_bytes else "-"
    return [
        device.name,
        node,
        device.cpus or "-",
        device.pci or "-",
        memory,
        " ".join(filter(None, what)) or "-",
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
