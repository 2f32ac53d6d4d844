"""What follows from a topology: paths, groups of devices, what is nearest."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sagellm.core.protocols.topology import Device, DeviceKind, Link, TopologyInfo

MAX_TRIED = 2_000
"""Groups that are tried one by one; of more, groups are grown from each device."""
MESSAGE_BYTES = 1 << 20
ACCELERATORS = (DeviceKind.GPU, DeviceKind.NPU)


@dataclass(frozen=True, slots=True)
class Route:
    """Links from a device to another, without gaps. Empty for a device to itself."""

    links: tuple[Link, ...] = ()

    @property
    def latency_s(self) -> float:
        return sum(link.latency_s for link in self.links)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Of its narrowest link."""
        return min((link.bandwidth_bytes_per_s for link in self.links), default=math.inf)

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds for one message that is passed on in small pieces."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


def accelerators(info: TopologyInfo) -> list[Device]:
    return [device for device in info.devices if device.kind in ACCELERATORS]


def best_path(info: TopologyInfo, source: str, target: str, num_bytes: int = MESSAGE_BYTES) -> Route | None:
    """The path on which a message arrives first; None where nothing joins the two.

    A NIC is no way through. For each bandwidth that a path may have, the links with at least that much are
    searched for the least latency (Dijkstra). Raises `ValueError` for an unknown device.
    """
    info.device(source), info.device(target)
    if source == target:
        return Route()
    nics = {device.name for device in info.devices if device.kind is DeviceKind.NIC} - {source}
    by_source: dict[str, list[Link]] = {}
    for link in info.links:
        if link.source not in nics:
            by_source.setdefault(link.source, []).append(link)
    best: Route | None = None
    for rate in sorted({link.bandwidth_bytes_per_s for link in info.links}, reverse=True):
        path = _least_latency(by_source, source, target, rate)
        if path is not None and (best is None or path.transfer_s(num_bytes) < best.transfer_s(num_bytes)):
            best = path
    return best


def _least_latency(
    by_source: dict[str, list[Link]], source: str, target: str, least_rate: float
) -> Route | None:
    came: dict[str, Link | None] = {}
    queue: list[tuple[float, int, str, Link | None]] = [(0.0, 0, source, None)]
    ties = itertools.count(1)
    while queue:
        latency_s, _, name, link = heapq.heappop(queue)
        if name in came:
            continue
        came[name] = link
        if name == target:
            break
        for each in by_source.get(name, ()):
            if each.bandwidth_bytes_per_s >= least_rate and each.target not in came:
                heapq.heappush(queue, (latency_s + each.latency_s, next(ties), each.target, each))
    links, at = [], came.get(target)
    if at is None:
        return None
    while at is not None:
        links.append(at)
        at = came[at.source]
    return Route(tuple(reversed(links)))


def nearest_nics(info: TopologyInfo, device: str) -> list[str]:
    """The nearest NICs for KV and collectives; several where they are equally near.

    NICs that are known to be no fabric are left out, and where one is known to be one, those of which
    nothing is known. Raises `ValueError` for an unknown device.
    """
    info.device(device)
    nics = [each for each in info.devices if each.kind is DeviceKind.NIC and each.is_fabric is not False]
    known = [each for each in nics if each.is_fabric]
    names = {each.name for each in known or nics}
    links = [link for link in info.links if link.source == device and link.target in names]
    nearest = min((link.kind.distance for link in links), default=None)
    return sorted(link.target for link in links if link.kind.distance == nearest)


def host_node(info: TopologyInfo, device: str) -> int | None:
    """The NUMA node whose memory is nearest; None if no source says.

    The host tier of KV is to lie there.
    """
    found = info.device(device)
    if found.numa_node is not None:
        return found.numa_node
    nodes = {each.name: each.numa_node for each in info.devices if each.kind is DeviceKind.CPU}
    links = [link for link in info.links if link.source == device and link.target in nodes]
    nearest = min(links, key=lambda link: (link.kind.distance, -link.bandwidth_bytes_per_s), default=None)
    if nearest is not None:
        return nodes[nearest.target]
    return next(iter(nodes.values())) if len(nodes) == 1 else None


def summary(info: TopologyInfo) -> list[str]:
    """For each accelerator a line: the nearest NICs and the NUMA node."""
    lines = []
    for device in accelerators(info):
        nics = ", ".join(nearest_nics(info, device.name)) or "none known"
        node = host_node(info, device.name)
        where = "unknown NUMA node" if node is None else f"NUMA node {node}"
        lines.append(f"{device.name}: nearest NICs: {nics}; host memory: {where}")
    return lines


@dataclass(frozen=True, slots=True)
class Group:
    """Devices for tensor parallelism. An all-reduce goes as fast as the narrowest link between two."""

    names: tuple[str, ...]
    bandwidth_bytes_per_s: float
    num_nodes: int
    """NUMA nodes that the devices lie on."""


def best_group(info: TopologyInfo, size: int, candidates: Iterable[str] | None = None) -> Group | None:
    """The `size` accelerators that are joined best; None where fewer are joined.

    Compared are the narrowest link, then the sum over all pairs, then how few NUMA nodes they lie on, then
    the order of names. All groups are tried if there are at most `MAX_TRIED`; else a group grows from each
    device by the one that is joined best to it, which is exact where near devices form a tree.
    Raises `ValueError` for a size below 1 and for unknown candidates.
    """
    if size < 1:
        raise ValueError(f"a group has at least 1 device, got {size}")
    names = [device.name for device in accelerators(info)] if candidates is None else list(candidates)
    graph = _Graph(info, names)
    if size > len(names):
        return None
    if math.comb(len(names), size) <= MAX_TRIED:
        groups: Iterable[tuple[int, ...]] = itertools.combinations(range(len(names)), size)
    else:
        groups = {tuple(sorted(graph.grown(start, size))) for start in range(len(names))}
    best = max(groups, key=graph.rank, default=None)
    if best is None or graph.narrowest(best) <= 0:
        return None
    return Group(tuple(names[i] for i in best), graph.narrowest(best), graph.num_nodes(best))


class _Graph:
    """Bandwidths between candidates, by index; of both directions the lower one."""

    def __init__(self, info: TopologyInfo, names: Sequence[str]) -> None:
        self._nodes = [info.device(name).numa_node for name in names]
        index = {name: i for i, name in enumerate(names)}
        rates = [[0.0] * len(names) for _ in names]
        for link in info.links:
            if link.source in index and link.target in index:
                rates[index[link.source]][index[link.target]] = link.bandwidth_bytes_per_s
        self.rates = [[min(rates[i][j], rates[j][i]) for j in range(len(names))] for i in range(len(names))]

    def narrowest(self, group: Sequence[int]) -> float:
        return min((self.rates[i][j] for i, j in itertools.combinations(group, 2)), default=math.inf)

    def num_nodes(self, group: Sequence[int]) -> int:
        return len({self._nodes[i] for i in group})

    def rank(self, group: tuple[int, ...]) -> tuple[float, float, int, tuple[int, ...]]:
        """Higher is better."""
        pairs = [self.rates[i][j] for i, j in itertools.combinations(group, 2)]
        return (
            min(pairs, default=math.inf), math.fsum(pairs), -self.num_nodes(group), tuple(-i for i in group),
        )  # fmt: skip

    def grown(self, start: int, size: int) -> list[int]:
        """A group that grows by the device whose narrowest link to it is widest."""
        group, narrowest, total = [start], list(self.rates[start]), list(self.rates[start])
        left = set(range(len(self.rates))) - {start}
        while len(group) < size:
            best = max(left, key=lambda i: (narrowest[i], total[i], self._nodes[i] == self._nodes[start], -i))
            left.remove(best)
            group.append(best)
            for i in left:
                narrowest[i] = min(narrowest[i], self.rates[best][i])
                total[i] += self.rates[best][i]
        return group
