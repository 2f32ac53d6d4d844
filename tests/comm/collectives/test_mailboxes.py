"""Messages between three ranks in one process, against queues by source, target and tag."""

from __future__ import annotations

from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from sagellm.comm.collectives._buffers import Broken
from sagellm.comm.collectives.mailboxes import Mailboxes, MessageWork
from sagellm.comm.collectives.shared_region import RegionLayout, SharedRegion
from sagellm.comm.collectives.shared_twin import TwinKernel
from sagellm.core.clock import ManualClock
from sagellm.core.protocols.collectives import WorkStatus
from tests.effort import examples

NUM_RANKS = 3
CELL = 64
RANKS, TAGS, SIZES = st.integers(0, NUM_RANKS - 1), st.integers(0, 1), st.integers(0, 7 * CELL)


class DictStore:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


class MailboxMachine(RuleBasedStateMachine):
    """`expected` holds the messages that were sent and not yet asked for."""

    def __init__(self) -> None:
        super().__init__()
        store, clock = DictStore(), ManualClock()
        layout = RegionLayout(NUM_RANKS, 4096, CELL, 0)
        self.regions = [SharedRegion(rank, store, layout, 5.0, clock) for rank in range(NUM_RANKS)]
        with ThreadPoolExecutor(NUM_RANKS) as pool:
            list(pool.map(lambda region: region.join(has_kernel=False), self.regions))
        self.boxes = [
            Mailboxes(region, TwinKernel(region, lambda _: False), Broken(), 60.0, clock)
            for region in self.regions
        ]
        self.sent: dict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.received: list[tuple[MessageWork, torch.Tensor]] = []
        self.sends: list[MessageWork] = []
        self.count = 0

    @rule(source=RANKS, peer=RANKS, tag=TAGS, size=SIZES)
    def send(self, source: int, peer: int, tag: int, size: int) -> None:
        self.count += 1
        message = (torch.arange(size) + 37 * self.count).to(torch.uint8)
        self.sent[source, peer, tag].append(message)
        boxes = self.boxes[source]
        self.sends.append(boxes.send(MessageWork(boxes, peer, tag, message.clone(), lambda: None)))

    @rule(source=RANKS, peer=RANKS, tag=TAGS)
    def receive(self, source: int, peer: int, tag: int) -> None:
        queue = self.sent[source, peer, tag]
        if queue:
            expected, boxes = queue.popleft(), self.boxes[peer]
            work = MessageWork(boxes, source, tag, torch.zeros_like(expected), lambda: None)
            self.received.append((boxes.receive(work), expected))

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
        while sum(boxes.progress() for boxes in self.boxes):
            self.books_are_right()
        assert all(work.status is WorkStatus.DONE for work, _ in self.received)
        assert all(work.status is WorkStatus.DONE for work in self.sends)
        assert not any(boxes.num_pending for boxes in self.boxes)
        for region in self.regions:
            region.close()


def test_every_message_arrives_whole_and_in_order() -> None:
    run_state_machine_as_test(
        MailboxMachine, settings=settings(max_examples=examples(60), stateful_step_count=40)
    )
