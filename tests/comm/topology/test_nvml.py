"""NVIDIA's library, with a stand-in for the machine."""

# ruff: noqa: N802 - the names are the library's

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sagellm.comm.topology.nvml import read_nvml
from sagellm.core.protocols.topology import LinkKind

SWITCH, CPU = "00000000:0F:00.0", "00000000:0C:00.0"


class NVMLError(Exception):
    """As the package's own."""


class FakeNvml:
    """`ends[i]`: bus ids at the other ends of the NVLinks of GPU i. `level`, `p2p`: of all pairs."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, ends: list[list[str]], level: int = 50, p2p: int = 0, version: int = 6) -> None:
        self._ends, self._level, self._p2p, self._version = ends, level, p2p, version
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self._ends)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=bus(handle).encode())

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 << 30)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= len(self._ends[handle]):
            raise NVMLError("Not Supported")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(busId=self._ends[handle][link])

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return {SWITCH: 2, CPU: 1}.get(self._ends[handle][link], 0)

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        return self._version

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return self._level

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        assert type(index) is int
        assert index == 0
        return self._p2p


def bus(number: int) -> str:
    return f"00000000:{0x53 + 0x11 * number:02X}:00.0"


def test_gpus_behind_switches_reach_each_other_with_all_links() -> None:
    fake = FakeNvml([[SWITCH] * 18] * 4)
    info = read_nvml(fake)
    assert not fake.is_open
    assert [(device.name, device.pci) for device in info.devices][:2] == [
        ("cuda:0", "0000:53:00.0"), ("cuda:1", "0000:64:00.0"),
    ]  # fmt: skip
    assert info.devices[0].memory_bytes == 80 << 30
    assert len(info.links) == 12
    assert {(link.kind, link.detail, link.provenance) for link in info.links} == {
        (LinkKind.NVLINK, "NV18", "NVML")
    }


def test_direct_links_are_counted_by_pair() -> None:
    fake = FakeNvml([[bus(1)] * 2 + [bus(2)], [bus(0)] * 2, [bus(0)]])
    details = {(link.source, link.target): link.detail for link in read_nvml(fake).links}
    assert details["cuda:0", "cuda:1"] == details["cuda:1", "cuda:0"] == "NV2"
    assert details["cuda:0", "cuda:2"] == "NV1"
    assert details["cuda:1", "cuda:2"] == "SYS"


def test_links_that_end_at_other_gpus_or_cpus_join_nothing_here() -> None:
    elsewhere = [bus(7)] * 4
    for ends in ([elsewhere, elsewhere], [[CPU] * 3, [CPU] * 3], [[SWITCH] * 4, []]):
        assert {link.detail for link in read_nvml(FakeNvml(ends)).links} == {"SYS"}


def test_a_lost_gpu_does_not_cost_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(self: FakeNvml, number: int) -> int:
        if number == 1:
            raise NVMLError("GPU is lost")
        return number

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetHandleByIndex", handle)
    info = read_nvml(FakeNvml([[SWITCH], [SWITCH], [SWITCH]]))
    assert [device.name for device in info.devices] == ["cuda:0", "cuda:2"]
    assert len(info.links) == 2


@pytest.mark.parametrize(
    ("level", "kind"),
    [
        (0, LinkKind.PIX),
        (10, LinkKind.PIX),
        (20, LinkKind.PXB),
        (30, LinkKind.PHB),
        (40, LinkKind.NODE),
        (50, LinkKind.SYS),
    ],
)
def test_levels_of_the_pci_tree(level: int, kind: LinkKind) -> None:
    assert {link.kind for link in read_nvml(FakeNvml([[], []], level)).links} == {kind}


def test_a_pair_without_peer_access_is_slower() -> None:
    [with_p2p, _] = read_nvml(FakeNvml([[], []], 30)).links
    [without, _] = read_nvml(FakeNvml([[], []], 30, p2p=5)).links
    assert without.bandwidth_bytes_per_s == with_p2p.bandwidth_bytes_per_s / 2
    assert "without P2P" in without.detail


def test_blackwells_links_are_twice_as_fast() -> None:
    [old, _] = read_nvml(FakeNvml([[SWITCH], [SWITCH]])).links
    [new, _] = read_nvml(FakeNvml([[SWITCH], [SWITCH]], version=7)).links
    assert new.bandwidth_bytes_per_s == 2 * old.bandwidth_bytes_per_s


def test_what_a_gpu_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NVMLError("Insufficient Permissions")

    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetName", "nvmlDeviceGetTopologyCommonAncestor"):
        monkeypatch.setattr(FakeNvml, name, refuse)
    info = read_nvml(FakeNvml([[], []]))
    assert [(device.model, device.memory_bytes) for device in info.devices] == [("", 0)] * 2
    assert not info.links
