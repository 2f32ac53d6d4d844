"""The chip pool of this host, and what a request costs on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.comm.topology.manager import SystemTopology
from sagellm.control_plane.chip_pool import ChipPool, RequestWork, visible_chips
from sagellm.control_plane.chip_pool.figures import with_figures
from sagellm.control_plane.chip_pool.reservations import cores_by_node
from sagellm.core.cores import usable_physical_cores
from sagellm.core.fleet_config import FleetConfig
from sagellm.core.numa import numbers_of
from sagellm.core.protocols.topology import DeviceKind, TopologyInfo
from sagellm.engines.chips import known_chips, measured_chips

if TYPE_CHECKING:
    from sagellm.engines.native.footprint import Footprint


def host_pool(fleet: FleetConfig, topology: TopologyInfo | None = None, *, measure: bool = False) -> ChipPool:
    """The chips and cores that this process may use, with nothing reserved.

    Figures come from `fleet.chips_file`, or with `measure` from a benchmark now, which loads torch;
    otherwise from data sheets.
    """
    found = SystemTopology().detect() if topology is None else topology
    cores = usable_physical_cores()
    nodes = {d.name: numbers_of(d.cpus) for d in found.devices if d.kind is DeviceKind.CPU and d.cpus}
    homes = list(cores_by_node(cores, nodes).values())
    chips = visible_chips(known_chips(found, {name: homes.count(name) for name in nodes}))
    if measure:
        chips = measured_chips(chips)
    elif fleet.chips_file is not None:
        chips = with_figures(chips, Path(fleet.chips_file))
    return ChipPool(chips, found, cores)


def request_work(size: Footprint) -> RequestWork:
    """What a usual request costs with that model."""
    return RequestWork(
        num_params=size.num_parameters,
        weight_bytes=size.weight_bytes,
        kv_bytes_per_token=size.kv_bytes_per_token,
    )
