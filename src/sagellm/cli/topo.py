"""`sagellm topo`: the devices of a machine and how they are joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.cli._options import command, completing, flag
from sagellm.core.errors import ConfigError

if TYPE_CHECKING:
    from sagellm.core.protocols.topology import TopologyInfo

TABLES = ("matrix", "links")
FORMS = (*TABLES, "json", "dot")
_RECORDED_HELP = (
    "Read what was recorded on another machine, not this one; may be repeated. NAME: nvidia-smi, "
    "npu-smi, mx-smi, rocm-smi, hy-smi, cnmon, xpu-smi, mthreads-gmi, ibv_devinfo, hwloc (XML), "
    "p2pBandwidthLatencyTest, declared (JSON of this command)."
)
MAX_FILE_BYTES = 64 << 20


@command
def topo(
    form: str = flag(
        "--format -f FORM", "matrix, links, json or dot.", "matrix", autocompletion=completing(FORMS)
    ),
    recorded: list[str] | None = flag("NAME=FILE", _RECORDED_HELP),
    group: int | None = flag("SIZE", "Also name the SIZE accelerators for tensor parallelism."),
    route: str | None = flag("FROM:TO", "Also show the fastest path, as in cuda:0:nic:mlx5_0."),
    limit: float = flag("SECONDS", "Longest time of a command.", 5.0, min=0.1, max=600.0),
    picture: Path | None = flag("FILE", "Also draw it there: .svg, .png or .pdf; needs the extra plots."),
) -> None:
    """Show accelerators, NICs and NUMA nodes, and the links between them.

    Reads /sys and NVIDIA's library, and runs the vendors' commands that are on the path; one that hangs is
    given up after --limit. Then, for each accelerator, the nearest NICs and the NUMA node of its host memory.
    """
    from sagellm.comm.topology import placement, tables
    from sagellm.comm.topology.manager import SystemTopology

    show: Mapping[str, Callable[[TopologyInfo], str]] = {
        "matrix": tables.matrix, "links": tables.links_table, "json": tables.to_json, "dot": tables.dot,
    }  # fmt: skip
    if form not in show:
        raise ConfigError(f"--format {form}: {', '.join(FORMS)}")
    if form not in TABLES and (group, route) != (None, None):
        raise ConfigError(
            f"--format {form} prints nothing else: use --group and --route with {' or '.join(TABLES)}"
        )
    if picture is not None and not picture.suffix:
        raise ConfigError(f"--picture {picture}: its suffix says the form, as in topology.svg")
    info = _recorded(recorded) if recorded else SystemTopology(limit_s=limit).detect()
    print(show[form](info))
    if form in TABLES:
        print(*placement.summary(info), sep="\n")
    if group is not None:
        print(_group(info, group))
    if route is not None:
        print(_route(info, route))
    if picture is not None:
        from sagellm.comm.topology.picture import draw

        try:
            draw(info, picture)
        except (ValueError, OSError) as error:
            raise ConfigError(f"--picture {picture}: {error}") from error


def _recorded(given: list[str]) -> TopologyInfo:
    from sagellm.comm.topology.manager import read_recorded

    texts = []
    for each in given:
        name, separator, file = each.partition("=")
        if not separator:
            raise ConfigError(f"--recorded {each}: give NAME=FILE, as in nvidia-smi=topo.txt")
        try:
            with Path(file).open("rb") as opened:
                data = opened.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"--recorded {each}: {error.strerror}") from error
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"--recorded {each}: larger than {MAX_FILE_BYTES >> 20} MB")
        texts.append((name, data.decode("utf-8", "replace")))
    try:
        return read_recorded(texts)
    except ValueError as error:
        raise ConfigError(f"--recorded: {error}") from error


def _group(info: TopologyInfo, size: int) -> str:
    from sagellm.comm.topology.placement import best_group

    try:
        found = best_group(info, size)
    except ValueError as error:
        raise ConfigError(f"--group {size}: {error}") from error
    if found is None:
        raise ConfigError(f"--group {size}: there are no {size} accelerators that are joined")
    if len(found.names) == 1:
        return f"group of 1: {found.names[0]}"
    rate = f"{found.bandwidth_bytes_per_s / 1e9:.0f} GB/s on the narrowest link (estimated)"
    return f"group of {size}: {', '.join(found.names)}: {rate}, on {found.num_nodes} NUMA node(s)"


def _route(info: TopologyInfo, text: str) -> str:
    """Names contain colons, so each split into two names is tried."""
    from sagellm.comm.topology.placement import best_path

    names = {device.name for device in info.devices}
    places = [i for i, letter in enumerate(text) if letter == ":" and {text[:i], text[i + 1 :]} <= names]
    if not places:
        raise ConfigError(f"--route {text}: name two devices of {', '.join(sorted(names))}")
    source, target = text[: places[0]], text[places[0] + 1 :]
    path = best_path(info, source, target)
    if path is None:
        return f"{source} to {target}: nothing joins them"
    hops = "".join(f" -{link.detail or link.kind.name}-> {link.target}" for link in path.links)
    rate = path.bandwidth_bytes_per_s / 1e9
    return f"{source}{hops}: {rate:.0f} GB/s, {path.latency_s * 1e6:.1f} us (estimated)"
