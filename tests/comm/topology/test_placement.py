"""Paths and groups, beside slow twins that try everything."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.comm.topology import placement
from sagellm.comm.topology.manager import read_recorded
from sagellm.comm.topology.placement import Group, best_group, best_path, host_node, nearest_nics, summary
from sagellm.core.protocols.topology import Device, DeviceKind, Link, LinkKind, TopologyInfo
from tests.comm.topology.recorded import gpus, spaced_matrix

LATENCY_S = 1e-6


def graph(rates: list[list[float]], nodes: list[int | None] | None = None) -> TopologyInfo:
    count = len(rates)
    devices = tuple(
        Device(f"cuda:{i}", DeviceKind.GPU, numa_node=nodes[i] if nodes else None) for i in range(count)
    )
    links = tuple(
        Link(f"cuda:{i}", f"cuda:{j}", LinkKind.PIX, rates[i][j], LATENCY_S, "test")
        for i, j in itertools.permutations(range(count), 2)
        if rates[i][j] > 0
    )
    return TopologyInfo(devices, links)


RATES = st.integers(2, 6).flatmap(
    lambda n: st.lists(
        st.lists(st.sampled_from([0.0, 1e9, 1e10, 2e10, 4e11]), min_size=n, max_size=n),
        min_size=n,
        max_size=n,
    )
)


@given(RATES, st.integers(1, 1 << 30))
def test_no_path_is_faster(rates: list[list[float]], num_bytes: int) -> None:
    info = graph(rates)
    names = [device.name for device in info.devices]
    found = best_path(info, names[0], names[-1], num_bytes)
    best = math.inf
    for size in range(len(names) - 1):
        for between in itertools.permutations(names[1:-1], size):
            hops = list(itertools.pairwise((names[0], *between, names[-1])))
            links = [info.link(*hop) for hop in hops]
            if None not in links:
                route = placement.Route(tuple(link for link in links if link is not None))
                best = min(best, route.transfer_s(num_bytes))
    assert (found.transfer_s(num_bytes) if found else math.inf) == pytest.approx(best)


@given(RATES, st.integers(1, 6))
def test_no_group_is_joined_better(rates: list[list[float]], size: int) -> None:
    info = graph(rates)
    found = best_group(info, size)
    count = len(rates)

    def narrowest(group: tuple[int, ...]) -> float:
        return min(
            (min(rates[i][j], rates[j][i]) for i, j in itertools.combinations(group, 2)), default=math.inf
        )

    best = max((narrowest(group) for group in itertools.combinations(range(count), size)), default=0.0)
    assert (found.bandwidth_bytes_per_s if found else 0.0) == best


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_grown_groups_are_the_best_ones_of_trees(seed: int, size: int) -> None:
    """Near devices are near to the same others: 12 GPUs below switches, sockets and hosts."""
    rates = [
        [4e10 if i // 2 == j // 2 else 2e10 if i // 4 == j // 4 else 1e9 for j in range(12)]
        for i in range(12)
    ]
    info = graph(rates, [i // 4 for i in range(12)])
    order = [device.name for device in info.devices]
    random.Random(seed).shuffle(order)
    exact = best_group(info, size, order)
    limit, placement.MAX_TRIED = placement.MAX_TRIED, 0
    try:
        grown = best_group(info, size, order)
    finally:
        placement.MAX_TRIED = limit
    assert exact is not None
    assert grown is not None
    assert grown.bandwidth_bytes_per_s == exact.bandwidth_bytes_per_s


def test_a_group_stays_on_a_node() -> None:
    rates = [[1e10] * 4 for _ in range(4)]
    found = best_group(graph(rates, [0, 1, 1, 0]), 2)
    assert found == Group(("cuda:0", "cuda:3"), 1e10, 1)


def test_groups_that_do_not_exist() -> None:
    info = graph([[0.0, 0.0], [0.0, 0.0]])
    assert best_group(info, 2) is None
    assert best_group(info, 3) is None
    assert best_group(info, 1) == Group(("cuda:0",), math.inf, 1)
    with pytest.raises(ValueError, match="at least 1"):
        best_group(info, 0)
    with pytest.raises(ValueError, match="no device 'cuda:9'"):
        best_group(info, 1, ["cuda:9"])


def test_a_far_nic_is_reached_through_the_gpu_beside_it() -> None:
    """As NCCL's PXN: over NVLink, then through one switch."""
    names = [*gpus(2), "NIC0", "NIC1"]

    def label(i: int, j: int) -> str:
        if {i, j} == {0, 1}:
            return "NV18"
        return "PIX" if abs(i - j) == 2 else "SYS"

    info = read_recorded([("nvidia-smi", spaced_matrix(names, label))])
    path = best_path(info, "cuda:0", "nic:NIC1", 1 << 26)
    assert path is not None
    assert [link.target for link in path.links] == ["cuda:1", "nic:NIC1"]
    between = best_path(info, "nic:NIC0", "nic:NIC1", 1 << 26)
    assert between is not None
    assert "nic" not in "".join(link.target for link in between.links[:-1])
    assert best_path(info, "cuda:0", "cuda:0") == placement.Route()
    assert best_path(info, "cuda:0", "cpu:0") is None
    with pytest.raises(ValueError, match="no device 'x'"):
        best_path(info, "x", "cuda:0")
    assert nearest_nics(info, "cuda:1") == ["nic:NIC1"]
    assert summary(info)[1] == "cuda:1: nearest NICs: nic:NIC1; host memory: unknown NUMA node"


def test_the_node_of_host_memory() -> None:
    info = graph([[0.0]])
    assert host_node(info, "cuda:0") is None
    two = TopologyInfo(
        (
            *info.devices,
            Device("cpu:0", DeviceKind.CPU, numa_node=0),
            Device("cpu:1", DeviceKind.CPU, numa_node=1),
        ),
        (
            Link("cuda:0", "cpu:0", LinkKind.SYS, 1.0, 0.0, "test"),
            Link("cuda:0", "cpu:1", LinkKind.PHB, 1.0, 0.0, "test"),
        ),
    )
    assert host_node(two, "cuda:0") == 1
