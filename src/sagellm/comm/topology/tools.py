"""Vendors' chips and the commands that print how they are joined: one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from sagellm.comm.topology.estimates import Estimate, network, pcie, vendor_link
from sagellm.core.protocols.topology import DeviceKind, LinkKind


class OutputForm(Enum):
    """How a tool prints links: one matrix, or ROCm's blocks."""

    MATRIX = "matrix"
    ROCM = "rocm"


@dataclass(frozen=True, slots=True)
class Tool:
    """A vendor's chips and its command.

    `prefix` begins the names of its devices; `pci_vendors` and `pci_classes` (class and subclass) say which
    PCI devices they are, and `is_in_pci_order` that the tool numbers them by PCI id. `rows`: what the tool
    calls its devices. `labels`: its own words for links, beside NVIDIA's words for PCIe. `is_assumed`: no
    recorded output was at hand, so the form is a reconstruction from descriptions.
    """

    name: str
    command: tuple[str, ...]
    vendor: str
    prefix: str
    kind: DeviceKind
    pci_vendors: tuple[int, ...]
    pci_classes: tuple[int, ...] = (0x0300, 0x0302, 0x0380, 0x0B40, 0x1200)
    is_in_pci_order: bool = False
    rows: tuple[str, ...] = ("GPU",)
    labels: Mapping[str, Estimate] = field(default_factory=dict)
    form: OutputForm = OutputForm.MATRIX
    is_assumed: bool = False

    @property
    def provenance(self) -> str:
        """What is named as the source of a link."""
        return " ".join(word for word in self.command if word != "-n")


_MULTIPLE_SWITCHES, _THROUGH_CPU = pcie(LinkKind.PXB), pcie(LinkKind.NODE)
_ROCM_LABELS = {"XGMI": vendor_link(50.0), "PCIE": _THROUGH_CPU}

TOOLS: tuple[Tool, ...] = (
    Tool(
        "nvidia-smi", ("nvidia-smi", "topo", "-m"), "nvidia", "cuda", DeviceKind.GPU, (0x10DE,),
        pci_classes=(0x0300, 0x0302), is_in_pci_order=True,
    ),
    Tool(
        "npu-smi", ("npu-smi", "info", "-t", "topo"), "huawei", "npu", DeviceKind.NPU, (0x19E5,),
        pci_classes=(0x1200,), rows=("NPU", "Phy-ID"),
        labels={
            "HCCS": vendor_link(28.0), "HCCS_SW": vendor_link(28.0), "SIO": vendor_link(200.0),
            "UB": vendor_link(50.0),
        },
    ),
    Tool(
        "mx-smi", ("mx-smi", "topo", "-n"), "metax", "maca", DeviceKind.GPU, (0x9999,),
        labels={"MX": vendor_link(50.0), "ETH": network()},
    ),
    Tool(
        "rocm-smi", ("rocm-smi", "--showtopo"), "amd", "rocm", DeviceKind.GPU, (0x1002,),
        pci_classes=(0x0302, 0x0380, 0x1200), labels=_ROCM_LABELS, form=OutputForm.ROCM,
    ),
    Tool(
        "hy-smi", ("hy-smi", "--showtopo"), "hygon", "hcu", DeviceKind.GPU, (0x1D94,), rows=("HCU", "GPU"),
        labels={**_ROCM_LABELS, "HSW": vendor_link(50.0)}, form=OutputForm.ROCM, is_assumed=True,
    ),
    Tool(
        "cnmon", ("cnmon", "topo", "-m"), "cambricon", "mlu", DeviceKind.NPU, (0xCABC,), rows=("MLU", "Card"),
        labels={"MLK": vendor_link(25.0), "MUL": _MULTIPLE_SWITCHES, "CPU": _THROUGH_CPU}, is_assumed=True,
    ),
    Tool(
        "xpu-smi", ("xpu-smi", "topo", "-m"), "kunlun", "xpu", DeviceKind.NPU, (0x1D22,), rows=("XPU",),
        labels={"XL": vendor_link(25.0)}, is_assumed=True,
    ),
    Tool(
        "mthreads-gmi", ("mthreads-gmi", "topo", "-m"), "mthreads", "musa", DeviceKind.GPU, (0x1ED5,),
        labels={"MT#": vendor_link(25.0)}, is_assumed=True,
    ),
)  # fmt: skip
"""Rates of vendors' links are orders of magnitude, no vendor's claim: they put them before PCIe."""


def tool_named(name: str) -> Tool | None:
    return next((tool for tool in TOOLS if tool.name == name), None)
