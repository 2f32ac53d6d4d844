"""Output of `ibv_devinfo`: state and link layer of RDMA devices."""

from __future__ import annotations

import re

from sagellm.core.protocols.topology import Device, DeviceKind, TopologyInfo

COMMAND = ("ibv_devinfo",)
ACTIVE = "ACTIVE"
_FIELD = re.compile(r"\s*(\w+):\s+(\S+)(?:\s.*)?")
_NO_GUID = re.compile(r"[0:]*")


def parse_ibv_devinfo(text: str) -> TopologyInfo:
    """NICs with the state of their first port, without links.

    An Ethernet port without a system image GUID is the virtual function of a cloud's network, not of a
    fabric. Raises `ValueError` where no device is named; 'No IB devices found' is no device.
    """
    devices: list[dict[str, str]] = []
    for line in text.splitlines():
        match = _FIELD.fullmatch(line)
        if match is None:
            continue
        if match[1] == "hca_id":
            devices.append({})
        if devices:
            devices[-1].setdefault(match[1], match[2])
    if not devices and "No IB devices" not in text:
        raise ValueError("no line 'hca_id: ...' in the output of ibv_devinfo")
    return TopologyInfo(tuple(_device(fields) for fields in devices))


def _device(fields: dict[str, str]) -> Device:
    state = fields.get("state", "").removeprefix("PORT_")
    layer = fields.get("link_layer", "")
    has_guid = not _NO_GUID.fullmatch(fields.get("sys_image_guid", ""))
    return Device(
        f"nic:{fields['hca_id']}",
        DeviceKind.NIC,
        state=state,
        link_layer=layer,
        is_fabric=layer == "InfiniBand" or (has_guid if layer == "Ethernet" else None),
    )
