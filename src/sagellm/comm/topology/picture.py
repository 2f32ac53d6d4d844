"""A picture of a topology, with matplotlib."""

from __future__ import annotations

import math
from pathlib import Path

from sagellm.comm.topology.tables import COLORS, FAR_COLOR
from sagellm.core.errors import MissingExtraError
from sagellm.core.protocols.topology import DeviceKind, LinkKind, TopologyInfo

FILL = {DeviceKind.CPU: "#eeeeee", DeviceKind.NIC: "#fff3cd"}
ACCELERATOR_FILL = "#d7ecd9"


def draw(info: TopologyInfo, file: Path) -> None:
    """Write a picture; the suffix says the form ('.svg', '.png', '.pdf').

    Devices stand on a circle, by NUMA node; a line is thicker and greener the nearer two devices are.
    Paths between NUMA nodes are left out, so that the others can be seen. Raises `MissingExtraError` without
    matplotlib, and `ValueError` for a suffix that it does not know.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("a picture of a topology", "plots", "matplotlib") from error
    devices = sorted(info.devices, key=lambda each: (each.numa_node is None, each.numa_node or 0))
    turn = 2 * math.pi / max(1, len(devices))
    at = {each.name: (math.cos(i * turn), math.sin(i * turn)) for i, each in enumerate(devices)}
    size = max(6.0, 0.25 * len(devices))
    figure = Figure(figsize=(size, size))
    axes = figure.add_subplot()
    for link in info.links:
        if link.source < link.target and link.kind not in (LinkKind.SYS, LinkKind.NETWORK):
            xs, ys = zip(at[link.source], at[link.target], strict=True)
            width = max(0.4, 3.0 - 0.6 * link.kind.distance)
            axes.plot(xs, ys, color=COLORS.get(link.kind.value, FAR_COLOR), linewidth=width, zorder=1)
    for each in devices:
        fill = FILL.get(each.kind, ACCELERATOR_FILL)
        box = {"boxstyle": "round", "facecolor": fill, "edgecolor": "#555555"}
        axes.text(*at[each.name], each.name, ha="center", va="center", fontsize=8, bbox=box, zorder=2)
    axes.set_xlim(-1.2, 1.2)
    axes.set_ylim(-1.2, 1.2)
    axes.set_axis_off()
    figure.savefig(file, bbox_inches="tight")
