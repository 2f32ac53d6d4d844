"""Moore Threads: MTLink and MCCL."""

from __future__ import annotations

from sagellm.comm.interconnect.vendor import PCIE_LABELS, VendorInterconnect
from sagellm.core.protocols.interconnect import InterconnectInfo


class MooreThreads(VendorInterconnect):
    info = InterconnectInfo(
        vendor="Moore Threads",
        link="MTLink",
        library="MCCL",
        device_type="musa",
        torch_module="torch_musa",
        backend="mccl",
        visible_devices="MUSA_VISIBLE_DEVICES",
        device_files=("dev/mtgpu[0-9]*", "dev/mtgpu.[0-9]*"),
        topology_command=("mthreads-gmi", "topo", "-m"),
        topology_labels={"MT#": "so many MTLinks", **PCIE_LABELS},
        sources=(
            "torch_musa, README (musa, mccl)",
            "torchada, README (MUSA_VISIBLE_DEVICES)",
            "FlagOS container instructions, docs.mthreads.com (device files)",
            "no recorded output of mthreads-gmi topo -m: labels from descriptions",
        ),
    )


PLUGIN = MooreThreads
