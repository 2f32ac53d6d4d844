"""`ChipPool`: gives the instances of a host chips and cores, and takes them back when an instance ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sagellm.comm.topology.placement import best_group, host_node
from sagellm.control_plane.chip_pool.isolation import environment_of
from sagellm.control_plane.chip_pool.needs import InstanceNeeds, stage_weights
from sagellm.control_plane.chip_pool.reservations import ChipLease, Core, Reservations, cores_by_node
from sagellm.control_plane.chip_pool.search import cheapest
from sagellm.core.errors import CapacityError, ConfigError
from sagellm.core.numa import numbers_of
from sagellm.core.protocols.chip_pool import ChipCapability
from sagellm.core.protocols.topology import TopologyInfo

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Assignment:
    """Leases for instances, and for each of them why. Nothing is reserved by it."""

    leases: tuple[ChipLease, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def lease(self, owner: str) -> ChipLease:
        return next(lease for lease in self.leases if lease.owner == owner)


class ChipPool:
    """The chips and physical cores of one host.

    Every chip is a device of `topology`. A process that ends must be `release`d by the one that started it;
    until then its chips stay reserved.
    """

    def __init__(
        self, chips: Iterable[ChipCapability], topology: TopologyInfo, cores: Sequence[Core]
    ) -> None:
        self.chips = {chip.name: chip for chip in chips}
        self._topology = topology
        nodes = {name: numbers_of(topology.device(name).cpus) for name in self.chips if self.chips[name].is_cpu}
        self._cores = cores_by_node(cores, nodes)
        self._reserved = Reservations(self.chips, self._cores)

    @property
    def leases(self) -> Mapping[str, ChipLease]:
        """By owner."""
        return self._reserved.leases

    def num_free_cores(self) -> int:
        return len(self._reserved.free_cores())

    def assign(self, needs: Sequence[InstanceNeeds]) -> Assignment:
        """Chips and cores for all of `needs` from what is free, at the least time of a mean request.

        Raises `CapacityError` if not all fit, and says what would; `ConfigError` for names that are taken.
        """
        taken = [each.name for each in needs if each.name in self.leases]
        if taken or len({each.name for each in needs}) < len(needs):
            raise ConfigError(f"instances need names of their own: {taken or [each.name for each in needs]}")
        draft = _Draft(self._topology, self.chips, self._cores, self._reserved.copy(), needs)
        draft.place_exclusive()
        draft.place_shared()
        draft.place_on_cpu()
        draft.share_cores()
        by_owner = draft.reserved.leases
        leases = tuple(
            replace(
                by_owner[each.name],
                environment=environment_of(self._accelerators(by_owner[each.name]), self.chips.values()),
            )
            for each in needs
        )
        return Assignment(leases, draft.reasons)

    def reserve(self, assignment: Assignment) -> None:
        """Take all of its leases. Raises `BookkeepingError` if one overlaps, and nothing has changed."""
        after = self._reserved.copy()
        for lease in assignment.leases:
            after.add(lease)
        self._reserved = after

    def release(self, owner: str) -> bool:
        """Give back what an instance that has ended holds; False if it holds nothing."""
        return self._reserved.remove(owner)

    def check(self) -> None:
        """Raises `BookkeepingError` where reservations overlap."""
        self._reserved.check()

    def _accelerators(self, lease: ChipLease) -> list[ChipCapability]:
        return [self.chips[name] for name in lease.chips if not self.chips[name].is_cpu]


class _Draft:
    """One assignment while it is made: leases are added to a copy of the books."""

    def __init__(
        self,
        topology: TopologyInfo,
        chips: Mapping[str, ChipCapability],
        cores: Mapping[Core, str],
        reserved: Reservations,
        needs: Sequence[InstanceNeeds],
    ) -> None:
        self._topology, self._chips, self._cores = topology, chips, cores
        self.reserved, self._needs = reserved, needs
        self._weights = dict(zip([each.name for each in needs], stage_weights(needs), strict=True))
        self.reasons: dict[str, str] = {}

    def _those(self, is_wanted: Callable[[InstanceNeeds], bool]) -> list[InstanceNeeds]:
        """Of `needs`, the largest first."""
        found = [each for each in self._needs if is_wanted(each)]
        return sorted(found, key=lambda each: (-each.num_chips, -each.num_cores, -each.memory_bytes))

    # -- accelerators

    def place_exclusive(self) -> None:
        """Whole chips: first which class of equal chips, then which of it, by their links."""
        needs = self._those(lambda each: each.num_chips > 0 and each.is_exclusive)
        classes: dict[tuple[object, ...], list[ChipCapability]] = {}
        for chip in self.reserved.free_chips():
            fits = tuple(each.takes(chip) for each in needs)
            classes.setdefault((chip.kind, chip.vendor, chip.model, fits), []).append(chip)
        groups = list(classes.values())
        costs = [
            {
                number: self._cost(each, _slowest(group))
                for number, group in enumerate(groups)
                if each.takes(group[0])
            }
            for each in needs
        ]
        chosen = cheapest(costs, [(each.num_chips, 0) for each in needs], [(len(g), 0) for g in groups])
        if len(chosen) < len(needs):
            raise self._refusal(needs[len(chosen)])
        for each, cost, number in zip(needs, costs, chosen, strict=True):
            self._take(each, groups[number])
            self._explain(each, {groups[other][0].model or groups[other][0].name: cost[other] for other in cost})

    def _take(self, need: InstanceNeeds, group: Sequence[ChipCapability]) -> None:
        free = {chip.name for chip in self.reserved.free_chips()}
        names = [chip.name for chip in group if chip.name in free]
        found = best_group(self._topology, need.num_chips, names)
        if found is None:
            raise CapacityError(
                f"{need.name} needs {need.num_chips} chips that are joined, and no link is known between so "
                f"many of {', '.join(names)}: `sagellm topo` shows the links; chips: 1 needs none"
            )
        own = self._own_cores(need, found.names[0])
        self.reserved.add(
            ChipLease(need.name, found.names, True, need.memory_bytes, own, bool(own))
        )

    def place_shared(self) -> None:
        """A part of a chip each: the chip on which a request takes least, with all that are on it."""
        for need in self._those(lambda each: each.num_chips > 0 and not each.is_exclusive):
            costs = {}
            for name, chip in self._chips.items():
                holders = self.reserved.holders(name)
                is_open = need.takes(chip) and not any(lease.is_exclusive for lease in holders)
                if is_open and self.reserved.bytes_left(name) >= need.memory_bytes:
                    costs[name] = self._cost(need, chip, 1 / (len(holders) + 1))
            if not costs:
                raise self._refusal(need)
            chosen = min(costs, key=lambda name: costs[name])
            own = self._own_cores(need, chosen)
            self.reserved.add(ChipLease(need.name, (chosen,), False, need.memory_bytes, own, bool(own)))
            self._explain(need, costs)

    def _own_cores(self, need: InstanceNeeds, chip: str) -> frozenset[Core]:
        """Of free cores, those of the NUMA node that is nearest to the chip come first."""
        node = host_node(self._topology, chip)
        free = sorted(self.reserved.free_cores(), key=lambda core: self._cores[core] != f"cpu:{node}")
        if len(free) < need.num_cores:
            raise self._refusal(need)
        return frozenset(free[: need.num_cores])

    # -- CPU cores

    def place_on_cpu(self) -> None:
        """Instances on CPU cores: which NUMA node, by cores and memory."""
        needs = self._those(lambda each: each.num_chips == 0)
        nodes = [chip for chip in self._chips.values() if chip.is_cpu]
        costs = [
            {
                number: self._cost(each, node, max(1, each.num_cores) / self._num_cores(node.name))
                for number, node in enumerate(nodes)
                if each.takes(node) and (each.num_cores or self.reserved.common_cores(node.name))
            }
            for each in needs
        ]
        room = [(len(self.reserved.free_cores(n.name)), self.reserved.bytes_left(n.name)) for n in nodes]
        chosen = cheapest(costs, [(each.num_cores, each.memory_bytes) for each in needs], room)
        if len(chosen) < len(needs):
            raise self._refusal(needs[len(chosen)])
        for each, cost, number in zip(needs, costs, chosen, strict=True):
            name = nodes[number].name
            own = frozenset(self.reserved.free_cores(name)[: each.num_cores])
            lease = ChipLease(each.name, (name,), False, each.memory_bytes, own, bool(own))
            self.reserved.add(lease)
            self._explain(each, {nodes[other].name: cost[other] for other in cost})

    def share_cores(self) -> None:
        """Instances without cores of their own run on all cores that are left on their node, or elsewhere."""
        for need in self._those(lambda each: each.num_cores == 0):
            lease = self.reserved.leases[need.name]
            chip = lease.chips[0]
            node = chip if self._chips[chip].is_cpu else f"cpu:{host_node(self._topology, chip)}"
            cores = self.reserved.common_cores(node) or self.reserved.common_cores()
            if not cores:
                raise self._refusal(need)
            self.reserved.remove(need.name)
            self.reserved.add(replace(lease, cores=frozenset(cores)))

    def _num_cores(self, node: str) -> int:
        return max(1, sum(home == node for home in self._cores.values()))

    # -- words

    def _cost(self, need: InstanceNeeds, chip: ChipCapability, share: float = 1.0) -> float:
        return self._weights[need.name] * need.request_s(chip, share)

    def _explain(self, need: InstanceNeeds, costs: Mapping[str, float]) -> None:
        weight = self._weights[need.name]
        lease = self.reserved.leases[need.name]
        times = [f"{name} {cost / weight * 1e3:.3g} ms" for name, cost in sorted(costs.items(), key=_second)]
        self.reasons[need.name] = f"{', '.join(lease.chips)}: a request as {need.type.value} takes on " + (
            ", ".join(times)
        )

    def _refusal(self, need: InstanceNeeds) -> CapacityError:
        kind = "chip" if need.kind is None else need.kind.value
        what = f"{need.num_chips} {kind}(s)" if need.num_chips else "CPU cores"
        if need.memory_bytes:
            what += f" with {need.memory_bytes / GIB:.1f} GiB" + (" each" if need.num_chips > 1 else "")
        if need.num_cores:
            what += f" and {need.num_cores} core(s)"
        states = [self._state(need, chip) for chip in self._chips.values() if chip.is_cpu == (not need.num_chips)]
        num_placed = sum(each.name in self.reserved.leases for each in self._needs)
        return CapacityError(
            f"{need.name} needs {what}; there is {'; '.join(states) or 'none'}; "
            f"{len(self.reserved.free_cores())} core(s) are free. {num_placed} of {len(self._needs)} instances "
            f"have a place: {self._remedy(need)}"
        )

    def _state(self, need: InstanceNeeds, chip: ChipCapability) -> str:
        holders = ", ".join(lease.owner for lease in self.reserved.holders(chip.name))
        size = f"{self.reserved.bytes_left(chip.name) / GIB:.1f} GiB left"
        excluded = need.kind not in (None, chip.kind) or (need.chip_names and chip.name not in need.chip_names)
        return f"{chip.name} ({'not asked for' if excluded else f'of {holders}' if holders else 'free'}, {size})"

    def _remedy(self, need: InstanceNeeds) -> str:
        fitting = [chip for chip in self._chips.values() if need.takes(chip)]
        if need.num_chips and not fitting:
            return "chips with less memory would do with more of them for each instance, or a smaller model"
        if need.num_chips:
            return "fewer instances, fewer chips for each, or shares_chips with memory_gb would do"
        return "fewer instances, or fewer cores or less memory for each, would do"


def _slowest(group: Sequence[ChipCapability]) -> ChipCapability:
    """Equal chips are as fast as the slowest of them, since measurements differ."""
    return replace(
        group[0],
        flops=min(chip.flops for chip in group),
        bandwidth_bytes_per_s=min(chip.bandwidth_bytes_per_s for chip in group),
    )


def _second(pair: tuple[str, float]) -> float:
    return pair[1]
