"""Cambricon: MLU-Link and CNCL."""

from __future__ import annotations

from sagellm.comm.interconnect.vendor import VendorInterconnect
from sagellm.core.protocols.interconnect import InterconnectInfo


class Cambricon(VendorInterconnect):
    info = InterconnectInfo(
        vendor="Cambricon",
        link="MLU-Link",
        library="CNCL",
        device_type="mlu",
        torch_module="torch_mlu",
        backend="cncl",
        visible_devices="MLU_VISIBLE_DEVICES",
        device_files=("dev/cambricon_dev[0-9]*",),
        topology_command=("cnmon", "topo", "-m"),
        topology_labels={"MLK": "MLU-Link", "MUL": "several PCIe switches", "CPU": "through the CPU"},
        sources=(
            "torch_mlu, torch_mlu/distributed (cncl); accelerate, utils/modeling.py (torch.mlu.mem_get_info)",
            "Cambricon, magicmind_cloud (device files)",
            "no recorded output of cnmon topo -m: labels from descriptions",
        ),
    )


PLUGIN = Cambricon
