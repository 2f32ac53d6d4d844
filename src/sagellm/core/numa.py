"""Keeps threads, and the memory that they write first, on a NUMA node.

Linux takes a page from the node of the CPU that first writes to it. So memory is near a device where threads
near it write first, which takes no privilege: containers commonly refuse mbind(2).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger("sagellm.numa")
ROOT = Path("/")


def node_of_pci(address: str, root: Path = ROOT) -> int | None:
    """The node of a PCI device ('0000:3b:00.0'), if the system names it."""
    text = _read(root / "sys/bus/pci/devices" / address / "numa_node")
    return int(text) if text.isdecimal() else None  # -1: the machine has one node, or does not say


def cpus_of_node(node: int, root: Path = ROOT) -> set[int]:
    """CPUs of a node. Empty for a node of memory alone, and where the system does not say."""
    return numbers_of(_read(root / f"sys/devices/system/node/node{node}/cpulist"))


def numbers_of(text: str) -> set[int]:
    """CPUs of a list as Linux writes it, as `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def stay_on_node(node: int | None, root: Path = ROOT) -> None:
    """Keep the calling thread on those CPUs of a node that it may use.

    Nothing changes without a node, where the thread may use none of its CPUs, and where the system refuses.
    """
    if node is None or not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    cpus = cpus_of_node(node, root) & allowed
    try:
        if cpus and cpus != allowed:
            os.sched_setaffinity(0, cpus)  # of this thread alone
    except OSError as error:
        log.debug("memory may lie far from the device on node %d: %s", node, error)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
