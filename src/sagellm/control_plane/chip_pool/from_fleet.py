"""What the instances of a fleet file ask of a chip pool."""

from __future__ import annotations

from collections.abc import Iterable

from sagellm.control_plane.chip_pool.needs import InstanceNeeds, RequestWork
from sagellm.control_plane.chip_pool.pool import GIB, ChipPool
from sagellm.control_plane.fleet_instances import FleetInstance, instance_config
from sagellm.core.config import Config
from sagellm.core.config_layers import Resolved
from sagellm.core.fleet_config import FleetConfig, GroupConfig
from sagellm.core.protocols.topology import DeviceKind

CPU = "cpu"


def needs_of(
    resolved: Resolved, instances: Iterable[FleetInstance], pool: ChipPool, work: RequestWork
) -> list[InstanceNeeds]:
    """The needs of those instances that this host starts.

    Without `chips`, an instance gets one for each rank where the host has accelerators. Without `cores`, it
    gets an equal share of the free cores, with room for what autoscaling may add and a core for the front;
    where there are too few, such instances share all that is left.
    """
    fleet = resolved.config.fleet
    cores = equal_cores(fleet, pool.num_free_cores())
    found = []
    for instance in instances:
        if instance.is_local:
            group, config = fleet.groups[instance.group], instance_config(resolved, instance.group)
            num_chips = _num_chips(group, config, pool)
            found.append(
                InstanceNeeds(
                    instance.name,
                    instance.type,
                    num_chips,
                    None if group.chip_kind == "any" or not num_chips else DeviceKind(group.chip_kind),
                    frozenset(group.chip_names),
                    not group.shares_chips,
                    int((group.memory_gb or 0.0) * GIB),
                    cores if group.cores is None else group.cores,
                    work,
                )
            )
    return found


def equal_cores(fleet: FleetConfig, num_free: int) -> int:
    """Cores of an instance whose group names none; 0: too few to have some each."""
    local = [group for group in fleet.groups.values() if group.is_local]
    most = {id(group): max(group.num_instances, group.max_count or 0) for group in local}
    given = sum(most[id(group)] * group.cores for group in local if group.cores is not None)
    number = sum(most[id(group)] for group in local if group.cores is None)
    return max(0, num_free - given - 1) // number if number else 0


def _num_chips(group: GroupConfig, config: Config, pool: ChipPool) -> int:
    if group.chips is not None:
        return group.chips
    has_chips = any(not chip.is_cpu for chip in pool.chips.values())
    return config.parallel.num_ranks if has_chips and config.model.device != CPU else 0
