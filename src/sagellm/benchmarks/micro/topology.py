"""`sagellm bench micro topology`: reading topologies, and choosing by them.

Section d: this machine. Section r: texts of hosts with `devices` accelerators and as many NICs, in the form
of each kind of source. Section p: a group of half the accelerators, and a path.
"""

from __future__ import annotations

from collections.abc import Callable

from sagellm.benchmarks.micro.cases import MicroBenchCell, MicroBenchmark, Recipe, TimedOperation, timed
from sagellm.comm.topology.manager import SystemTopology, read_recorded
from sagellm.comm.topology.placement import best_group, best_path
from sagellm.core.errors import UnknownNameError

VARIANT = "system"
PER_SWITCH, PER_NODE = 2, 4


def _check(name: str) -> None:
    if name != VARIANT:
        raise UnknownNameError(f"no topology manager {name!r}: there is {VARIANT}")


def matrix_text(count: int) -> str:
    """As `nvidia-smi topo -m` prints it."""
    names = [f"GPU{i}" for i in range(count)] + [f"NIC{i}" for i in range(count)]

    def label(i: int, j: int) -> str:
        if i == j:
            return " X "
        if i < count and j < count:
            return "NV18"
        return (
            "PIX"
            if i % count == j % count
            else "NODE"
            if i % count // PER_NODE == j % count // PER_NODE
            else "SYS"
        )

    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    for i, name in enumerate(names):
        behind = f"\t0-47\t{i // PER_NODE}\t\tN/A" if i < count else "\t\t\t"
        lines.append("\t".join([name, *(label(i, j) for j in range(2 * count))]) + behind)
    return "\n".join([*lines, "", "Legend:", ""])


def rocm_text(count: int) -> str:
    """As `rocm-smi --showtopo` prints it."""
    names = [f"GPU{i}" for i in range(count)]
    lines = []
    for title, cell in (("Hops between two GPUs", "1"), ("Link Type between two GPUs", "XGMI")):
        lines += [f"=== {title} ===", "   ".join(["", *names])]
        lines += ["   ".join([name, *("0" if name == other else cell for other in names)]) for name in names]
    lines += [f"GPU[{i}]  : (Topology) Numa Node: {i // PER_NODE}" for i in range(count)]
    return "\n".join(lines)


def hwloc_text(count: int) -> str:
    """As `lstopo --of xml` writes it: two GPUs and their NICs below a switch."""
    text = []
    for node in range((count + PER_NODE - 1) // PER_NODE):
        memory = f'<object type="NUMANode" os_index="{node}" cpuset="0x000000ff" local_memory="1"/>'
        text.append(f'<object type="Package">{memory}')
        for switch in range(node * PER_NODE, min(count, (node + 1) * PER_NODE), PER_SWITCH):
            text.append(f'<object type="Bridge" bridge_pci="0000:[{switch:02x}-{switch + 1:02x}]">')
            text.append(f'<object type="Bridge" pci_busid="{switch:04x}:00:01.0">')
            for i in range(switch, min(count, switch + PER_SWITCH)):
                kinds = (("0302 [10de:2330]", ""), ("0207 [15b3:1021]", f"mlx5_{i}"))
                for function, (kind, name) in enumerate(kinds):
                    device = f'<object type="OSDev" osdev_type="3" name="{name}"/>' if name else ""
                    text.append(
                        f'<object type="PCIDev" pci_busid="{i:04x}:01:00.{function}" '
                        f'pci_type="{kind} [0000:0000] 00">{device}</object>'
                    )
            text.append("</object></object>")
        text.append("</object>")
    return f'<topology version="2.0"><object type="Machine">{"".join(text)}</object></topology>'


def _detect(cell: MicroBenchCell, calls: int) -> TimedOperation:
    manager = SystemTopology()
    return TimedOperation(run=lambda _: manager.detect())


def _reading(name: str, text_of: Callable[[int], str]) -> Callable[[MicroBenchCell, int], TimedOperation]:
    def build(cell: MicroBenchCell, calls: int) -> TimedOperation:
        text = text_of(cell.size)
        return TimedOperation(run=lambda _: read_recorded([(name, text)]))

    return build


def _group(cell: MicroBenchCell, calls: int) -> TimedOperation:
    info = read_recorded([("nvidia-smi", matrix_text(cell.size))])
    return TimedOperation(run=lambda _: best_group(info, cell.size // 2))


def _path(cell: MicroBenchCell, calls: int) -> TimedOperation:
    info = read_recorded([("nvidia-smi", matrix_text(cell.size))])
    return TimedOperation(run=lambda _: best_path(info, "cuda:0", f"nic:NIC{cell.size - 1}"))


BENCHMARK = MicroBenchmark(
    "topology",
    lambda: (VARIANT,),
    _check,
    {
        "d": timed("d", Recipe("detect this machine", _detect, "one_machine", calls=1)),
        "r": timed(
            "r",
            Recipe("read a matrix", _reading("nvidia-smi", matrix_text), "devices", calls=1),
            Recipe("read ROCm's blocks", _reading("rocm-smi", rocm_text), "devices", calls=1),
            Recipe("read hwloc's XML", _reading("hwloc", hwloc_text), "devices", calls=1),
        ),
        "p": timed(
            "p",
            Recipe("best group of half", _group, "devices", calls=1),
            Recipe("best path to the farthest NIC", _path, "devices", calls=1),
        ),
    },
)
