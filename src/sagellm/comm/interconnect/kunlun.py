"""Kunlunxin: XL and BKCL."""

from __future__ import annotations

from sagellm.comm.interconnect.vendor import PCIE_LABELS, VendorInterconnect
from sagellm.core.protocols.interconnect import InterconnectInfo


class Kunlun(VendorInterconnect):
    info = InterconnectInfo(
        vendor="Kunlunxin",
        link="XL",
        library="BKCL",
        device_type="cuda",
        torch_module="torch_xmlir",
        backend="nccl",
        visible_devices="XPU_VISIBLE_DEVICES",
        device_files=("dev/xpuctrl",),
        topology_command=("xpu-smi", "topo", "-m"),
        topology_labels={"XL": "the link between XPUs", **PCIE_LABELS},
        sources=(
            "vLLM-Kunlun, vllm_kunlun/platforms/kunlun.py (device type cuda, backend nccl)",
            "vLLM-Kunlun, environment variables (XPU_VISIBLE_DEVICES; some programs use CUDA's)",
            "PaddlePaddle documentation for Kunlun (device files)",
            "no recorded output of xpu-smi topo -m: labels from descriptions",
        ),
    )


PLUGIN = Kunlun
