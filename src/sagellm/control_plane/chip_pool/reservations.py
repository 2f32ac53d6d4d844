"""The books of a chip pool: which instance holds which chips, cores and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.chip_pool import ChipCapability

Core = tuple[int, ...]
"""The CPUs (hyperthreads) of a physical core."""


@dataclass(frozen=True, slots=True)
class ChipLease:
    """What an instance holds from its reservation until it is released, which its owner's death causes.

    It does not expire: a process that is silent may still use its chips. `chips`: accelerators, or the
    NUMA node's CPU chip. `memory_bytes`: of each of them; it is counted, the process itself has to keep
    to it. `cores` are its own if `has_own_cores`, else shared with others. `environment`: variables with
    which the process sees its chips alone, numbered from 0.
    """

    owner: str
    chips: tuple[str, ...]
    is_exclusive: bool = True
    memory_bytes: int = 0
    cores: frozenset[Core] = frozenset()
    has_own_cores: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def cpus(self) -> frozenset[int]:
        """For `core.cores.keep_to` in the instance's process."""
        return frozenset(cpu for core in self.cores for cpu in core)


class Reservations:
    """Leases on chips and cores; adds one only if it takes nothing that another holds."""

    def __init__(
        self,
        chips: Mapping[str, ChipCapability],
        cores: Mapping[Core, str],
        leases: Iterable[ChipLease] = (),
    ) -> None:
        self._chips, self._cores = chips, cores
        self._leases: dict[str, ChipLease] = {}
        for lease in leases:
            self.add(lease)

    @property
    def leases(self) -> Mapping[str, ChipLease]:
        """By owner."""
        return dict(self._leases)

    def copy(self) -> Reservations:
        made = Reservations(self._chips, self._cores)
        made._leases = dict(self._leases)
        return made

    def add(self, lease: ChipLease) -> None:
        """Raises `BookkeepingError` for a lease that overlaps another, and nothing has changed."""
        if lease.owner in self._leases:
            raise BookkeepingError(f"{lease.owner} has a lease: release it first")
        self._leases[lease.owner] = lease
        try:
            self.check()
        except BookkeepingError:
            del self._leases[lease.owner]
            raise

    def remove(self, owner: str) -> bool:
        return self._leases.pop(owner, None) is not None

    def holders(self, chip: str) -> list[ChipLease]:
        return [lease for lease in self._leases.values() if chip in lease.chips]

    def free_chips(self) -> list[ChipCapability]:
        """Accelerators that no instance is on."""
        held = {name for lease in self._leases.values() for name in lease.chips}
        return [chip for name, chip in self._chips.items() if not chip.is_cpu and name not in held]

    def bytes_left(self, chip: str) -> int:
        return self._chips[chip].memory_bytes - sum(lease.memory_bytes for lease in self.holders(chip))

    def free_cores(self, node: str | None = None) -> list[Core]:
        """Cores that no instance runs on, of one node or of all, in order."""
        return self._cores_but({core for lease in self._leases.values() for core in lease.cores}, node)

    def common_cores(self, node: str | None = None) -> list[Core]:
        """Cores that no instance has for itself: free ones, and those that several share."""
        own = {core for lease in self._leases.values() if lease.has_own_cores for core in lease.cores}
        return self._cores_but(own, node)

    def _cores_but(self, taken: set[Core], node: str | None) -> list[Core]:
        return [
            core for core, home in self._cores.items() if core not in taken and node in (None, home)
        ]

    def check(self) -> None:
        """No exclusive chip and no own core has two holders; memory covers all leases. Linear in them."""
        on_chip: Counter[str] = Counter()
        exclusive: set[str] = set()
        used: Counter[str] = Counter()
        on_core: Counter[Core] = Counter()
        own: set[Core] = set()
        for lease in self._leases.values():
            unknown = [name for name in lease.chips if name not in self._chips]
            if unknown or not lease.cores <= self._cores.keys():
                raise BookkeepingError(f"{lease.owner} holds what is not in the pool: {unknown or 'cores'}")
            for name in lease.chips:
                used[name] += lease.memory_bytes
                if not self._chips[name].is_cpu:
                    on_chip[name] += 1
                    exclusive |= {name} if lease.is_exclusive else set()
            on_core.update(lease.cores)
            own |= lease.cores if lease.has_own_cores else set()
        _none_twice(exclusive, on_chip, "chip")
        _none_twice(own, on_core, "core")
        for name, size in used.items():
            if size > self._chips[name].memory_bytes:
                raise BookkeepingError(f"{name}: {size} bytes are reserved of {self._chips[name].memory_bytes}")


def _none_twice(names: Iterable[object], count: Mapping[object, int], what: str) -> None:
    twice = [name for name in names if count[name] > 1]
    if twice:
        raise BookkeepingError(f"{what} {twice[0]} has one owner and {count[twice[0]] - 1} more")


def cores_by_node(cores: Sequence[Core], cpus_of: Mapping[str, set[int]]) -> dict[Core, str]:
    """The CPU chip of each core; the first one for cores of which no source says."""
    first = next(iter(cpus_of), "")
    return {core: next((name for name, cpus in cpus_of.items() if core[0] in cpus), first) for core in cores}
