"""MetaX: MX (MetaXLink) and MCCL."""

from __future__ import annotations

from sagellm.comm.interconnect.vendor import PCIE_LABELS, VendorInterconnect
from sagellm.core.protocols.interconnect import InterconnectInfo


class MetaX(VendorInterconnect):
    info = InterconnectInfo(
        vendor="MetaX",
        link="MX (MetaXLink)",
        library="MCCL",
        device_type="cuda",
        torch_module="",
        backend="nccl",
        visible_devices="CUDA_VISIBLE_DEVICES",
        device_files=("dev/mxcd",),
        topology_command=("mx-smi", "topo", "-n"),
        topology_labels={"MX": "MetaXLink", "ETH": "Ethernet", **PCIE_LABELS},
        sources=(
            "vLLM-metax, vllm_metax/platform.py (device type cuda, backend nccl, CUDA_VISIBLE_DEVICES)",
            "vLLM-MetaX documentation, quick start (device files; output of mx-smi)",
        ),
    )


PLUGIN = MetaX
