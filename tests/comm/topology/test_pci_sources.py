"""`/sys` and hwloc's XML: the same PCI tree, told in two ways."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sagellm.comm.topology.hwloc import parse_hwloc
from sagellm.comm.topology.placement import best_group, host_node, nearest_nics
from sagellm.comm.topology.sysfs import read_sysfs
from sagellm.core.protocols.topology import DeviceKind, LinkKind, TopologyInfo

GPU, VGA, MLX, ENA, BRIDGE = (
    (0x0302, 0x10DE),
    (0x0300, 0x1D0F),
    (0x0207, 0x15B3),
    (0x0200, 0x1D0F),
    (0x0604, 0x1000),
)


@dataclass
class Function:
    """A PCI function below bridges. `names`: its RDMA devices; `nets`: its network interfaces."""

    bus: str
    kind: tuple[int, int]
    bridges: tuple[str, ...]
    node: int
    names: tuple[str, ...] = ()
    nets: tuple[str, ...] = ()
    port: dict[str, str] = field(default_factory=dict)
    speed: str = "32.0 GT/s PCIe"


# Two NUMA nodes. On the first, a switch with GPU and NIC, a second switch below the same root port, and a
# root port of its own on the same host bridge; then another host bridge.
ROOT_PORT = ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
ACTIVE = {"state": "4: ACTIVE", "link_layer": "InfiniBand", "guid": "1070:fd03:006b:341c"}
MACHINE = [
    Function("0000:04:00.0", GPU, (*ROOT_PORT, "0000:02:00.0", "0000:03:00.0"), 0),
    Function(
        "0000:05:00.0", MLX, (*ROOT_PORT, "0000:02:00.0", "0000:03:01.0"), 0,
        ("mlx5_0",), ("ib0",), ACTIVE,
    ),
    Function("0000:08:00.0", GPU, (*ROOT_PORT, "0000:02:01.0", "0000:07:00.0"), 0),
    Function("0000:0a:00.0", GPU, ("pci0000:00", "0000:00:02.0"), 0, speed="16.0 GT/s PCIe"),
    Function("0000:0b:00.0", VGA, ("pci0000:00", "0000:00:03.0"), 0),
    Function("0000:0c:00.0", ENA, ("pci0000:00", "0000:00:04.0"), 0, nets=("eth0",)),
    Function("0000:40:00.0", GPU, ("pci0000:40", "0000:40:01.0"), 0),
    Function("0000:80:00.0", GPU, ("pci0000:80", "0000:80:01.0"), 1),
    Function(
        "0000:81:00.0", MLX, ("pci0000:80", "0000:80:02.0"), 1, ("mlx5_1",), ("eth1",),
        {"state": "4: ACTIVE", "link_layer": "Ethernet", "guid": "0000:0000:0000:0000"},
    ),
]  # fmt: skip


def as_sysfs(root: Path) -> Path:
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")

    for node, cpus in enumerate(("0-3,8", "4-7")):
        folder = root / f"sys/devices/system/node/node{node}"
        write(folder / "cpulist", cpus)
        write(folder / "meminfo", f"Node {node} MemTotal:       {(node + 1) << 20} kB")
        write(folder / "distance", "10 20" if node == 0 else "20 10")
    for each in MACHINE:
        folder = root.joinpath("sys/devices", *each.bridges, each.bus)
        write(folder / "class", f"0x{each.kind[0]:04x}00")
        write(folder / "vendor", f"0x{each.kind[1]:04x}")
        write(folder / "numa_node", str(each.node))
        write(folder / "max_link_speed", each.speed)
        write(folder / "max_link_width", "16")
        for name in each.nets:
            (folder / "net" / name).mkdir(parents=True)
        for name in each.names:
            write(folder / "infiniband" / name / "ports/1/state", each.port["state"])
            write(folder / "infiniband" / name / "ports/1/link_layer", each.port["link_layer"])
            write(folder / "infiniband" / name / "sys_image_guid", each.port["guid"])
        link = root / "sys/bus/pci/devices" / each.bus
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
    return root


def as_hwloc() -> str:
    """In hwloc 2 a node is a child of its package, beside the bridges."""

    def function(each: Function) -> str:
        inner = "".join(f'<object type="OSDev" name="{name}" osdev_type="3"/>' for name in each.names)
        inner += "".join(f'<object type="OSDev" name="{name}" osdev_type="2"/>' for name in each.nets)
        kind = f"{each.kind[0]:04x} [{each.kind[1]:04x}:0001] [0000:0000] 00"
        text = f'<object type="PCIDev" pci_busid="{each.bus}" pci_type="{kind}" pci_link_speed="63.0">'
        text += f"{inner}</object>"
        for bridge in reversed(each.bridges[1:]):
            text = f'<object type="Bridge" bridge_type="1-1" pci_busid="{bridge}">{text}</object>'
        return f'<object type="Bridge" bridge_type="0-1" bridge_pci="{each.bridges[0]}">{text}</object>'

    packages = ""
    for node, cpuset in enumerate(("0x0000010f", "0x000000f0")):
        inside = "".join(function(each) for each in MACHINE if each.node == node)
        memory = (
            f'<object type="NUMANode" os_index="{node}" cpuset="{cpuset}" local_memory="{(node + 1) << 30}"/>'
        )
        packages += f'<object type="Package" os_index="{node}">{memory}{inside}</object>'
    return (
        '<?xml version="1.0"?><!DOCTYPE topology SYSTEM "hwloc2.dtd"><topology version="2.0">'
        f'<object type="Machine" os_index="0">{packages}</object></topology>'
    )


@pytest.fixture(params=["sysfs", "hwloc"])
def info(request: pytest.FixtureRequest, tmp_path: Path) -> TopologyInfo:
    return read_sysfs(as_sysfs(tmp_path)) if request.param == "sysfs" else parse_hwloc(as_hwloc())


def test_devices_and_where_they_are(info: TopologyInfo) -> None:
    gpus = [device for device in info.devices if device.kind is DeviceKind.GPU]
    assert [(gpu.name, gpu.pci, gpu.numa_node, gpu.cpus) for gpu in gpus] == [
        ("cuda:0", "0000:04:00.0", 0, "0-3,8"),
        ("cuda:1", "0000:08:00.0", 0, "0-3,8"),
        ("cuda:2", "0000:0a:00.0", 0, "0-3,8"),
        ("cuda:3", "0000:40:00.0", 0, "0-3,8"),
        ("cuda:4", "0000:80:00.0", 1, "4-7"),
    ]  # the console's VGA is none
    assert {device.name for device in info.devices if device.kind is DeviceKind.NIC} == {
        "nic:mlx5_0", "nic:mlx5_1", "nic:eth0",
    }  # fmt: skip
    assert [(info.device(f"cpu:{i}").memory_bytes, info.device(f"cpu:{i}").cpus) for i in (0, 1)] == [
        (1 << 30, "0-3,8"), (2 << 30, "4-7"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ("cuda:0", "nic:mlx5_0", LinkKind.PIX),
        ("cuda:0", "cuda:1", LinkKind.PXB),
        ("cuda:0", "cuda:2", LinkKind.PHB),
        ("cuda:0", "cuda:3", LinkKind.NODE),
        ("cuda:0", "cuda:4", LinkKind.SYS),
        ("cuda:4", "nic:mlx5_1", LinkKind.PHB),
        ("cuda:4", "cpu:1", LinkKind.PHB),
    ],
)
def test_kinds_of_paths(info: TopologyInfo, source: str, target: str, kind: LinkKind) -> None:
    for pair in ((source, target), (target, source)):
        link = info.link(*pair)
        assert link is not None
        assert link.kind is kind


def test_what_follows(info: TopologyInfo) -> None:
    assert nearest_nics(info, "cuda:0") == ["nic:mlx5_0"]
    assert nearest_nics(info, "cuda:2") == ["nic:mlx5_0"]  # not the network of the host
    assert [host_node(info, f"cuda:{i}") for i in range(5)] == [0, 0, 0, 0, 1]
    group = best_group(info, 2)
    assert group is not None
    assert group.names == ("cuda:0", "cuda:1")


def test_a_slower_link_is_seen_in_sys(tmp_path: Path) -> None:
    info = read_sysfs(as_sysfs(tmp_path))
    fast, slow = info.link("cuda:0", "cuda:1"), info.link("cuda:2", "cpu:0")
    assert fast is not None
    assert slow is not None
    assert fast.bandwidth_bytes_per_s == pytest.approx(63.0e9 * 0.83, rel=0.01)
    assert slow.bandwidth_bytes_per_s == pytest.approx(31.5e9 * 0.83 * 0.98, rel=0.01)


def test_an_ethernet_port_without_guid_is_no_fabric(tmp_path: Path) -> None:
    info = read_sysfs(as_sysfs(tmp_path))
    assert info.device("nic:mlx5_0").is_fabric
    assert info.device("nic:mlx5_1").is_fabric is False
    assert info.device("nic:eth0").is_fabric is False
    assert info.device("nic:mlx5_0").state == "ACTIVE"


def test_an_idle_gpus_slow_link_is_not_believed() -> None:
    info = parse_hwloc(as_hwloc().replace('pci_link_speed="63.0"', 'pci_link_speed="2.0"'))
    link = info.link("cuda:0", "cuda:1")
    assert link is not None
    assert link.bandwidth_bytes_per_s > 2e10


def test_what_a_guest_has_is_not_counted(tmp_path: Path) -> None:
    root = as_sysfs(tmp_path)
    devices = root / "sys/bus/pci/devices"
    (devices / "0000:08:00.0" / "physfn").symlink_to(devices / "0000:04:00.0")
    (root / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
    (devices / "0000:0a:00.0" / "driver").symlink_to(root / "sys/bus/pci/drivers/vfio-pci")
    info = read_sysfs(root)
    found = [device.pci for device in info.devices if device.kind is DeviceKind.GPU]
    assert found == ["0000:04:00.0", "0000:40:00.0", "0000:80:00.0"]


def test_the_active_port_of_two_counts(tmp_path: Path) -> None:
    ports = as_sysfs(tmp_path) / "sys/bus/pci/devices/0000:05:00.0/infiniband/mlx5_0/ports"
    (ports / "1/state").write_text("1: DOWN\n")
    (ports / "2").mkdir()
    (ports / "2/state").write_text("4: ACTIVE\n")
    (ports / "2/link_layer").write_text("InfiniBand\n")
    assert read_sysfs(tmp_path).device("nic:mlx5_0").state == "ACTIVE"


def test_a_list_of_cpus_that_makes_no_sense(tmp_path: Path) -> None:
    root = as_sysfs(tmp_path)
    (root / "sys/devices/system/node/node0/cpulist").write_text("0-x\n")
    assert read_sysfs(root).device("cpu:0").cpus == ""


def test_bridges_beside_nodes_have_no_node_in_hwloc_1() -> None:
    """In form 1.11 packages are inside nodes, and a bridge below the machine is at no node."""
    bridge = '<object type="Bridge" bridge_pci="0000:[10-11]"><object type="PCIDev" pci_busid="0000:10:00.0"'
    bridge += ' pci_type="0302 [10de:2330] [0000:0000] a1"/></object>'
    package = '<object type="Package"/>'
    nodes = "".join(
        f'<object type="NUMANode" os_index="{i}" cpuset="0x0f">{package}</object>' for i in (0, 1)
    )
    beside, inside = nodes + bridge, nodes.replace(package, bridge, 1)
    for text, node in ((beside, None), (inside, 0)):
        info = parse_hwloc(f'<topology><object type="Machine">{text}</object></topology>')
        assert info.device("cuda:0").numa_node == node


def test_a_machine_without_sys(tmp_path: Path) -> None:
    info = read_sysfs(tmp_path)
    assert [device.name for device in info.devices] == ["cpu:0"]
    assert "/sys/bus/pci" in info.missing


def test_a_virtual_nic(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/pci0000:00/0000:00:03.0"
    (folder / "virtio2/net/eth0").mkdir(parents=True)
    for name, text in {"class": "0x020000", "vendor": "0x1af4", "numa_node": "-1"}.items():
        (folder / name).write_text(text, encoding="ascii")
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:00:03.0").symlink_to(folder)
    info = read_sysfs(tmp_path)
    assert [device.name for device in info.devices] == ["cpu:0", "nic:eth0"]
    assert info.link("nic:eth0", "cpu:0") is not None  # there is no other memory


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no xml", "no XML"),
        ("<system version='2'/>", "lstopo"),
        ('<!DOCTYPE t [<!ENTITY a "b">]><topology>&a;</topology>', "entities"),
        ("<topology>" + '<object type="Group">' * 100 + "</object>" * 100 + "</topology>", "nested deeper"),
    ],
)
def test_what_is_no_hwloc_xml(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_hwloc(text)
