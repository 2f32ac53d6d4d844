"""Huawei Ascend: HCCS and HCCL."""

from __future__ import annotations

from sagellm.comm.interconnect.vendor import PCIE_LABELS, VendorInterconnect
from sagellm.core.protocols.interconnect import InterconnectInfo


class Ascend(VendorInterconnect):
    info = InterconnectInfo(
        vendor="Huawei Ascend",
        link="HCCS",
        library="HCCL",
        device_type="npu",
        torch_module="torch_npu",
        backend="hccl",
        visible_devices="ASCEND_RT_VISIBLE_DEVICES",
        device_files=("dev/davinci[0-9]*",),
        topology_command=("npu-smi", "info", "-t", "topo"),
        topology_labels={
            "HCCS": "HCCS",
            "HCCS_SW": "HCCS through a switch",
            "SIO": "two dies of one chip",
            "UB": "UB, of Ascend 950",
            **PCIE_LABELS,
        },
        sources=(
            "CANN documentation, aclrtGetDevicesTopo (labels)",
            "op-plugin documentation, gitcode.com/Ascend (torch_npu, torch.npu.set_device, hccl)",
            "vLLM Ascend, vllm_ascend/platform.py (ASCEND_RT_VISIBLE_DEVICES)",
        ),
    )


PLUGIN = Ascend
