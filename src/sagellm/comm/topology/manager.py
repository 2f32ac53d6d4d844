"""`SystemTopology`: asks every source about this machine, or reads what was recorded on another."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path

from sagellm.comm.topology.commands import LIMIT_S, CommandError, run_command
from sagellm.comm.topology.hwloc import parse_hwloc
from sagellm.comm.topology.matrix import parse_matrix
from sagellm.comm.topology.measured import TEST, parse_p2p, with_measured
from sagellm.comm.topology.nvml import PROVENANCE as NVML
from sagellm.comm.topology.nvml import read_nvml
from sagellm.comm.topology.rdma import ACTIVE, INFINIBAND, parse_ibv_devinfo
from sagellm.comm.topology.rdma import COMMAND as IBV_DEVINFO
from sagellm.comm.topology.rocm import parse_rocm
from sagellm.comm.topology.sysfs import read_sysfs
from sagellm.comm.topology.tables import from_json
from sagellm.comm.topology.tools import TOOLS, OutputForm, Tool, tool_named
from sagellm.core.errors import UnknownNameError
from sagellm.core.protocols.topology import Device, DeviceKind, Link, TopologyInfo

RDMA, HWLOC, DECLARED = IBV_DEVINFO[0], "hwloc", "declared"
RECORDED = (*(tool.name for tool in TOOLS), RDMA, HWLOC, TEST, DECLARED)
"""What a recording can be of."""
Run = Callable[[Sequence[str], float], str]


class SystemTopology:
    """Implements `TopologyManager` for this machine.

    `root` is where `/sys` is. Commands run at once, each for `limit_s` at most; `find` says where a command
    is, or None. `nvml`: the module of NVIDIA's library, which has as long; None for none.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        limit_s: float = LIMIT_S,
        find: Callable[[str], str | None] = shutil.which,
        run: Run = run_command,
        nvml: str | None = "pynvml",
    ) -> None:
        self._root, self._limit_s, self._find, self._run, self._nvml = root, limit_s, find, run, nvml

    def detect(self) -> TopologyInfo:
        system = read_sysfs(self._root)
        missing: dict[str, str] = {}
        vendors = {device.vendor for device in system.devices}
        tools = [tool for tool in TOOLS if self._is_to_run(tool, vendors, missing)]
        commands = [tool.command for tool in tools]
        if self._find(RDMA):
            commands.append(IBV_DEVINFO)
        parts: list[TopologyInfo] = []
        with ThreadPoolExecutor(max(1, len(commands))) as threads:
            outputs = threads.map(self._output, commands)
            if "nvidia" in vendors or self._find("nvidia-smi"):
                parts += self._ask_nvml(missing)
            for command, output in zip(commands, outputs, strict=True):
                parts += self._parsed(command[0], output, missing)
        return merged([*parts, aligned(system, parts, missing)], missing)

    def _is_to_run(self, tool: Tool, vendors: set[str], missing: dict[str, str]) -> bool:
        """Whether a tool is here. One that is missing is named if its chips are there."""
        if self._find(tool.command[0]):
            return True
        if tool.vendor in vendors:
            missing[tool.name] = "the command is not on the path"
        return False

    def _output(self, command: Sequence[str]) -> str | CommandError:
        try:
            return self._run(command, self._limit_s)
        except CommandError as error:
            return error

    def _parsed(
        self, name: str, output: str | CommandError, missing: dict[str, str]
    ) -> Iterable[TopologyInfo]:
        if isinstance(output, CommandError):
            missing[name] = str(output)
            return ()
        try:
            return (parse_output(name, output),)
        except ValueError as error:
            missing[name] = f"not understood: {error}"
            return ()

    def _ask_nvml(self, missing: dict[str, str]) -> Sequence[TopologyInfo]:
        """What NVIDIA's library says, if it says it in time: a driver may hang."""
        found: list[TopologyInfo] = []
        if self._nvml is None:
            return found

        def ask(name: str) -> None:
            try:
                found.append(read_nvml(import_module(name)))
            except ImportError:
                missing[NVML] = "pip install nvidia-ml-py"
            except Exception as error:  # noqa: BLE001 - the library's own, and whatever an old one lacks
                missing[NVML] = str(error) or repr(error)

        missing[NVML] = f"no answer within {self._limit_s:g} s"
        thread = threading.Thread(target=ask, args=(self._nvml,), daemon=True)
        thread.start()
        thread.join(self._limit_s)
        if found:
            missing.pop(NVML, None)
        return list(found)


def read_recorded(recordings: Iterable[tuple[str, str]]) -> TopologyInfo:
    """The topology of another machine, from texts that were recorded there.

    Each has a name of `RECORDED`. Raises `UnknownNameError` for another name, and `ValueError` for a text
    that is not understood.
    """
    parts: list[TopologyInfo] = []
    trees, measured = list[TopologyInfo](), []
    for name, text in recordings:
        if name not in RECORDED:
            raise UnknownNameError(f"no recorded topology {name!r}: there are {', '.join(RECORDED)}")
        if name == TEST:
            measured.append(parse_p2p(text))
        else:
            (trees if name == HWLOC else parts).append(parse_output(name, text))
    missing: dict[str, str] = {}
    info = merged([*parts, *(aligned(tree, parts, missing) for tree in trees)], missing)
    for figures in measured:
        info = with_measured(info, figures)
    return info


def parse_output(name: str, text: str) -> TopologyInfo:
    """What a source of `RECORDED` printed. Raises `ValueError` where it is not understood."""
    if name == HWLOC:
        return parse_hwloc(text)
    if name == DECLARED:
        return from_json(text)
    if name == RDMA:
        return parse_ibv_devinfo(text)
    tool = tool_named(name)
    if tool is None:
        raise ValueError(f"no source of topologies is named {name!r}")
    return parse_rocm(text, tool) if tool.form is OutputForm.ROCM else parse_matrix(text, tool)


def aligned(tree: TopologyInfo, parts: Sequence[TopologyInfo], missing: dict[str, str]) -> TopologyInfo:
    """A PCI tree whose accelerators have the names that vendors' sources give them.

    They are joined by PCI id where a source says it. Without ids they are joined by their order, if the tool
    numbers by PCI id and sees as many; else the tree's are left out, since facts would be about another
    device: a container sees all of `/sys` and some of the GPUs. A vendor without a source keeps its own.
    """
    names: dict[str, str] = {}
    for vendor in {device.vendor for device in tree.devices} - {""}:
        own = [device for device in tree.devices if device.vendor == vendor]
        theirs = {d.name: d for part in reversed(parts) for d in part.devices if d.vendor == vendor}
        by_pci = {device.pci: name for name, device in theirs.items() if device.pci}
        is_ordered = any(tool.vendor == vendor and tool.is_in_pci_order for tool in TOOLS)
        if by_pci:
            names.update({device.name: by_pci[device.pci] for device in own if device.pci in by_pci})
        elif not theirs or (is_ordered and len(theirs) == len(own)):
            names.update({device.name: device.name for device in own})
        else:
            missing[f"PCI tree: {vendor}"] = (
                f"which of its {len(own)} chips are the {len(theirs)} that the tool sees is not known"
            )
    others = {device.name: device.name for device in tree.devices if not device.vendor}
    names |= others
    devices = tuple(replace(d, name=names[d.name]) for d in tree.devices if d.name in names)
    links = tuple(
        replace(link, source=names[link.source], target=names[link.target])
        for link in tree.links
        if link.source in names and link.target in names
    )
    return TopologyInfo(devices, links, tree.missing)


def merged(parts: Sequence[TopologyInfo], missing: Mapping[str, str]) -> TopologyInfo:
    """One topology of several sources.

    Of a device, each figure is from the first source that has it. Of a link, the one that is known best
    counts, then the nearest kind: a PCI tree does not see NVLinks. There is always a CPU.
    """
    devices: dict[str, Device] = {}
    links: dict[tuple[str, str], Link] = {}
    notes = dict(missing)
    for part in parts:
        notes.update(part.missing)
        for device in part.devices:
            known = devices.get(device.name)
            devices[device.name] = device if known is None else _filled(known, device)
        for link in part.links:
            pair = link.source, link.target
            if pair not in links or _order(link) < _order(links[pair]):
                links[pair] = link
    if not any(device.kind is DeviceKind.CPU for device in devices.values()):
        nodes = {device.numa_node for device in devices.values()} - {None} or {None}
        cpus = [Device(f"cpu:{node or 0}", DeviceKind.CPU, numa_node=node) for node in nodes]
        devices.update({cpu.name: cpu for cpu in cpus})
    order = list(DeviceKind)
    everything = sorted(
        devices.values(), key=lambda device: (order.index(device.kind), _natural(device.name))
    )
    return TopologyInfo(tuple(_settled(everything)), tuple(links.values()), notes)


def _order(link: Link) -> tuple[int, int, int]:
    return link.confidence.rank, link.kind.distance, link.figures.rank


def _filled(known: Device, other: Device) -> Device:
    """`known`, with what only `other` says."""
    empty = [each.name for each in fields(known) if _is_empty(each.name, getattr(known, each.name))]
    found = {name: getattr(other, name) for name in empty}
    return replace(known, **found) if found else known


def _is_empty(name: str, value: object) -> bool:
    return value is None or value == "" or (name == "memory_bytes" and value == 0)


def _settled(devices: Sequence[Device]) -> Iterable[Device]:
    """Which NICs are of a fabric, once all is known of all.

    A port that is down is none; nor is Ethernet beside an active InfiniBand port: it is the host's network.
    """
    has_infiniband = any(device.link_layer == INFINIBAND and device.state == ACTIVE for device in devices)
    for device in devices:
        is_down = device.state not in ("", ACTIVE)
        is_fabric = device.is_fabric
        if is_down or (has_infiniband and device.link_layer == "Ethernet"):
            is_fabric = False
        yield device if is_fabric is device.is_fabric else replace(device, is_fabric=is_fabric)


def _natural(name: str) -> tuple[str, int, str]:
    """Sorts 'cuda:10' behind 'cuda:9'."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :][-9:]
    return stem, int(digits or "-1"), name
