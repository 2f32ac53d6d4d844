"""Output of `ibv_devinfo`: state and link layer of RDMA devices."""

from __future__ import annotations

import re

from sagellm.core.protocols.topology import Device, DeviceKind, TopologyInfo

COMMAND = ("ibv_devinfo",)
ACTIVE, INFINIBAND = "ACTIVE", "InfiniBand"
_FIELD = re.compile(r"\s*(\w+):\s+(\S+)(?:\s.*)?")
_NO_GUID = re.compile(r"[0:]*")


def is_fabric_port(link_layer: str, image_guid: str) -> bool | None:
    """Whether a port is of a fabric; None where that is not said.

    An Ethernet port without a system image GUID is the virtual function of a cloud's network.
    """
    if link_layer == "Ethernet":
        return not _NO_GUID.fullmatch(image_guid)
    return True if link_layer == INFINIBAND else None


def parse_ibv_devinfo(text: str) -> TopologyInfo:
    """NICs with their first active port, or their first one, without links.

    Raises `ValueError` where no device is named; 'No IB devices found' is no device.
    """
    devices: list[dict[str, str]] = []
    ports: list[list[dict[str, str]]] = []
    for line in text.splitlines():
        match = _FIELD.fullmatch(line)
        if match is None:
            continue
        name, value = match[1], match[2]
        if name == "hca_id":
            devices.append({})
            ports.append([])
        elif name == "port" and devices:
            ports[-1].append({})
        if devices:
            (ports[-1][-1] if ports[-1] else devices[-1]).setdefault(name, value)
    if not devices and "No IB devices" not in text:
        raise ValueError("no line 'hca_id: ...' in the output of ibv_devinfo")
    return TopologyInfo(tuple(map(_device, devices, ports)))


def _device(fields: dict[str, str], ports: list[dict[str, str]]) -> Device:
    found = [(port.get("state", "").removeprefix("PORT_"), port.get("link_layer", "")) for port in ports]
    state, layer = next((port for port in found if port[0] == ACTIVE), found[0] if found else ("", ""))
    return Device(
        f"nic:{fields['hca_id']}",
        DeviceKind.NIC,
        state=state,
        link_layer=layer,
        is_fabric=is_fabric_port(layer, fields.get("sys_image_guid", "")),
    )
