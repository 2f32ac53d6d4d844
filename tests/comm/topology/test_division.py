"""Tensor parallelism over near links, pipelines over PCIe, as few devices as hold the model."""

from __future__ import annotations

import pytest

from sagellm.comm.topology.division import Division, best_division
from sagellm.comm.topology.manager import read_recorded
from sagellm.core.protocols.topology import TopologyInfo
from tests.comm.topology.recorded import gpus, spaced_matrix

GB = 1 << 30
SIZES = (1, 2, 4, 8)


def host(near: str, far: str, count: int = 8) -> TopologyInfo:
    text = spaced_matrix(gpus(count), lambda i, j: near if i // 4 == j // 4 else far)
    return read_recorded([("nvidia-smi", text)])


def free(gigabytes: int, count: int = 8) -> dict[str, int]:
    return {f"cuda:{i}": gigabytes * GB for i in range(count)}


@pytest.mark.parametrize(
    ("near", "far", "needed", "tensor", "pipeline"),
    [
        ("NV18", "NV18", 60, 1, 1),
        ("NV18", "NV18", 100, 2, 1),
        ("NV18", "NV18", 300, 4, 1),  # three would hold it, and do not divide the model
        ("NV18", "NV18", 600, 8, 1),
        ("NV4", "SYS", 300, 4, 1),
        ("NV4", "SYS", 600, 1, 8),
        ("PIX", "SYS", 100, 1, 2),
        ("PIX", "SYS", 200, 1, 3),
    ],
)
def test_divisions(near: str, far: str, needed: int, tensor: int, pipeline: int) -> None:
    found = best_division(host(near, far), free(80), needed * GB, SIZES, 32)
    assert found is not None
    assert (found.tensor, found.pipeline) == (tensor, pipeline)
    assert found.devices == tuple(f"cuda:{i}" for i in range(tensor * pipeline))


def test_devices_that_are_in_use_are_left_out() -> None:
    info = host("NV18", "NV18")
    found = best_division(info, {**free(80), "cuda:0": GB}, 100 * GB, SIZES, 32)
    assert found == Division(("cuda:1", "cuda:2"), 2, 1, "their own links join them all")
    assert best_division(info, {"cuda:7": 80 * GB}, GB, SIZES, 32) == Division(
        ("cuda:7",), 1, 1, "it fits one device"
    )


def test_what_fits_nowhere() -> None:
    assert best_division(host("NV18", "NV18"), free(80), 700 * GB, SIZES, 32) is None
    assert best_division(host("PIX", "SYS"), free(80), 600 * GB, SIZES, 4) is None
    assert best_division(host("NV18", "NV18"), {}, GB, SIZES, 32) is None
