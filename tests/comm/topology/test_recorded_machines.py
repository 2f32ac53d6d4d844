"""Every edge of topologies that were recorded on real machines; the files are not in the repository."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from sagellm.comm.topology.manager import read_recorded
from sagellm.comm.topology.placement import accelerators, best_group, host_node, nearest_nics
from sagellm.core.protocols.topology import DeviceKind, LinkKind, TopologyInfo

pytestmark = pytest.mark.traces
Label = Callable[[int, int], str]
EFA_OF_P5 = [79, 96, 113, 130, 147, 164, 181, 198]


def folder() -> Path:
    traces = os.environ.get("SAGELLM_TRACES")
    found = Path(traces or "").parent / "fixtures/topology"
    if not traces or not found.is_dir():
        pytest.skip("no recorded topologies beside SAGELLM_TRACES")
    return found


def recorded(name: str, file: str) -> TopologyInfo:
    return read_recorded([(name, (folder() / file).read_text(encoding="utf-8"))])


def same_four(near: str, far: str) -> Label:
    return lambda i, j: near if i // 4 == j // 4 else far


MATRICES = [
    ("nvidia-smi", "nvidia_topo_m_8xH100_NV18_8xmlx5.txt", "cuda", 8, lambda i, j: "NV18"),
    ("nvidia-smi", "nvidia_topo_m_4xGB200_ansi_raw.txt", "cuda", 4, lambda i, j: "NV18"),
    (
        "nvidia-smi", "nvidia_topo_m_4xRTX6000Ada_pcie_2numa.txt", "cuda", 4,
        lambda i, j: "NODE" if i // 2 == j // 2 else "SYS",
    ),
    ("npu-smi", "ascend_npu-smi_topo_8x910B3_HCCS.txt", "npu", 8, lambda i, j: "HCCS"),
    ("npu-smi", "ascend_npu-smi_topo_A5_ub_nic_excerpt.txt", "npu", 2, lambda i, j: "UB"),
    ("mx-smi", "metax_mx-smi_topo_m_8xC500.txt", "maca", 8, same_four("MX", "SYS")),
    ("mx-smi", "metax_mx-smi_topo_m_8xC500_affinity.txt", "maca", 8, same_four("MX", "NODE")),
    ("mx-smi", "metax_mx-smi_topo_n_8xC500_6nic.txt", "maca", 8, same_four("MX", "NODE")),
    ("rocm-smi", "amd_rocm-smi_showtopo_8xMI308X_xgmi.txt", "rocm", 8, lambda i, j: "XGMI"),
    ("rocm-smi", "amd_rocm-smi_showtopo_4xMI210_archer2_oldformat.txt", "rocm", 4, lambda i, j: "XGMI"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "file", "prefix", "count", "label"), MATRICES, ids=[row[1] for row in MATRICES]
)
def test_edges_between_chips(name: str, file: str, prefix: str, count: int, label: Label) -> None:
    info = recorded(name, file)
    assert [device.name for device in accelerators(info)] == [f"{prefix}:{i}" for i in range(count)]
    found = {
        (link.source, link.target): link.detail
        for link in info.links
        if link.source.startswith(prefix) and link.target.startswith(prefix)
    }
    assert found == {
        (f"{prefix}:{i}", f"{prefix}:{j}"): label(i, j) for i in range(count) for j in range(count) if i != j
    }
    assert not info.missing


@pytest.mark.parametrize(("name", "file"), [row[:2] for row in MATRICES if row[0] != "rocm-smi"])
def test_every_cell(name: str, file: str) -> None:
    """Beside a reader that only splits at blanks."""
    info, text = recorded(name, file), (folder() / file).read_text(encoding="utf-8")
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    [columns] = [
        words for words in lines if words and words[0] in ("GPU0", "NPU0") and words[1] in ("GPU1", "NPU1")
    ]
    columns = [word for word in columns if re.fullmatch(r"(GPU|NPU|NIC)\d+", word)]
    rows = {
        words[0]: words[1 : len(columns) + 1]
        for words in lines
        if len(words) > len(columns) and words[0] in columns
    }
    rows = {row: cells for row, cells in rows.items() if "X" in cells}
    device_of = dict(
        zip(columns, (d.name for d in info.devices if d.kind is not DeviceKind.CPU), strict=True)
    )
    if name == "nvidia-smi":
        assert device_of["NIC1"] == "nic:mlx5_1"
    expected = {
        (device_of[row], device_of[column]): cell
        for row, cells in rows.items()
        for column, cell in zip(columns, cells, strict=True)
        if cell not in ("X", "NA")
    }
    assert {(link.source, link.target): link.detail for link in info.links} == expected


@pytest.mark.parametrize("machine", ["g6.48xl", "p4d.24xl", "p5.48xl_8xH100_32xEFA", "p6-b200.48xl"])
def test_every_pci_path(machine: str) -> None:
    """Beside a reader that asks how many lists of parents two devices share."""
    file = f"hwloc_aws_{machine}.xml"
    info = recorded("hwloc", file)
    root = ET.parse(folder() / file).getroot()
    parent = {child: element for element in root.iter() for child in element}
    above: dict[str, list[ET.Element]] = {}
    for element in root.iter("object"):
        if element.get("type") == "PCIDev":
            chain = [element]
            while chain[-1] in parent:
                chain.append(parent[chain[-1]])
            above[element.get("pci_busid", "")] = chain[1:]
    pci = {device.name: device.pci for device in info.devices if device.pci}
    for link in info.links:
        if link.source not in pci or link.target not in pci:
            continue
        first, other = above[pci[link.source]], above[pci[link.target]]
        meet = next(element for element in first if element in other)
        if meet.get("type") == "Machine":
            expected = LinkKind.SYS
        elif meet.get("type") == "Package":
            expected = LinkKind.NODE
        elif meet.get("bridge_type") == "0-1":
            expected = LinkKind.PHB
        else:
            expected = LinkKind.PIX if max(first.index(meet), other.index(meet)) <= 1 else LinkKind.PXB
        assert link.kind is expected, link


def test_nics_of_the_h100s() -> None:
    info = recorded("nvidia-smi", "nvidia_topo_m_8xH100_NV18_8xmlx5.txt")
    for i in range(8):
        for j in range(8):
            link = info.link(f"cuda:{i}", f"nic:mlx5_{j}")
            assert link is not None
            assert link.kind is (LinkKind.PIX if i == j else same_node(i, j))
            if i != j:
                between = info.link(f"nic:mlx5_{i}", f"nic:mlx5_{j}")
                assert between is not None
                assert between.kind is same_node(i, j)
        assert nearest_nics(info, f"cuda:{i}") == [f"nic:mlx5_{i}"]
        assert host_node(info, f"cuda:{i}") == i // 4
    group = best_group(info, 4)
    assert group is not None
    assert group.names == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


def same_node(i: int, j: int) -> LinkKind:
    return LinkKind.NODE if i // 4 == j // 4 else LinkKind.SYS


def test_affinities() -> None:
    gb200 = recorded("nvidia-smi", "nvidia_topo_m_4xGB200_ansi_raw.txt")
    assert [(gpu.numa_node, gpu.cpus) for gpu in accelerators(gb200)] == [(0, "0-35")] * 2 + [(1, "")] * 2
    ascend = recorded("npu-smi", "ascend_npu-smi_topo_8x910B3_HCCS.txt")
    cpus = ["144-167", "96-119", "0-23", "48-71"]
    assert [npu.cpus for npu in accelerators(ascend)] == [cpus[i // 2] for i in range(8)]
    metax = recorded("mx-smi", "metax_mx-smi_topo_m_8xC500_affinity.txt")
    assert {(gpu.numa_node, gpu.cpus) for gpu in accelerators(metax)} == {(0, "0-31,64-95")}
    mi308 = recorded("rocm-smi", "amd_rocm-smi_showtopo_8xMI308X_xgmi.txt")
    assert [gpu.numa_node for gpu in accelerators(mi308)] == [i // 4 for i in range(8)]
    mi210 = recorded("rocm-smi", "amd_rocm-smi_showtopo_4xMI210_archer2_oldformat.txt")
    assert [gpu.numa_node for gpu in accelerators(mi210)] == [0, 1, 2, 3]


def test_nics_of_metax() -> None:
    info = recorded("mx-smi", "metax_mx-smi_topo_n_8xC500_6nic.txt")
    for i in range(8):
        assert nearest_nics(info, f"maca:{i}") == [f"nic:mlx5_{2 * (i // 4)}", f"nic:mlx5_{2 * (i // 4) + 1}"]
    far = info.link("nic:mlx5_4", "maca:0")
    assert far is not None
    assert far.kind is LinkKind.SYS


def test_a_visible_part_of_an_a3() -> None:
    info = recorded("npu-smi", "ascend_npu-smi_topo_910C_A3_phyid_excerpt.txt")
    assert [device.name for device in accelerators(info)] == ["npu:2", "npu:3", "npu:12", "npu:13"]
    found = {(link.source, link.target): link.detail for link in info.links}
    across = {(f"npu:{i}", f"npu:{j}") for i in (2, 3) for j in (12, 13)}
    across |= {(target, source) for source, target in across}
    assert found == {("npu:2", "npu:3"): "SIO", ("npu:3", "npu:2"): "SIO", **dict.fromkeys(across, "HCCS_SW")}


def test_measured_figures() -> None:
    files = {
        "nvidia-smi": folder() / "nvidia_topo_m_4xRTX6000Ada_pcie_2numa.txt",
        "p2pBandwidthLatencyTest": folder() / "nvidia_p2pBandwidthLatencyTest_4xRTX6000Ada.txt",
    }
    info = read_recorded([(name, file.read_text(encoding="utf-8")) for name, file in files.items()])
    link = info.link("cuda:2", "cuda:0")
    assert link is not None
    assert link.bandwidth_bytes_per_s == pytest.approx(26.32e9)
    assert link.latency_s == pytest.approx(1.42e-6)


def test_an_ethernet_vf_is_no_fabric() -> None:
    info = recorded("ibv_devinfo", "rdma_ibv_devinfo_azure_ib_vf_plus_eth_vf.txt")
    assert [(device.name, device.is_fabric) for device in info.devices if device.kind is DeviceKind.NIC] == [
        ("nic:mlx5_0", True), ("nic:mlx5_1", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "num_fabric", "num_others"),
    [
        ("hwloc_aws_p5.48xl_8xH100_32xEFA.xml", 32, 32),
        ("hwloc_aws_p4d.24xl.xml", 4, 4),
        ("hwloc_aws_p6-b200.48xl.xml", 10, 8),
        ("hwloc_aws_g6.48xl.xml", 1, 1),
    ],
)
def test_devices_of_hwloc(file: str, num_fabric: int, num_others: int) -> None:
    info = recorded("hwloc", file)
    gpus = accelerators(info)
    assert [gpu.name for gpu in gpus] == [f"cuda:{i}" for i in range(8)]
    assert [gpu.numa_node for gpu in gpus] == [i // 4 for i in range(8)]
    nics = [device for device in info.devices if device.kind is DeviceKind.NIC]
    assert sum(bool(nic.is_fabric) for nic in nics) == num_fabric
    assert len(nics) == num_fabric + num_others
    assert (
        len([link for link in info.links if {link.source, link.target} <= {gpu.name for gpu in gpus}]) == 56
    )
    for link in info.links:
        if link.source.startswith("cuda") and link.target.startswith("cuda"):
            is_far = int(link.source[-1]) // 4 != int(link.target[-1]) // 4
            assert (link.kind is LinkKind.SYS) == is_far


def test_switches_of_a_p5() -> None:
    """Each GPU shares a switch with four adapters."""
    info = recorded("hwloc", "hwloc_aws_p5.48xl_8xH100_32xEFA.xml")
    for i, first in enumerate(EFA_OF_P5):
        assert nearest_nics(info, f"cuda:{i}") == sorted(f"nic:rdmap{first + k}s0" for k in range(4))
        link = info.link(f"cuda:{i}", f"nic:rdmap{first}s0")
        assert link is not None
        assert link.kind is LinkKind.PIX


def test_pairs_of_a_p6_and_a_p4d() -> None:
    b200 = recorded("hwloc", "hwloc_aws_p6-b200.48xl.xml")
    a100 = recorded("hwloc", "hwloc_aws_p4d.24xl.xml")
    for i in range(0, 8, 2):
        pair, bridge = b200.link(f"cuda:{i}", f"cuda:{i + 1}"), a100.link(f"cuda:{i}", f"cuda:{i + 1}")
        assert pair is not None
        assert bridge is not None
        assert (pair.kind, bridge.kind) == (LinkKind.PIX, LinkKind.PHB)
