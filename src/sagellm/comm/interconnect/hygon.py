"""Hygon DCU: xGMI and RCCL."""

from __future__ import annotations

from sagellm.comm.interconnect.vendor import VendorInterconnect
from sagellm.core.protocols.interconnect import InterconnectInfo


class Hygon(VendorInterconnect):
    info = InterconnectInfo(
        vendor="Hygon DCU",
        link="xGMI",
        library="RCCL",
        device_type="cuda",
        torch_module="",
        backend="nccl",
        visible_devices="HIP_VISIBLE_DEVICES",
        device_files=("dev/mkfd",),
        topology_command=("hy-smi", "--showtopo"),
        topology_labels={"XGMI": "xGMI", "HSW": "a switch of HCUs", "PCIE": "PCIe"},
        sources=(
            "public container instructions for DCU images (device files)",
            "PyTorch documentation of HIP builds, as DTK's is (device type cuda, RCCL under the name nccl)",
            "ROCm documentation (HIP_VISIBLE_DEVICES)",
            "no recorded output of hy-smi --showtopo: labels as rocm-smi has them",
        ),
    )


PLUGIN = Hygon
