"""`rocm-smi --showtopo`, and `hy-smi`, which prints the same form."""

from __future__ import annotations

import pytest

from sagellm.comm.topology.manager import parse_output
from sagellm.core.protocols.topology import Confidence, LinkKind
from tests.comm.topology.recorded import rocm_text


def test_links_and_nodes_of_eight_gpus() -> None:
    text = rocm_text(8, lambda i, j: "XGMI", lambda i, j: 1, [i // 4 for i in range(8)])
    info = parse_output("rocm-smi", text)
    assert [(device.name, device.numa_node) for device in info.devices] == [
        (f"rocm:{i}", i // 4) for i in range(8)
    ]
    assert len(info.links) == 56
    assert {(link.kind, link.detail) for link in info.links} == {(LinkKind.VENDOR, "XGMI")}


def test_the_older_form_of_numa_lines() -> None:
    form = "{word} {i}          : (Topology) Numa Node: {node}"
    text = rocm_text(4, lambda i, j: "XGMI", lambda i, j: 1, [0, 1, 2, 3], node_form=form)
    assert [device.numa_node for device in parse_output("rocm-smi", text).devices] == [0, 1, 2, 3]


def test_a_node_of_minus_one_is_unknown_and_hops_cost_latency() -> None:
    text = rocm_text(
        3,
        lambda i, j: "XGMI" if {i, j} != {0, 2} else "PCIE",
        lambda i, j: 2 if {i, j} == {0, 2} else 1,
        [-1] * 3,
    )
    info = parse_output("rocm-smi", text)
    assert [device.numa_node for device in info.devices] == [None] * 3
    near, far = info.link("rocm:0", "rocm:1"), info.link("rocm:0", "rocm:2")
    assert near is not None
    assert far is not None
    assert near.kind is LinkKind.VENDOR
    assert (far.kind, far.detail) == (LinkKind.NODE, "PCIE x2")
    assert far.latency_s > near.latency_s


def test_pcie_between_nodes_is_sys_and_else_a_guess() -> None:
    text = rocm_text(4, lambda i, j: "PCIE", lambda i, j: 2, [0, 0, 1, 1])
    info = parse_output("rocm-smi", text)
    near, far = info.link("rocm:0", "rocm:1"), info.link("rocm:0", "rocm:2")
    assert near is not None
    assert far is not None
    assert (near.kind, near.confidence) == (LinkKind.NODE, Confidence.ASSUMED)
    assert (far.kind, far.confidence) == (LinkKind.SYS, Confidence.REPORTED)


def test_hygons_lines_have_no_colon() -> None:
    form = "{word}[{i}]          : (Topology) Numa Node {node}"
    text = rocm_text(2, lambda i, j: "HSW", lambda i, j: 1, [0, 1], word="HCU", node_form=form)
    assert [device.numa_node for device in parse_output("hy-smi", text).devices] == [0, 1]


def test_hygons_labels() -> None:
    text = rocm_text(8, lambda i, j: "HSW", lambda i, j: 1, [i // 4 for i in range(8)], word="HCU")
    info = parse_output("hy-smi", text)
    assert [device.name for device in info.devices] == [f"hcu:{i}" for i in range(8)]
    assert {(link.detail, link.confidence) for link in info.links} == {("HSW", Confidence.ASSUMED)}


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="Link Type between two"):
        parse_output("rocm-smi", "ERROR: no amdgpu driver")
    text = rocm_text(2, lambda i, j: "XGMI", lambda i, j: 1, [0, 0]).replace("XGMI         0", "XGMI")
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        parse_output("rocm-smi", text)
