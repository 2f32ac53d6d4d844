"""The books of a chip pool: which instance holds which chips, cores and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
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
        self._on_chip: dict[str, dict[str, ChipLease]] = {name: {} for name in chips}
        self._on_core: Counter[Core] = Counter()
        self._own_cores: set[Core] = set()
        for lease in leases:
            self.add(lease)

    @property
    def leases(self) -> Mapping[str, ChipLease]:
        """By owner."""
        return dict(self._leases)

    def copy(self) -> Reservations:
        return Reservations(self._chips, self._cores, self._leases.values())

    def add(self, lease: ChipLease) -> None:
        """Raises `BookkeepingError` for a lease that overlaps another, and nothing has changed."""
        if lease.owner in self._leases:
            raise BookkeepingError(f"{lease.owner} has a lease: release it first")
        for name in lease.chips:
            self._check_chip(lease, name)
        for core in lease.cores:
            if core not in self._cores:
                raise BookkeepingError(f"{lease.owner} holds core {core}, which is not in the pool")
            if core in self._own_cores or (lease.has_own_cores and self._on_core[core]):
                raise BookkeepingError(f"{lease.owner} holds core {core}, which another has")
        self._leases[lease.owner] = lease
        for name in lease.chips:
            self._on_chip[name][lease.owner] = lease
        self._on_core.update(lease.cores)
        self._own_cores |= lease.cores if lease.has_own_cores else set()

    def _check_chip(self, lease: ChipLease, name: str) -> None:
        if name not in self._chips:
            raise BookkeepingError(f"{lease.owner} holds {name}, which is not in the pool")
        if lease.memory_bytes > self.bytes_left(name):
            raise BookkeepingError(f"{lease.owner}: {name} has {self.bytes_left(name)} bytes left")
        others = self._on_chip[name].values()
        if not self._chips[name].is_cpu and others and (lease.is_exclusive or any(o.is_exclusive for o in others)):
            raise BookkeepingError(f"{lease.owner} holds {name}, which {', '.join(o.owner for o in others)} has")

    def remove(self, owner: str) -> bool:
        lease = self._leases.pop(owner, None)
        if lease is None:
            return False
        for name in lease.chips:
            del self._on_chip[name][owner]
        self._on_core -= Counter(lease.cores)
        self._own_cores -= lease.cores if lease.has_own_cores else set()
        return True

    def holders(self, chip: str) -> Collection[ChipLease]:
        return self._on_chip[chip].values()

    def free_chips(self) -> list[ChipCapability]:
        """Accelerators that no instance is on."""
        return [chip for name, chip in self._chips.items() if not chip.is_cpu and not self._on_chip[name]]

    def bytes_left(self, chip: str) -> int:
        return self._chips[chip].memory_bytes - sum(lease.memory_bytes for lease in self.holders(chip))

    def free_cores(self, node: str | None = None) -> list[Core]:
        """Cores that no instance runs on, of one node or of all, in order."""
        return [c for c, home in self._cores.items() if not self._on_core[c] and node in (None, home)]

    def common_cores(self, node: str | None = None) -> list[Core]:
        """Cores that no instance has for itself: free ones, and those that several share."""
        return [c for c, home in self._cores.items() if c not in self._own_cores and node in (None, home)]

    def check(self) -> None:
        """No exclusive chip and no own core has two holders, and memory covers all leases.

        Counts all of it anew from the leases. Raises `BookkeepingError`.
        """
        anew = Reservations(self._chips, self._cores, self._leases.values())
        books = (self._on_chip, +self._on_core, self._own_cores)
        if books != (anew._on_chip, +anew._on_core, anew._own_cores):
            raise BookkeepingError("what is held is not the sum of the leases")


def cores_by_node(cores: Sequence[Core], cpus_of: Mapping[str, set[int]]) -> dict[Core, str]:
    """The CPU chip of each core; the first one for cores of which no source says."""
    first = next(iter(cpus_of), "")
    return {core: next((name for name, cpus in cpus_of.items() if core[0] in cpus), first) for core in cores}
