"""`SystemTopology`, recordings of other machines, and texts of a topology."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sagellm.comm.topology.commands import CommandError
from sagellm.comm.topology.manager import SystemTopology, aligned, merged, read_recorded
from sagellm.comm.topology.placement import host_node
from sagellm.comm.topology.tables import dot, from_json, links_table, matrix, to_json
from sagellm.core.errors import UnknownNameError
from sagellm.core.protocols.topology import Confidence, Device, DeviceKind, Link, LinkKind, TopologyInfo
from tests.comm.topology.recorded import gpus, spaced_matrix
from tests.comm.topology.test_pci_sources import as_sysfs

P2P = """Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
   D\\D     0      1
     0 802.90  26.30
     1  26.20 833.30
P2P=Enabled Latency (P2P Writes) Matrix (us)
   GPU     0      1
     0   1.40   1.20
     1   1.20   1.40
"""
WITHOUT_AN_END = """{"devices": [{"name": "a", "kind": "gpu"}], "links": [{
    "source": "a", "target": "b", "kind": "pix", "provenance": "me",
    "bandwidth_bytes_per_s": 1, "latency_s": 0
}]}"""
IBV = """hca_id:\tmlx5_0
\ttransport:\t\t\tInfiniBand (0)
\tsys_image_guid:\t\t\t1070:fd03:006b:341c
\t\tport:\t1
\t\t\tstate:\t\t\t{state}
\t\t\tlink_layer:\t\tInfiniBand

hca_id:\tmlx5_1
\ttransport:\t\t\tInfiniBand (0)
\tsys_image_guid:\t\t\t{guid}
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tlink_layer:\t\tEthernet
"""


def nvidia(count: int = 2, label: str = "NV4") -> str:
    return spaced_matrix(gpus(count), lambda i, j: label)


def test_a_machine_is_asked_with_every_source(tmp_path: Path) -> None:
    texts = {
        "nvidia-smi": nvidia(5),
        "ibv_devinfo": IBV.format(state="PORT_ACTIVE (4)", guid="0000:0000:0000:0000"),
    }

    def run(command: Sequence[str], limit_s: float) -> str:
        return texts[command[0]]

    manager = SystemTopology(
        as_sysfs(tmp_path), find=lambda name: name if name in texts else None, run=run, nvml=None
    )
    info = manager.detect()
    nvlink, pci = info.link("cuda:0", "cuda:4"), info.link("cuda:0", "nic:mlx5_0")
    assert nvlink is not None
    assert pci is not None
    assert (nvlink.kind, nvlink.provenance) == (LinkKind.NVLINK, "nvidia-smi topo -m")
    assert (pci.kind, pci.provenance) == (LinkKind.PIX, "/sys")
    assert info.device("cuda:4").pci == "0000:80:00.0"
    assert not info.missing


def test_tools_that_hang_cost_one_limit_together_and_a_line_each(tmp_path: Path) -> None:
    def run(command: Sequence[str], limit_s: float) -> str:
        time.sleep(limit_s)
        raise CommandError(f"no end of its output within {limit_s:g} s")

    manager = SystemTopology(tmp_path, limit_s=0.3, find=lambda name: name, run=run, nvml=None)
    info = manager.detect()
    tools = [name for name in info.missing if not name.startswith("/sys")]
    assert len(tools) == 9
    assert {info.missing[name] for name in tools} == {"no end of its output within 0.3 s"}


def test_what_is_not_understood_and_what_is_missing_is_said(tmp_path: Path) -> None:
    manager = SystemTopology(
        as_sysfs(tmp_path), find=lambda name: name if name == "rocm-smi" else None, run=lambda *_: "?",
        nvml="no_such_module_anywhere",
    )  # fmt: skip
    info = manager.detect()
    assert info.missing["nvidia-smi"] == "the command is not on the path"
    assert info.missing["rocm-smi"].startswith("not understood: no block")
    assert "nvidia-ml-py" in info.missing["NVML"]


def test_this_machine() -> None:
    info = SystemTopology().detect()
    assert any(device.kind is DeviceKind.CPU for device in info.devices)


def test_recordings_of_one_machine_become_one_topology() -> None:
    info = read_recorded([("nvidia-smi", nvidia(2, "NODE")), ("p2pBandwidthLatencyTest", P2P)])
    link = info.link("cuda:0", "cuda:1")
    assert link is not None
    assert (link.kind, link.figures) == (LinkKind.NODE, Confidence.MEASURED)
    assert link.bandwidth_bytes_per_s == pytest.approx(26.3e9)
    assert link.latency_s == pytest.approx(1.2e-6)
    with pytest.raises(UnknownNameError, match="nvidia-smi, npu-smi"):
        read_recorded([("nvidia", "")])


def test_measured_figures_without_peer_access_are_left_out() -> None:
    text = P2P.replace("26.30", " 0.00").replace("26.20", "  nan")
    link = read_recorded([("nvidia-smi", nvidia(2, "NODE")), ("p2pBandwidthLatencyTest", text)]).links[0]
    assert link.figures is Confidence.ASSUMED
    with pytest.raises(ValueError, match="Unidirectional"):
        read_recorded([("p2pBandwidthLatencyTest", "CUDA error")])


@pytest.mark.parametrize(
    ("state", "guid", "fabric"),
    [
        ("PORT_ACTIVE (4)", "1070:fd03:006b:341d", (True, False)),  # Ethernet beside InfiniBand
        ("PORT_DOWN (1)", "1070:fd03:006b:341d", (False, True)),  # RoCE
        ("PORT_DOWN (1)", "0000:0000:0000:0000", (False, False)),  # a cloud's virtual function
    ],
)
def test_which_nics_are_of_a_fabric(state: str, guid: str, fabric: tuple[bool, bool]) -> None:
    info = read_recorded([("ibv_devinfo", IBV.format(state=state, guid=guid))])
    assert (info.device("nic:mlx5_0").is_fabric, info.device("nic:mlx5_1").is_fabric) == fabric


def test_no_rdma_devices_is_an_answer() -> None:
    assert len(read_recorded([("ibv_devinfo", "No IB devices found\n")]).devices) == 1
    with pytest.raises(ValueError, match="hca_id"):
        read_recorded([("ibv_devinfo", "command not found")])


def test_of_two_sources_the_better_known_and_the_nearer_counts() -> None:
    devices = (Device("cuda:0", DeviceKind.GPU), Device("cuda:1", DeviceKind.GPU, memory_bytes=1))

    def part(kind: LinkKind, confidence: Confidence) -> TopologyInfo:
        link = Link("cuda:0", "cuda:1", kind, 1.0, 0.0, kind.value, confidence)
        return TopologyInfo(devices, (link,))

    far, near = part(LinkKind.SYS, Confidence.REPORTED), part(LinkKind.NVLINK, Confidence.REPORTED)
    guess = part(LinkKind.PIX, Confidence.ASSUMED)
    for parts in ((far, near, guess), (guess, near, far)):
        assert merged(parts, {}).links[0].kind is LinkKind.NVLINK
    assert merged((guess, far), {}).links[0].kind is LinkKind.SYS
    filled = merged((TopologyInfo((replace(devices[1], memory_bytes=0, pci="x"),)), far), {}).device("cuda:1")
    assert (filled.memory_bytes, filled.pci) == (1, "x")


def own(vendor: str, prefix: str, pcis: Sequence[str], nodes: Sequence[int | None]) -> TopologyInfo:
    devices = [
        Device(f"{prefix}:{i}", DeviceKind.GPU, vendor, pci=pci, numa_node=node)
        for i, (pci, node) in enumerate(zip(pcis, nodes, strict=True))
    ]
    pairs = [(a.name, b.name) for a in devices for b in devices if a is not b]
    return TopologyInfo(tuple(devices), tuple(Link(*p, LinkKind.SYS, 1.0, 0.0, "test") for p in pairs))


def test_a_container_that_sees_some_gpus_gets_the_facts_of_those() -> None:
    tree, missing = own("nvidia", "cuda", ["10", "50", "90"], [0, 0, 1]), dict[str, str]()
    library = own("nvidia", "cuda", ["90", "10"], [None, None])
    info = aligned(tree, [library], missing)
    assert [(device.name, device.pci, device.numa_node) for device in info.devices] == [
        ("cuda:1", "10", 0), ("cuda:0", "90", 1),
    ]  # fmt: skip
    assert {(link.source, link.target) for link in info.links} == {("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")}
    assert not missing


def test_without_pci_ids_chips_are_joined_by_order_or_not_at_all() -> None:
    missing: dict[str, str] = {}
    tree = own("nvidia", "cuda", ["10", "90"], [0, 1])
    assert aligned(tree, [own("nvidia", "cuda", ["", ""], [None, None])], missing) == tree
    assert aligned(tree, [], missing) == tree
    assert not missing
    assert not aligned(tree, [own("nvidia", "cuda", [""], [None])], missing).devices
    assert "which of its 2 chips" in missing["PCI tree: nvidia"]
    npus = own("huawei", "npu", ["01", "c1"], [0, 1])  # whose tool does not number by PCI id
    assert not aligned(npus, [own("huawei", "npu", ["", ""], [None, None])], missing).devices
    assert "PCI tree: huawei" in missing


def test_node_0_and_a_port_of_no_fabric_are_facts() -> None:
    first = Device("nic:a", DeviceKind.NIC, numa_node=0, is_fabric=False)
    other = Device("nic:a", DeviceKind.NIC, numa_node=1, is_fabric=True)
    found = merged([TopologyInfo((first,)), TopologyInfo((other,))], {}).device("nic:a")
    assert (found.numa_node, found.is_fabric) == (0, False)


def test_a_node_that_no_source_names_is_not_made_up() -> None:
    info = read_recorded([("nvidia-smi", nvidia(2))])
    assert [(d.name, d.numa_node) for d in info.devices if d.kind is DeviceKind.CPU] == [("cpu:0", None)]
    assert host_node(info, "cuda:0") is None


def test_the_library_may_hang_or_be_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "odd_nvml.py"
    monkeypatch.syspath_prepend(tmp_path)
    for text, reason in (
        ("import time\ndef nvmlInit(): time.sleep(5)", "no answer within 0.2 s"),
        (
            "def nvmlInit(): pass\ndef nvmlShutdown(): pass\nclass NVMLError(Exception): pass",
            "nvmlDeviceGetCount",
        ),
    ):
        module.write_text(text)
        sys.modules.pop("odd_nvml", None)
        importlib.invalidate_caches()
        manager = SystemTopology(
            as_sysfs(tmp_path / reason[:5]), limit_s=0.2, find=lambda name: None, nvml="odd_nvml"
        )
        assert reason in manager.detect().missing["NVML"]


def test_figures_of_devices_that_are_not_there_are_named() -> None:
    info = read_recorded([("p2pBandwidthLatencyTest", P2P)])
    assert "cuda:0, cuda:1" in info.missing["p2pBandwidthLatencyTest"]


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    info = SystemTopology(as_sysfs(tmp_path), find=lambda name: None, nvml=None).detect()
    assert from_json(to_json(info)) == info
    assert read_recorded([("declared", to_json(info))]).links == info.links


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Invalid JSON"),
        ('{"devices": [{"name": "a", "kind": "tpu"}]}', "devices.0.kind"),
        (WITHOUT_AN_END, "a link names b"),
        (WITHOUT_AN_END.replace('"target": "b"', '"target": "a"'), "no link to itself"),
        (WITHOUT_AN_END.replace('"target": "b"', '"goal": "b"'), "links.0.target"),
        (
            '{"devices": [{"name": "a", "kind": "gpu", "nume_node": 1}]}',
            "devices.0.nume_node: there are cpus",
        ),
        ('{"devices": [{"name": "a", "kind": "gpu", "numa_node": -5}]}', "not negative"),
        ('{"devices": [], "edges": []}', "edges: there are devices, links, missing"),
        ('{"devices": [{"name": "a", "kind": "gpu"}, {"name": "a", "kind": "gpu"}]}', "one name"),
    ],
)
def test_a_declared_topology_that_is_wrong_is_explained(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        from_json(text)


def test_texts_of_a_topology(tmp_path: Path) -> None:
    info = SystemTopology(as_sysfs(tmp_path), find=lambda name: None, nvml=None).detect()
    lines = matrix(info).splitlines()
    others = [device.name for device in info.devices if device.kind is not DeviceKind.CPU]
    assert lines[0].split() == [*others, "cpu:0", "cpu:1"]
    assert "PIX" in lines[1]
    assert "not for KV and collectives" in matrix(info)
    assert "/sys (reported)" in links_table(info)
    graph = dot(info)
    assert graph.count(" -- ") == len(info.links) // 2
    assert "subgraph cluster_1" in graph
    odd = replace(info, devices=(Device('a"b\\', DeviceKind.CPU),), links=())
    assert '"a\\"b\\\\"' in dot(odd)


def test_labels_of_tools_that_nobody_recorded_are_marked_in_the_matrix() -> None:
    text = spaced_matrix(gpus(2, "XPU"), lambda i, j: "XL")
    assert "XL?" in matrix(read_recorded([("xpu-smi", text)]))


def test_a_topology_of_many_devices_is_json(tmp_path: Path) -> None:
    assert len(json.loads(to_json(read_recorded([("nvidia-smi", nvidia(32))])))["links"]) == 32 * 31
