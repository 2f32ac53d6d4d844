"""Where chips and their figures come from: variables, data sheets, files, NVML, the fleet file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sagellm.control_plane.chip_pool import RequestWork, visible_chips
from sagellm.control_plane.chip_pool.figures import with_figures, write_figures
from sagellm.control_plane.chip_pool.from_fleet import equal_cores, needs_of
from sagellm.control_plane.chip_pool.isolation import variable_of
from sagellm.control_plane.chip_pool.readings import ChipReading, read_chips
from sagellm.control_plane.fleet_instances import fleet_instances
from sagellm.core.config_layers import given_layer, resolve
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.chip_pool import ChipCapability
from sagellm.core.protocols.topology import Confidence, Device, DeviceKind, TopologyInfo
from sagellm.engines.chips import CHIP_FLOPS, CORE_FLOPS, known_chips, sheet_of
from tests.control_plane.chip_pool.machines import GIB, host


@pytest.mark.parametrize(
    ("listed", "names"),
    [("1,0", ["cuda:0", "cuda:1"]), ("2", ["cuda:2"]), ("", []), ("0,-1,2", ["cuda:0"]), (None, 3)],
)
def test_only_visible_chips_are_in_the_pool(listed: str | None, names: list[str] | int) -> None:
    chips = [chip for chip in host("fast fast fast").chips.values() if not chip.is_cpu]
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    found = [chip.name for chip in visible_chips(chips, environ)]
    assert found == names or len(found) == names


def test_chips_that_are_listed_by_other_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="list chips by number"):
        visible_chips(host("fast").chips.values(), {"CUDA_VISIBLE_DEVICES": "GPU-3f2a"})


@pytest.mark.parametrize(
    ("vendor", "variable"),
    [
        ("nvidia", "CUDA_VISIBLE_DEVICES"), ("huawei", "ASCEND_RT_VISIBLE_DEVICES"),
        ("cambricon", "MLU_VISIBLE_DEVICES"), ("mthreads", "MUSA_VISIBLE_DEVICES"),
        ("hygon", "HIP_VISIBLE_DEVICES"), ("amd", "HIP_VISIBLE_DEVICES"), ("unheard-of", None),
    ],
)  # fmt: skip
def test_the_variable_of_a_vendor(vendor: str, variable: str | None) -> None:
    assert variable_of(vendor) == variable


@pytest.mark.parametrize(
    ("model", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80g"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"), ("NVIDIA A100 80GB PCIe", "a100-80g"), ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("Ascend 910B4", "ascend-910b"),
    ],
)  # fmt: skip
def test_data_sheets_by_the_drivers_names(model: str, preset: str) -> None:
    sheet = sheet_of(model)
    assert sheet is not None and sheet.name == preset


def test_a_chip_that_is_in_no_table_has_assumed_figures() -> None:
    assert sheet_of("Sagittarius 9") is None
    topology = TopologyInfo(
        (
            Device("cpu:0", DeviceKind.CPU, memory_bytes=GIB), Device("cpu:1", DeviceKind.CPU),
            Device("cuda:0", DeviceKind.GPU, "nvidia", "Sagittarius 9", GIB), Device("nic:a", DeviceKind.NIC),
        )
    )  # fmt: skip
    cpu, gpu = known_chips(topology, {"cpu:0": 4})
    assert (cpu.flops, gpu.flops, gpu.confidence) == (4 * CORE_FLOPS, CHIP_FLOPS, Confidence.ASSUMED)


def test_figures_survive_a_file(tmp_path: Path) -> None:
    chips = list(host("fast small").chips.values())
    file = tmp_path / "chips.json"
    write_figures(file, [chip.measured(2e12, 3e9) for chip in chips])
    found = with_figures(chips, file)
    assert [(chip.flops, chip.bandwidth_bytes_per_s) for chip in found] == [(2e12, 3e9)] * 3
    assert {chip.confidence for chip in found} == {Confidence.MEASURED}
    other = ChipCapability("cuda:0", DeviceKind.GPU, GIB, 1e12, 1e9, "another model")
    assert with_figures([other], file) == [other]


@pytest.mark.parametrize("text", ["", "[]", '{"cuda:0": 1}', '{"cuda:0": {"model": "fast", "flops": -1}}'])
def test_a_file_that_holds_no_figures(tmp_path: Path, text: str) -> None:
    file = tmp_path / "chips.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="--measure --save"):
        with_figures(host("fast").chips.values(), file)


class FakeNvml:
    """Two GPUs, of which the second tells nothing."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, has_driver: bool = True) -> None:
        self._has_driver, self.is_open = has_driver, False

    def nvmlInit(self) -> None:  # noqa: N802
        if not self._has_driver:
            raise self.NVMLError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        return number

    def _of_first(self, handle: int, value: Any) -> Any:
        if handle:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return self._of_first(handle, SimpleNamespace(free=3 * GIB, total=4 * GIB))

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return self._of_first(handle, SimpleNamespace(gpu=70))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> Any:  # noqa: N802
        return self._of_first(handle, 250_000)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> Any:  # noqa: N802
        return self._of_first(handle, 61)


def test_readings_of_gpus() -> None:
    nvml = FakeNvml()
    first, second = read_chips(nvml)
    assert first == ChipReading("cuda:0", 3 * GIB, 4 * GIB, 0.7, 250.0, 61.0, None)
    assert second == ChipReading("cuda:1")
    assert not nvml.is_open


def test_without_a_driver_there_are_no_readings() -> None:
    with pytest.raises(ConfigError, match="Driver Not Loaded"):
        read_chips(FakeNvml(has_driver=False))


def test_needs_of_a_fleet_file() -> None:
    groups = {
        "prefill": {"type": "prefilling", "settings": {"parallel.tensor": 2}, "cores": 3},
        "decode": {"type": "decoding", "count": 2, "max_count": 3, "chips": 1, "chip_kind": "gpu"},
        "part": {"chips": 1, "shares_chips": True, "memory_gb": 8},
        "cpu": {"chips": 0, "chip_kind": "npu"},
        "far": {"servers": [{"url": "http://far"}]},
    }
    resolved = resolve([given_layer({"fleet.groups": groups})])
    pool = host("fast fast fast fast fast", num_cores=16)
    needs = needs_of(resolved, fleet_instances(resolved.config.fleet), pool, RequestWork())
    found = [(n.name, n.num_chips, n.kind, n.is_exclusive, n.memory_bytes // GIB, n.num_cores) for n in needs]
    assert found == [
        ("prefill-0", 2, None, True, 0, 3),
        ("decode-0", 1, DeviceKind.GPU, True, 0, 2),
        ("decode-1", 1, DeviceKind.GPU, True, 0, 2),
        ("part-0", 1, None, False, 8, 2),
        ("cpu-0", 0, None, True, 0, 2),
    ]
    pool.reserve(pool.assign(needs))
    pool.check()
    on_cpu = needs_of(resolved, fleet_instances(resolved.config.fleet), host(), RequestWork())
    assert [need.num_chips for need in on_cpu] == [0, 1, 1, 1, 0]


@pytest.mark.parametrize(("num_free", "each"), [(2, 0), (3, 0), (4, 1), (10, 3), (0, 0)])
def test_equal_cores_leave_one_for_the_front(num_free: int, each: int) -> None:
    fleet = resolve([given_layer({"fleet.groups": {"a": {"count": 3}}})]).config.fleet
    assert equal_cores(fleet, num_free) == each
