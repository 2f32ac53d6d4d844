"""Matrices of vendors' tools, with what makes them hard to read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.comm.topology.manager import RECORDED, parse_output
from sagellm.comm.topology.matrix import parse_matrix
from sagellm.comm.topology.tools import tool_named
from sagellm.core.protocols.topology import Confidence, DeviceKind, LinkKind, TopologyInfo
from tests.comm.topology.recorded import gpus, spaced_matrix, tabbed_matrix


def parsed(name: str, text: str) -> TopologyInfo:
    tool = tool_named(name)
    assert tool is not None
    return parse_matrix(text, tool)


def details(info: TopologyInfo) -> dict[tuple[str, str], str]:
    return {(link.source, link.target): link.detail for link in info.links}


def test_gpus_and_nics_of_a_host() -> None:
    names = [*gpus(4), "NIC0", "NIC1"]

    def label(i: int, j: int) -> str:
        if i < 4 and j < 4:
            return "NV18"
        return "PIX" if {i, j} == {0, 4} else "NODE"

    text = spaced_matrix(
        names,
        label,
        {"CPU Affinity": ["0-47,96-143"] * 4, "NUMA Affinity": ["0"] * 4, "GPU NUMA ID": ["N/A"] * 4},
    )
    info = parsed("nvidia-smi", text + "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_bond_0\n")
    assert [device.name for device in info.devices] == [
        *(f"cuda:{i}" for i in range(4)), "nic:mlx5_0", "nic:mlx5_bond_0",
    ]  # fmt: skip
    assert {device.kind for device in info.devices[4:]} == {DeviceKind.NIC}
    assert all((gpu.numa_node, gpu.cpus) == (0, "0-47,96-143") for gpu in info.devices[:4])
    link = info.link("cuda:0", "nic:mlx5_0")
    assert link is not None
    assert (link.kind, link.provenance, link.confidence) == (
        LinkKind.PIX, "nvidia-smi topo -m", Confidence.REPORTED,
    )  # fmt: skip
    nvlink = info.link("cuda:3", "cuda:1")
    assert nvlink is not None
    assert nvlink.kind is LinkKind.NVLINK
    assert nvlink.bandwidth_bytes_per_s > 10 * link.bandwidth_bytes_per_s
    assert len(info.links) == 30


def test_tabs_escapes_and_empty_cells() -> None:
    behind = ["0-35\t0\t\tN/A", "0-35\t0\t\tN/A", "\t1\t\tN/A", "\t1\t\tN/A"]
    info = parsed("nvidia-smi", tabbed_matrix(gpus(4), lambda i, j: "NV18", behind))
    found = [(device.cpus, device.numa_node) for device in info.devices]
    assert found == [("0-35", 0), ("0-35", 0), ("", 1), ("", 1)]


def test_the_same_with_tabs_expanded() -> None:
    behind = ["0-35\t0\t\tN/A", "0-35\t0\t\tN/A", "\t1\t\tN/A", "\t1\t\tN/A"]
    text = tabbed_matrix(gpus(4), lambda i, j: "NV18", behind).replace("\x1b[4m", "").replace("\x1b[0m", "")
    info = parsed("nvidia-smi", text.expandtabs(8))
    found = [(device.cpus, device.numa_node) for device in info.devices]
    assert found == [("0-35", 0), ("0-35", 0), ("", 1), ("", 1)]


def test_a_tab_in_the_heading_alone() -> None:
    text = "\t" + spaced_matrix(gpus(2, "NPU"), lambda i, j: "HCCS", {"CPU Affinity": ["144-167", "0-23"]})
    info = parsed("npu-smi", text)
    assert [device.cpus for device in info.devices] == ["144-167", "0-23"]
    assert [device.numa_node for device in info.devices] == [None, None]
    assert {link.kind for link in info.links} == {LinkKind.VENDOR}


def test_a_container_sees_a_part_of_the_rows() -> None:
    names = ["Phy-ID2", "Phy-ID3", "Phy-ID12", "Phy-ID13"]
    text = spaced_matrix(names, lambda i, j: "SIO" if j < 2 else "HCCS_SW", rows=[0, 1])
    info = parsed("npu-smi", text)
    assert [device.name for device in info.devices] == ["npu:2", "npu:3", "npu:12", "npu:13"]
    assert details(info)["npu:12", "npu:2"] == "HCCS_SW"  # from the row of the other end
    assert ("npu:12", "npu:13") not in details(info)


def test_nothing_is_known_of_a_pair() -> None:
    names = ["NPU0", "NPU1", "NIC0"]
    text = spaced_matrix(names, lambda i, j: "UB" if i < 2 and j < 2 else "NA", tail="").rstrip("\n")
    info = parsed("npu-smi", text)
    assert details(info) == {("npu:0", "npu:1"): "UB", ("npu:1", "npu:0"): "UB"}
    assert info.devices[2].name == "nic:NIC0"


def test_the_node_stands_before_the_cpus() -> None:
    head = (
        "==== MetaX System Management Interface Log ====\n...\nAttached GPUs  : 8\nDevice link type matrix\n"
    )
    text = spaced_matrix(
        gpus(8),
        lambda i, j: "MX" if i // 4 == j // 4 else "NODE",
        {"Node Affinity": ["1"] * 8, "CPU Affinity": ["0-31,64-95"] * 8},
    )
    info = parsed("mx-smi", head + text)
    assert {(device.numa_node, device.cpus) for device in info.devices} == {(1, "0-31,64-95")}
    assert sum(link.kind is LinkKind.VENDOR for link in info.links) == 24


def test_fields_that_run_together_are_not_guessed() -> None:
    """Moore Threads' tool leaves no space between a long list of CPUs and the node."""
    cpus = ["0-31,64-95", "0-31,64-95", "32-63,96-1271"]
    nodes = ["0", "0"]
    text = spaced_matrix(gpus(3), lambda i, j: "MT2", {"CPU Affinity": cpus, "NUMA Affinity": nodes})
    info = parsed("mthreads-gmi", text)
    assert [(device.cpus, device.numa_node) for device in info.devices] == [
        ("0-31,64-95", 0), ("0-31,64-95", 0), ("", None),
    ]  # fmt: skip
    assert "GPU2" in info.missing["mthreads-gmi: affinity"]
    link = info.link("musa:0", "musa:2")
    assert link is not None
    assert (link.kind, link.confidence) == (LinkKind.VENDOR, Confidence.ASSUMED)
    one = parsed("mthreads-gmi", spaced_matrix(gpus(2), lambda i, j: "MT1")).link("musa:0", "musa:1")
    assert one is not None
    assert link.bandwidth_bytes_per_s == 2 * one.bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("name", "word", "near", "far"),
    [("cnmon", "MLU", "MLK/MUL", "CPU"), ("xpu-smi", "XPU", "XL", "SYS"), ("cnmon", "Card", "MLK", "MUL")],
)
def test_tools_without_recorded_output_are_marked(name: str, word: str, near: str, far: str) -> None:
    text = spaced_matrix(gpus(8, word), lambda i, j: near if i // 4 == j // 4 else far)
    info = parsed(name, text)
    assert {link.confidence for link in info.links} == {Confidence.ASSUMED}
    prefix = info.devices[0].name.partition(":")[0]
    for link in info.links:
        i, j = (int(end.removeprefix(f"{prefix}:")) for end in (link.source, link.target))
        assert (link.kind is LinkKind.VENDOR) == (i // 4 == j // 4)


def test_names_of_nics_as_columns_and_a_list_of_nodes() -> None:
    """Older drivers print the names; a Grace GPU names the node of its CPU, then those of its memory."""
    names = [*gpus(2), "rocep4s0f0", "hfi1_0", "erdma_0"]
    affinity = {
        "CPU Affinity": ["0-35", "36-71"],
        "NUMA Affinity": ["0,2-17", "1,18-33"],
        "GPU NUMA ID": ["N/A"] * 2,
    }
    info = parsed("nvidia-smi", spaced_matrix(names, lambda i, j: "SYS", affinity))
    assert [device.name for device in info.devices[2:]] == [f"nic:{name}" for name in names[2:]]
    assert [device.numa_node for device in info.devices[:2]] == [0, 1]


def test_a_word_that_nobody_explains_is_no_link() -> None:
    info = parsed("nvidia-smi", spaced_matrix(gpus(2), lambda i, j: "ZZZ"))
    assert not info.links
    assert "ZZZ" in "".join(info.missing)


@pytest.mark.parametrize("label", ["NV0", "NV", "NV1234", "NVx", "nv4", "MT0"])
def test_odd_numbers_of_links_are_no_links(label: str) -> None:
    assert not parsed("nvidia-smi", spaced_matrix(gpus(2), lambda i, j: label)).links


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no line of columns GPU0"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the driver", "no line of columns"),
        ("        GPU0    GPU1\n", "no rows"),
        ("        GPU0    GPU1\nGPU0    X\n", "1 cells for 2 columns"),
        ("        GPU0    GPU0\nGPU0    X   X\n", "twice"),
        ("   GPU0 GPU1\nGPU0 X PIX\nGPU0 X PIX\n", "two rows GPU0"),
    ],
)
def test_what_is_no_matrix(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parsed("nvidia-smi", text)


def test_intels_tool_of_the_same_name_is_not_read_as_kunluns() -> None:
    text = (
        "         GPU 0/0|GPU 0/1|CPU Affinity\nGPU 0/0  S       XL16   0-23\nGPU 0/1  XL16    S      0-23\n"
    )
    with pytest.raises(ValueError, match="XPU0"):
        parsed("xpu-smi", text)


WORDS = st.sampled_from(
    [
        *"X-=:|[]\t\n ",
        "GPU0",
        "GPU1",
        "NIC0",
        "NPU1",
        "PIX",
        "NV4",
        "CPU Affinity",
        "0-3",
        "hca_id:",
        "\x1b[4m",
        "==",
    ]
)


@given(st.sampled_from(RECORDED), st.one_of(st.text(), st.lists(WORDS).map(" ".join)))
def test_any_text_is_understood_or_a_value_error(name: str, text: str) -> None:
    if name == "p2pBandwidthLatencyTest":
        return
    try:
        info = parse_output(name, text)
    except ValueError:
        return
    assert isinstance(info, TopologyInfo)


LONG = [
    *("GPU0 " * 400_000, "GPU0 X\n" * 200_000, " " * 1_000_000, "\x1b[" * 400_000),
    *("=" * 1_000_000 + "x", "= " * 400_000),
]


@pytest.mark.parametrize("name", [name for name in RECORDED if name != "p2pBandwidthLatencyTest"])
def test_a_long_text_takes_linear_time(name: str) -> None:
    """The time limit of a test ends what is quadratic."""
    for text in LONG:
        with pytest.raises(ValueError):
            parse_output(name, text)
