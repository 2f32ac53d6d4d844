"""The contract of interconnects, for every registered name, on emulated chips.

The vendor's torch is emulated (`tests/comm/interconnect/emulated_vendor.py`), its backend is gloo under the
vendor's name, and the collectives are those of `comm/collectives`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sagellm.comm.topology.tools import tool_named
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.collectives import CommBackendProtocol, ReduceOp
from sagellm.core.protocols.interconnect import ChipKernels, DomesticCommBackend, Maturity
from sagellm.core.registry import registry
from tests.comm.interconnect.emulated_vendor import emulated, on_ranks

NAMES = registry("interconnect").names()
VENDORS = [name for name in NAMES if name != "emulated"]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def chip(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DomesticCommBackend:
    return emulated(name, tmp_path, monkeypatch)


def test_the_vendors_of_the_issue_are_there() -> None:
    assert {"ascend", "cambricon", "hygon", "iluvatar", "kunlun", "metax", "moore_threads"} <= {*NAMES}


def test_a_row_is_whole_and_claims_name_their_source(chip: DomesticCommBackend) -> None:
    info = chip.info
    assert info.vendor
    assert info.link
    assert info.library
    assert info.sources
    assert re.fullmatch("[a-z]+", info.device_type)
    assert re.fullmatch("[a-z]+", info.backend)
    assert isinstance(info.maturity, Maturity)
    assert isinstance(info.kernels, ChipKernels)
    assert all(not pattern.startswith("/") for pattern in info.device_files)
    if info.claimed is not None:
        assert info.claimed.bytes_per_s > 0
        assert info.claimed.source
        assert re.fullmatch(r"\d{4}(-\d\d){0,2}", info.claimed.date)


@pytest.mark.parametrize("name", VENDORS)
def test_the_topology_module_understands_the_command_and_the_labels(name: str) -> None:
    info = registry("interconnect").create(name).info
    command, *_ = info.topology_command
    tool = tool_named(command)
    if tool is None:  # ixsmi: no output of it is known
        assert name == "iluvatar"
        return
    assert tool.command == info.topology_command
    assert {*tool.labels} <= {*info.topology_labels}


def test_the_hooks(chip: DomesticCommBackend) -> None:
    assert chip.is_available().usable
    count = chip.device_count()
    assert count >= 2
    chip.set_device(count - 1)
    for index in (0, count - 1):
        memory = chip.memory_info(index)
        assert 0 < memory.free_bytes <= memory.total_bytes
    for wrong in (-1, count):
        for hook in (chip.set_device, chip.memory_info):
            with pytest.raises(ConfigError, match=f"{wrong}: {count} devices are"):
                hook(wrong)


@pytest.mark.parametrize("extended", [False, True], ids=["plain", "extended"])
def test_collectives_over_the_vendors_backend(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, extended: bool
) -> None:
    """Vendors register their backend in either form of torch's API."""
    chip = emulated(name, tmp_path, monkeypatch, extended=extended)

    def work(group: CommBackendProtocol) -> list[torch.Tensor]:
        buffer = torch.arange(5, dtype=torch.float32) + group.rank
        group.all_reduce(buffer).wait()
        largest = torch.tensor([group.rank], dtype=torch.int64)
        group.all_reduce(largest, ReduceOp.MAX).wait()
        gathered = torch.empty(4, dtype=torch.float64)
        group.all_gather(gathered, torch.full((2,), float(group.rank), dtype=torch.float64)).wait()
        piece = torch.empty(2)
        group.reduce_scatter(piece, torch.arange(4.0)).wait()
        handed = torch.tensor([7 + group.rank])
        group.broadcast(handed, 1).wait()
        swapped = torch.empty(2, dtype=torch.int32)
        group.all_to_all(
            swapped, torch.tensor([10 * group.rank, 10 * group.rank + 1], dtype=torch.int32)
        ).wait()
        met = torch.zeros(3)
        if group.rank:
            group.send(torch.ones(3), 0, tag=4).wait()
        else:
            group.recv(met, 1, tag=4).wait()
        group.barrier().wait()
        return [buffer, largest, gathered, piece, handed, swapped, met]

    def make(rank: int, store: object) -> CommBackendProtocol:
        return chip.init_process_group(rank, 2, store, timeout_s=30.0)

    first, second = on_ranks(make, work)
    for rank, found in enumerate((first, second)):
        buffer, largest, gathered, piece, handed, swapped, met = found
        assert buffer.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]
        assert largest.tolist() == [1]
        assert gathered.tolist() == [0.0, 0.0, 1.0, 1.0]
        assert piece.tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]
        assert handed.tolist() == [8]
        assert swapped.tolist() == [[0, 10], [1, 11]][rank]
        assert met.tolist() == [[1.0] * 3, [0.0] * 3][rank]
