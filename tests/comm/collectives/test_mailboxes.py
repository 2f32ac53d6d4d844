"""Messages between three ranks in one process, against queues by source, target and tag."""

from __future__ import annotations

from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from sagellm.comm.collectives._buffers import Broken, no_copy
from sagellm.comm.collectives.mailboxes import Mailboxes, MessageWork
from sagellm.comm.collectives.shared_region import RegionLayout, SharedRegion
from sagellm.comm.collectives.shared_twin import TwinKernel
from sagellm.core.clock import ManualClock
from sagellm.core.errors import CommError
from sagellm.core.protocols.collectives import WorkStatus
from tests.effort import examples

NUM_RANKS = 3
CELL = 64
MOST_HELD = 3 * (512 + 4 * CELL)
RANKS, TAGS, SIZES = st.integers(0, NUM_RANKS - 1), st.integers(0, 1), st.integers(0, 7 * CELL)


class DictStore:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


def mailboxes(clock: ManualClock) -> tuple[list[SharedRegion], list[Mailboxes]]:
    """Of three ranks in this process. A peer that is silent for a minute counts as dead."""
    layout, store = RegionLayout(NUM_RANKS, 4096, CELL, 0), DictStore()
    regions = [SharedRegion(rank, store, layout, 5.0, clock) for rank in range(NUM_RANKS)]
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        list(pool.map(lambda region: region.join(has_kernel=False), regions))
    boxes = [
        Mailboxes(region, TwinKernel(region, lambda _: False), Broken(), 60.0, clock, MOST_HELD)
        for region in regions
    ]
    return regions, boxes


def message(number: int, size: int = 3 * CELL) -> torch.Tensor:
    return (torch.arange(size) + 37 * number).to(torch.uint8)


def sent(boxes: Mailboxes, peer: int, tag: int, memory: torch.Tensor) -> MessageWork:
    return boxes.submit(MessageWork(boxes, peer, tag, memory))


def received(boxes: Mailboxes, peer: int, tag: int, memory: torch.Tensor) -> MessageWork:
    return boxes.submit(MessageWork(boxes, peer, tag, memory, no_copy))


class MailboxMachine(RuleBasedStateMachine):
    """`expected` holds the messages that were sent and not yet asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.regions, self.boxes = mailboxes(ManualClock())
        self.sent: dict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.received: list[tuple[MessageWork, torch.Tensor]] = []
        self.sends: list[MessageWork] = []
        self.count = 0

    @rule(source=RANKS, peer=RANKS, tag=TAGS, size=SIZES)
    def send(self, source: int, peer: int, tag: int, size: int) -> None:
        self.count += 1
        memory = message(self.count, size)
        self.sent[source, peer, tag].append(memory)
        self.sends.append(sent(self.boxes[source], peer, tag, memory.clone()))

    @rule(source=RANKS, peer=RANKS, tag=TAGS)
    def receive(self, source: int, peer: int, tag: int) -> None:
        queue = self.sent[source, peer, tag]
        if queue:
            expected = queue.popleft()
            work = received(self.boxes[peer], source, tag, torch.zeros_like(expected))
            self.received.append((work, expected))

    @rule(rank=RANKS)
    def progress(self, rank: int) -> None:
        self.boxes[rank].progress()

    @invariant()
    def books_are_right(self) -> None:
        for boxes in self.boxes:
            boxes.check()
        for work, expected in self.received:
            assert work.status is WorkStatus.PENDING or torch.equal(work.memory, expected)

    def teardown(self) -> None:
        for source, peer, tag in list(self.sent):  # what is held back is asked for
            while self.sent[source, peer, tag]:
                self.receive(source, peer, tag)
        while sum(boxes.progress() for boxes in self.boxes):
            self.books_are_right()
        assert all(work.status is WorkStatus.DONE for work, _ in self.received)
        assert all(work.status is WorkStatus.DONE for work in self.sends)
        assert not any(boxes.pending for boxes in self.boxes)
        for region in self.regions:
            region.close()


def test_every_message_arrives_whole_and_in_order() -> None:
    run_state_machine_as_test(
        MailboxMachine, settings=settings(max_examples=examples(60), stateful_step_count=40)
    )


class InterruptedKernel(TwinKernel):
    """The handler of a signal raises in the n-th access to the rings."""

    calls_left = 0

    def load(self, word_at: int) -> int:
        self._count()
        return super().load(word_at)

    def store(self, word_at: int, value: int) -> None:
        super().store(word_at, value)
        self._count()

    def _count(self) -> None:
        self.calls_left -= 1
        if not self.calls_left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("is_sender", [True, False])
@pytest.mark.parametrize("num_calls", range(1, 40, 3))
def test_what_interrupts_a_message_breaks_the_group(num_calls: int, *, is_sender: bool) -> None:
    regions, (first, second, _) = mailboxes(ManualClock())
    kernel = InterruptedKernel(regions[0], lambda _: False)
    kernel.calls_left = num_calls
    broken = first if is_sender else second
    broken._kernel = kernel
    works: list[tuple[MessageWork, torch.Tensor]] = []

    def exchange() -> None:
        for number in range(30):
            sent(first, 1, 0, message(number))
            works.append((received(second, 0, 0, torch.zeros(3 * CELL, dtype=torch.uint8)), message(number)))

    with pytest.raises(KeyboardInterrupt):
        exchange()
    for _ in range(2):
        with pytest.raises(CommError, match="was interrupted within a message"):
            broken.submit(MessageWork(broken, 1, 0, message(99)))
    for box in (first, second):
        if box is not broken:
            box.progress()
            box.check()
    for work, expected in works:
        assert work.status is not WorkStatus.DONE or torch.equal(work.memory, expected)
    for region in regions:
        region.close()


def test_a_silent_rank_is_found_while_another_sends() -> None:
    clock = ManualClock()
    regions, (_, second, third) = mailboxes(clock)
    from_silent = received(second, 0, 0, torch.zeros(8, dtype=torch.uint8))
    for number in range(70):
        clock.advance(1.0)
        sent(third, 1, 0, message(number))
        got = received(second, 2, 0, torch.zeros(3 * CELL, dtype=torch.uint8))
        if from_silent.poll() is WorkStatus.FAILED:
            break
        assert torch.equal(got.memory, message(number))
    assert number == 60
    assert str(from_silent.error()) == "rank 0 has not answered for 60 s"
    for region in regions:
        region.close()


def test_messages_that_no_receive_asks_for_are_held_up_to_a_limit() -> None:
    regions, (first, second, _) = mailboxes(ManualClock())
    sends = [sent(first, 1, number, message(number)) for number in range(50)]
    while second.progress() + first.progress():
        second.check()
    assert sum(work.status is WorkStatus.PENDING for work in sends) > 40
    for number in (1, 0, *range(2, 50)):  # in the order of sends, but for what is held
        got = received(second, 0, number, torch.zeros(3 * CELL, dtype=torch.uint8))
        while second.progress() + first.progress():
            second.check()
        assert got.status is WorkStatus.DONE
        assert torch.equal(got.memory, message(number))
    assert {work.status for work in sends} == {WorkStatus.DONE}
    sends = [sent(first, 1, number, message(number)) for number in range(50)]
    last = received(second, 0, 49, torch.zeros(3 * CELL, dtype=torch.uint8))
    while second.progress() + first.progress():
        second.check()
    assert last.wait(0.0) is False
    with pytest.raises(CommError, match="receive in the order of sends"):
        last.wait()
    for region in regions:
        region.close()
