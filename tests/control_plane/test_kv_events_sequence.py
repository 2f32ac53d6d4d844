"""Sequence numbers: whatever is lost on the way, each number is given out once, as a batch or in a gap."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sagellm.control_plane.kv_events import Gap, KVEventBatch, Malformed, ReceivedBatch, Restart
from sagellm.control_plane.kv_events.sequence import Item, Message, ReplayBuffer, SequenceTracker
from sagellm.core.errors import BookkeepingError

KEPT = 4


def message(seq: int, ts: float, *, replayed: bool = False) -> ReceivedBatch:
    return ReceivedBatch(seq, KVEventBatch(ts, []), replayed)


def no_replay(start: int) -> list[Message]:
    return []


class SequenceMachine(RuleBasedStateMachine):
    """A publisher that loses batches and restarts, against a twin that knows what became of every number."""

    @initialize(late=st.integers(0, 8))
    def join(self, late: int) -> None:
        self.runs = 0.0
        self.start_run()
        for _ in range(late):
            self.number(drop=False)
        self.tracker = SequenceTracker()
        self.given: list[Item] = list(self.tracker.catch_up(self.replay(0)))
        # What the catch-up brought may be on its way to the reader as well.
        self.on_the_way: list[tuple[int, float]] = list(self.kept_pairs())

    def start_run(self) -> None:
        self.runs += 1
        self.buffer = ReplayBuffer(KEPT)
        self.next_seq = 0
        self.times: dict[int, float] = {}

    def kept_pairs(self) -> Iterable[tuple[int, float]]:
        return ((seq, self.times[seq]) for seq, _ in self.buffer.since(0))

    def replay(self, start: int) -> list[Message]:
        self.available = {seq for seq, _ in self.buffer.since(start)}
        return [message(seq, self.times[seq], replayed=True) for seq in sorted(self.available)]

    def number(self, *, drop: bool) -> tuple[int, float]:
        seq, ts = self.next_seq, self.runs * 1000 + self.next_seq
        self.next_seq += 1
        self.times[seq] = ts
        if not drop:
            self.buffer.append(seq, b"")
        return seq, ts

    @rule(drop=st.booleans(), lost=st.booleans())
    def publish(self, drop: bool, lost: bool) -> None:
        sent = self.number(drop=drop)
        if not drop and not lost:
            self.on_the_way.append(sent)

    @rule()
    def arrive(self) -> None:
        if not self.on_the_way:
            return
        seq, ts = self.on_the_way.pop(0)
        before = self.tracker.next_seq
        self.available = set()
        items = list(self.tracker.receive(message(seq, ts), self.replay))
        self.given += items
        if before > seq:
            assert items == []  # the catch-up had it
            return
        fetched = self.available & set(range(before, seq))
        gaps = {n for gap in items if isinstance(gap, Gap) for n in range(gap.first_seq, gap.last_seq + 1)}
        assert gaps == set(range(before, seq)) - fetched
        assert not any(isinstance(item, Restart) for item in items)
        assert [item.replayed for item in items if isinstance(item, ReceivedBatch)] == [True] * len(
            fetched
        ) + [False]

    @rule(unheard=st.integers(0, 8))
    def restart(self, unheard: int) -> None:
        """Another process; the first of its batches that arrives comes after `unheard` others."""
        while self.on_the_way:
            self.arrive()
        former = self.tracker.next_seq
        self.start_run()
        for _ in range(unheard + (unheard == former > 0)):  # the expected number itself hides a restart
            self.number(drop=False)
        seq, ts = self.number(drop=False)
        told = seq < former or former - 1 in {kept for kept, _ in self.kept_pairs()}
        items = list(self.tracker.receive(message(seq, ts), self.replay))
        if former == 0 or told:
            assert (items[0] == Restart(former)) == (former > 0)
            self.given = [item for item in items if not isinstance(item, Restart)]
        else:
            assert not any(isinstance(item, Restart) for item in items)
            self.given = [Gap(0, former - 1), *items]

    @invariant()
    def every_number_once_and_in_order(self) -> None:
        if not hasattr(self, "tracker"):
            return
        numbers: list[int] = []
        for item in self.given:
            match item:
                case ReceivedBatch():
                    assert item.ts == self.times[item.seq]
                    numbers.append(item.seq)
                case Gap():
                    assert item.num_batches == len(range(item.first_seq, item.last_seq + 1)) > 0
                    numbers += range(item.first_seq, item.last_seq + 1)
        assert numbers == list(range(self.tracker.next_seq))
        self.tracker.check()
        self.buffer.check()


TestSequenceMachine = SequenceMachine.TestCase
TestSequenceMachine.settings = settings(max_examples=50, stateful_step_count=25)


def test_a_late_reader_without_replay_hears_of_the_gap() -> None:
    tracker = SequenceTracker()
    assert list(tracker.receive(message(3, 1.0), no_replay)) == [Gap(0, 2), message(3, 1.0)]


def test_what_cannot_be_decoded_is_given_as_such() -> None:
    tracker = SequenceTracker()
    broken = Malformed(0, "why")
    assert list(tracker.receive(broken, no_replay)) == [broken]
    assert list(tracker.receive(message(1, 1.0), no_replay)) == [message(1, 1.0)]


def test_a_replay_that_answers_more_than_was_asked_gives_nothing_twice() -> None:
    tracker = SequenceTracker()
    everything = [message(seq, float(seq), replayed=True) for seq in range(6)]
    items = list(tracker.receive(message(4, 4.0), lambda start: everything))
    assert items == [*everything[:4], message(4, 4.0)]


def test_a_restart_within_the_numbers_of_the_catch_up_is_told_by_its_time() -> None:
    tracker = SequenceTracker()
    list(tracker.catch_up([message(seq, float(seq)) for seq in range(3)]))
    assert list(tracker.receive(message(1, 1.0), no_replay)) == []
    assert list(tracker.receive(message(0, 9.0), no_replay)) == [Restart(3), message(0, 9.0)]


def test_a_buffer_out_of_order_is_found() -> None:
    buffer = ReplayBuffer(2)
    buffer.append(2, b"")
    buffer.append(1, b"")
    with pytest.raises(BookkeepingError, match=r"do not ascend: \[2, 1\]"):
        buffer.check()
    assert len(buffer) == 2
