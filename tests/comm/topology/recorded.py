"""Texts in the forms that vendors' tools print, made for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

LEGEND = """
Legend:

  X    = Self
  SYS  = over the interconnect of NUMA nodes
  PIX  = over one PCIe switch at most
"""


def spaced_matrix(
    names: Sequence[str],
    label: Callable[[int, int], str],
    affinity: Mapping[str, Sequence[str]] | None = None,
    rows: Sequence[int] | None = None,
    tail: str = LEGEND,
) -> str:
    """Columns of a fixed width. `affinity`: cells by heading, one for each row that has them."""
    headings = "".join(f"{heading:16}" for heading in affinity or {})
    lines = [" " * 11 + "".join(f"{name:11}" for name in names) + headings]
    for i in range(len(names)) if rows is None else rows:
        cells = "".join(f"{'X' if i == j else label(i, j):11}" for j in range(len(names)))
        behind = "".join(f"{cells_[i]:16}" for cells_ in (affinity or {}).values() if i < len(cells_))
        lines.append(f"{names[i]:11}{cells}{behind}".rstrip())
    return "\n".join(lines) + "\n" + tail


def tabbed_matrix(names: Sequence[str], label: Callable[[int, int], str], behind: Sequence[str]) -> str:
    """As `nvidia-smi` writes to a terminal: tabs, an underlined heading, and empty cells.

    `behind`: what stands behind the cells of each row, with its tabs.
    """
    heading = "\t\x1b[4m" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    lines = [heading]
    for i, name in enumerate(names):
        cells = "\t".join(" X " if i == j else label(i, j) for j in range(len(names)))
        lines.append(f"{name}\t{cells}\t{behind[i]}")
    return "\n".join(lines) + "\n" + LEGEND


def gpus(count: int, word: str = "GPU") -> list[str]:
    return [f"{word}{i}" for i in range(count)]


def rocm_text(
    count: int,
    kind: Callable[[int, int], str],
    hops: Callable[[int, int], int],
    nodes: Sequence[int],
    word: str = "GPU",
    node_form: str = "{word}[{i}]          : (Topology) Numa Node: {node}",
) -> str:
    names = gpus(count, word)

    def block(title: str, cell: Callable[[int, int], object]) -> list[str]:
        lines = [f"{f' {title} ':=^80}", " " * 7 + "".join(f"{name:13}" for name in names)]
        for i in range(count):
            cells = "".join(f"{0 if i == j else cell(i, j)!s:13}" for j in range(count))
            lines.append(f"{names[i]:7}{cells}".rstrip())
        return [*lines, ""]

    lines = [f"{' ROCm System Management Interface ':=^80}", "WARNING: a device is in a low-power state", ""]
    lines += block("Weight between two GPUs", lambda i, j: 15 * hops(i, j))
    lines += block("Hops between two GPUs", hops)
    lines += block("Link Type between two GPUs", kind)
    lines.append(f"{' Numa Nodes ':=^80}")
    for i, node in enumerate(nodes):
        lines.append(node_form.format(word=word, i=i, node=node))
        lines.append(node_form.format(word=word, i=i, node=node).replace("Node:", "Affinity:"))
    return "\n".join([*lines, f"{' End of ROCm SMI Log ':=^80}"])
