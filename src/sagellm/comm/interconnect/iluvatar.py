"""Iluvatar CoreX: ixLink and ixCCL."""

from __future__ import annotations

from sagellm.comm.interconnect.vendor import PCIE_LABELS, VendorInterconnect
from sagellm.core.protocols.interconnect import InterconnectInfo


class Iluvatar(VendorInterconnect):
    info = InterconnectInfo(
        vendor="Iluvatar CoreX",
        link="ixLink",
        library="ixCCL",
        device_type="cuda",
        torch_module="",
        backend="nccl",
        visible_devices="CUDA_VISIBLE_DEVICES",
        device_files=("dev/iluvatar[0-9]*",),
        topology_command=("ixsmi", "topo", "-m"),
        topology_labels=PCIE_LABELS,
        sources=(
            "FlagOS container instructions (device files, ixsmi); CoreX brings its build of torch, type cuda",
            "no recorded output of ixsmi topo -m: labels as nvidia-smi has them",
        ),
    )


PLUGIN = Iluvatar
