"""Reservations never overlap, whatever is assigned, reserved and released in whatever order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagellm.control_plane.chip_pool import Assignment, InstanceNeeds
from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.protocols.router import InstanceType
from tests.control_plane.chip_pool.machines import GIB, host

NEEDS = st.builds(
    lambda kind, chips, cores, gib, exclusive: (
        kind, chips, cores, max(gib, 1) if not exclusive else gib, exclusive or chips != 1
    ),
    st.sampled_from(InstanceType), st.integers(0, 3), st.integers(0, 3), st.integers(0, 50), st.booleans(),
)  # fmt: skip


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = host("fast fast wide npu small", num_cores=6, num_nodes=2, islands=2)
        self.number = 0
        self.kept: list[Assignment] = []

    @rule(wanted=st.lists(NEEDS, min_size=1, max_size=4), at_once=st.booleans())
    def assign(self, wanted: list[tuple[InstanceType, int, int, int, bool]], *, at_once: bool) -> None:
        needs = []
        for kind, chips, cores, gib, exclusive in wanted:
            self.number += 1
            needs.append(
                InstanceNeeds(
                    f"i-{self.number}", kind, chips, is_exclusive=exclusive, memory_bytes=gib * GIB,
                    num_cores=cores,
                )
            )  # fmt: skip
        before = self.pool.leases
        try:
            assignment = self.pool.assign(needs)
        except CapacityError:
            assert self.pool.leases == before
            return
        assert self.pool.leases == before
        self.kept.append(assignment)
        for need, lease in zip(needs, assignment.leases, strict=True):
            assert (lease.owner, len(lease.chips)) == (need.name, max(1, need.num_chips))
            assert lease.cores and (len(lease.cores) == need.num_cores or not need.num_cores)
        if at_once:
            self.pool.reserve(self.kept.pop())  # what was just assigned fits

    @rule(which=st.integers(0, 9))
    def reserve_late(self, which: int) -> None:
        """An assignment from before may not fit any more; then nothing of it is reserved."""
        if not self.kept:
            return
        assignment = self.kept.pop(which % len(self.kept))
        before = self.pool.leases
        try:
            self.pool.reserve(assignment)
        except BookkeepingError:
            assert self.pool.leases == before

    @rule(which=st.integers(0, 9))
    def die(self, which: int) -> None:
        owners = list(self.pool.leases)
        if owners:
            owner = owners[which % len(owners)]
            assert self.pool.release(owner)
            assert not self.pool.release(owner)

    @invariant()
    def nothing_overlaps(self) -> None:
        self.pool.check()
        leases = self.pool.leases.values()
        for lease in leases:
            others = [each for each in leases if each is not lease]
            if lease.is_exclusive:
                assert not any(set(lease.chips) & set(other.chips) for other in others)
            if lease.has_own_cores:
                assert not any(lease.cpus & other.cpus for other in others)

    def teardown(self) -> None:
        for owner in self.pool.leases:
            self.pool.release(owner)
        assert self.pool.num_free_cores() == 6
        self.pool.assign([InstanceNeeds(f"again-{number}") for number in range(5)])


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestPool = PoolMachine.TestCase
