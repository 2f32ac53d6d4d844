"""The pool of this host."""

from __future__ import annotations

from sagellm.control_plane.chip_pool import InstanceNeeds
from sagellm.core.cores import usable_cores
from sagellm.core.fleet_config import FleetConfig
from sagellm.core.protocols.topology import Device, DeviceKind, TopologyInfo
from sagellm.serving.fleet.chips import host_pool


def test_the_pool_has_the_cores_that_this_process_may_use() -> None:
    pool = host_pool(FleetConfig())
    assert pool.num_free_cores() == usable_cores()
    lease = pool.assign([InstanceNeeds("a", num_chips=0)]).lease("a")
    assert len(lease.cores) == usable_cores()


def test_chips_come_from_the_topology_and_its_data_sheets() -> None:
    topology = TopologyInfo(
        (
            Device("cpu:0", DeviceKind.CPU, memory_bytes=2**30, numa_node=0, cpus="0-1023"),
            Device("cuda:0", DeviceKind.GPU, "nvidia", "NVIDIA H100 80GB HBM3", 80 << 30, 0),
        )
    )
    pool = host_pool(FleetConfig(), topology)
    assert pool.chips["cuda:0"].flops == 989.4e12
    assert pool.assign([InstanceNeeds("a")]).lease("a").environment["CUDA_VISIBLE_DEVICES"] == "0"
