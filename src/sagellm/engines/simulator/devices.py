"""Accelerators for the cost model: memory and peaks, with the data sheet.

Peaks are dense (no structured sparsity) and with 32-bit accumulation. Steps reach a share of them, which
`Coefficients` say and `calibrate` measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sagellm.core.errors import ConfigError, nearest

GB, TB, GIB = 10**9, 10**12, 2**30
NVLINK_S, PCIE_S = 8e-6, 20e-6
"""Seconds of a small all-reduce between two devices, as collective libraries usually reach it."""
DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}
)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Bytes of memory, bytes per second in one direction, and FLOP/s by dtype.

    `memory_bytes` is the total that a driver reports, a little less than the sheet says. `link` leads to
    another device in the same machine, `network` to another machine. `link_latency_s`: seconds of a
    collective before it moves a byte; None means the usual value over NVLink or PCIe.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    pcie: float
    link: float
    network: float
    source: str
    nvme: float = 6.0 * GB
    link_latency_s: float | None = None

    def __post_init__(self) -> None:
        rates = (self.bandwidth, self.pcie, self.link, self.network, self.nvme, *self.flops.values())
        if self.memory_bytes < 1 or min(rates) <= 0 or not self.flops:
            raise ConfigError(f"device {self.name!r}: memory, bandwidths and peaks must be positive")

    @property
    def collective_s(self) -> float:
        """Seconds of a collective of no bytes."""
        if self.link_latency_s is not None:
            return self.link_latency_s
        return NVLINK_S if self.link > self.pcie else PCIE_S

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of matrix products; raises `ConfigError` for an unknown number format."""
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise ConfigError(f"device {self.name!r} has no peak for {dtype}; it has those for {known}")
        return self.flops[dtype]


def _tera(half: float, byte: float | None = None, single: float | None = None) -> Mapping[str, float]:
    """Peaks in FLOP/s from TFLOP/s of 16-bit floats, 8-bit formats and float32."""
    byte, single = byte or half, single or half / 2
    found = {"bfloat16": half, "float16": half, "float8_e4m3": byte, "int8": byte, "float32": single}
    return MappingProxyType({name: value * 1e12 for name, value in found.items()})


_GEN4, _GEN5 = 25.0 * GB, 50.0 * GB
_LAN = 12.5 * GB
_RDMA = 50.0 * GB

_DEVICES = (
    DeviceSpec("h100-80g", int(79.2 * GIB), 3352 * GB, _tera(989.4, 1978.9, 66.9), _GEN5, 450 * GB, _RDMA,
           "NVIDIA H100 Tensor Core GPU data sheet (2023), SXM5"),
    DeviceSpec("h100-pcie", int(79.2 * GIB), 2039 * GB, _tera(756.0, 1513.0, 51.2), _GEN5, _GEN5, _RDMA,
           "NVIDIA H100 Tensor Core GPU data sheet (2023), PCIe"),
    DeviceSpec("h200", int(139.8 * GIB), 4800 * GB, _tera(989.4, 1978.9, 66.9), _GEN5, 450 * GB, _RDMA,
           "NVIDIA H200 Tensor Core GPU data sheet (2024), SXM"),
    DeviceSpec("b200", int(178.4 * GIB), 8 * TB, _tera(2250.0, 4500.0, 75.0), _GEN5, 900 * GB, _RDMA,
           "NVIDIA DGX B200 data sheet (2024), per GPU"),
    DeviceSpec("a100-80g", int(79.2 * GIB), 2039 * GB, _tera(312.0, 624.0, 19.5), _GEN4, 300 * GB, 25 * GB,
           "NVIDIA A100 Tensor Core GPU data sheet (2021), 80 GB SXM; eight bits: int8"),
    DeviceSpec("a100-40g", int(39.4 * GIB), 1555 * GB, _tera(312.0, 624.0, 19.5), _GEN4, 300 * GB, 25 * GB,
           "NVIDIA A100 Tensor Core GPU data sheet (2021), 40 GB SXM; eight bits: int8"),
    DeviceSpec("a10", int(22.2 * GIB), 600 * GB, _tera(125.0, 250.0, 31.2), _GEN4, _GEN4, _LAN,
           "NVIDIA A10 data sheet (2021); eight bits: int8"),
    DeviceSpec("l4", int(22.2 * GIB), 300 * GB, _tera(121.0, 242.5, 30.3), _GEN4, _GEN4, _LAN,
           "NVIDIA L4 data sheet (2023)"),
    DeviceSpec("l40s", int(44.4 * GIB), 864 * GB, _tera(362.0, 733.0, 91.6), _GEN4, _GEN4, 25 * GB,
           "NVIDIA L40S data sheet (2023)"),
    DeviceSpec("rtx4090", int(23.5 * GIB), 1008 * GB, _tera(165.2, 330.3, 82.6), _GEN4, _GEN4, _LAN,
           "NVIDIA Ada GPU architecture paper (2023), GeForce RTX 4090"),
    DeviceSpec("rtx5090", int(31.4 * GIB), 1792 * GB, _tera(209.5, 419.0, 104.8), _GEN5, _GEN5, _LAN,
           "NVIDIA RTX Blackwell GPU architecture paper (2025), GeForce RTX 5090"),
    DeviceSpec("rtx-pro-6000", int(94.97 * GIB), 1792 * GB, _tera(503.8, 1007.6, 126.0), _GEN5, _GEN5,
           25 * GB, "NVIDIA RTX PRO 6000 Blackwell data sheet (2025)"),
    DeviceSpec("rtx-a6000", int(47.5 * GIB), 768 * GB, _tera(154.8, 309.7, 38.7), _GEN4, _GEN4, _LAN,
           "NVIDIA RTX A6000 data sheet (2021); eight bits: int8"),
    DeviceSpec("mi300x", int(191.5 * GIB), 5300 * GB, _tera(1307.4, 2614.9, 163.4), _GEN5, 448 * GB, _RDMA,
           "AMD Instinct MI300X data sheet (2023)"),
    DeviceSpec("ascend-910b", int(61.0 * GIB), 1600 * GB, _tera(376.0, 752.0, 94.0), _GEN4, 196 * GB, 25 * GB,
           "Huawei Atlas 800T A2 product page (2023), per NPU; bandwidth as reported by third parties"),
    DeviceSpec("ascend-310p", int(22.0 * GIB), 204 * GB, _tera(70.0, 140.0, 35.0), 12 * GB, 12 * GB, _LAN,
           "Huawei Atlas 300I Pro data sheet (2022)"),
)  # fmt: skip

DEVICES: Mapping[str, DeviceSpec] = MappingProxyType({device.name: device for device in _DEVICES})
"""Presets by name."""

_ALIASES = MappingProxyType(
    {"h100": "h100-80g", "h100-sxm": "h100-80g", "a100": "a100-80g", "rtxpro6000": "rtx-pro-6000",
     "rtx-4090": "rtx4090", "rtx-5090": "rtx5090", "4090": "rtx4090", "910b": "ascend-910b"}
)  # fmt: skip


def canonical(name: str) -> str:
    """The name in lower case with hyphens, as presets are named."""
    return "-".join(name.strip().lower().replace("_", " ").replace("-", " ").split())


def device(name: str) -> DeviceSpec:
    """A preset by name; letter case, `_` and `-` do not matter. Raises `ConfigError`."""
    short = canonical(name)
    for known, preset in DEVICES.items():
        if short == known or short.replace("-", "") == known.replace("-", ""):
            return preset
    if short in _ALIASES:
        return DEVICES[_ALIASES[short]]
    raise ConfigError(f"no device {name!r}.{nearest(short, [*DEVICES, *_ALIASES])}")
