"""`DiskStorage` against a dict, under random operations, restarts and faults of the disk."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sagellm.core.protocols.kv_tiers import ReadOutcome
from tests.effort import examples
from tests.kvmgr.tiers.storages.stored_blocks import FaultyIO, ZlibCodec, block, open_disk, read, write

NUM_SLOTS = 6
SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, min_size=1)


class DiskMachine(RuleBasedStateMachine):
    """`held`: the block of each slot. `maybe`: blocks that may be there after a fault or a lost `forget`."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.number = 0
        self.held: dict[int, int] = {}
        self.maybe: dict[int, set[int]] = {}
        self._open(seed=0, with_codec=False)
        assert self.storage.recover() == []

    def _open(self, seed: int, with_codec: bool) -> None:
        self.io = FaultyIO(seed, shorten=bool(seed % 2))
        codec = ZlibCodec() if with_codec else None
        self.readable = {ReadOutcome.OK} if with_codec else {ReadOutcome.OK, ReadOutcome.UNKNOWN_CODEC}
        self.storage = open_disk(self.folder, NUM_SLOTS, io=self.io, codec=codec)

    @rule(slots=SLOTS)
    def write(self, slots: list[int]) -> None:
        numbers = {slot: self.number + 1 + index for index, slot in enumerate(slots)}
        self.number += len(slots)
        before = {slot: self.held.pop(slot) for slot in slots if slot in self.held}
        try:
            write(self.storage, *(block(slot, number) for slot, number in numbers.items()))
        except OSError:
            assert self.storage.fault
            for slot, number in (*before.items(), *numbers.items()):
                self.maybe.setdefault(slot, set()).add(number)
        else:
            self.held |= numbers

    @rule(slots=SLOTS)
    def read(self, slots: list[int]) -> None:
        asked = {slot: self.held.get(slot, 10**6) for slot in slots}
        outcomes = read(self.storage, *(block(slot, number) for slot, number in asked.items()))
        for slot, outcome in zip(asked, outcomes, strict=True):
            if self.storage.fault:
                assert outcome in self.readable | {ReadOutcome.IO_ERROR, ReadOutcome.ABSENT}
            else:
                assert outcome in (self.readable if slot in self.held else {ReadOutcome.ABSENT})

    @rule(slots=SLOTS)
    def touch(self, slots: list[int]) -> None:
        self.storage.touch(slots)

    @rule(slots=SLOTS)
    def forget(self, slots: list[int]) -> None:
        self.storage.forget(slots)
        for slot in slots:
            number = self.held.pop(slot, None)
            if number is not None:
                self.maybe.setdefault(slot, set()).add(number)

    @precondition(lambda self: self.storage.fault is None)
    @rule(countdown=st.integers(0, 6), error_number=st.sampled_from([errno.EIO, errno.ENOSPC]))
    def break_disk(self, countdown: int, error_number: int) -> None:
        self.io.arm(countdown, error_number)

    @rule(seed=st.integers(0, 9), with_codec=st.booleans())
    def reopen(self, seed: int, with_codec: bool) -> None:
        had_fault = self.storage.fault is not None
        self.storage.close()
        self._open(seed, with_codec)
        found = {each.slot: each for each in self.storage.recover()}
        numbers = {block(0, number).token_hash: number for number in range(1, self.number + 1)}
        for slot, each in found.items():
            number = numbers[each.token_hash]
            allowed = self.maybe.get(slot, set()) if had_fault else set()
            assert number == self.held.get(slot) or number in allowed
        assert self.held.keys() <= found.keys()
        self.held = {slot: numbers[each.token_hash] for slot, each in found.items()}
        self.maybe.clear()
        assert set(read(self.storage, *found.values())) <= self.readable

    @invariant()
    def books_balance(self) -> None:
        countdown, self.io.countdown = self.io.countdown, -1
        self.storage.check()
        self.io.countdown = countdown

    def teardown(self) -> None:
        self.storage.close()
        self.temporary.cleanup()


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
