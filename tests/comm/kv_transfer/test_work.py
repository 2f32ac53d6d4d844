"""What a call costs does not grow with the number of transfers under way. Lines are counted, not time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sagellm.comm.kv_transfer import channel
from sagellm.comm.kv_transfer.deadlines import Deadlines
from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork, InProcessTransport
from sagellm.core.clock import ManualClock
from sagellm.core.protocols.kv_transfer import TransferStatus
from tests.comm.kv_transfer.world import LAYOUT, Inline, Instance, introduce, prompt

PACKAGE = str(Path(channel.__file__).parent)
FEW, MANY = 40, 1000


def work_of(call: Callable[[], object]) -> int:
    """The lines of this package that a call runs; of a comprehension, one for each turn."""
    count = 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class Scene:
    """A sender with so many transfers by layer under way, of which the target has room for a few."""

    def __init__(self, stack: ExitStack, count: int, num_blocks: int, *, by_layer: bool = True) -> None:
        self.clock, self.network = ManualClock(), InProcessNetwork(threaded=False)
        options = ChannelOptions(chunk_bytes=LAYOUT.bytes_per_block, max_offers=2 * MANY, stall_s=100.0)
        self.source, self.target = (
            Instance(
                name, InProcessTransport(name, self.network), options=options, clock=self.clock,
                worker=Inline(), num_blocks=size,
            )
            for name, size in (("a", count + 8), ("b", num_blocks))
        )  # fmt: skip
        for each in (self.source, self.target):
            stack.callback(each.channel.close)
        introduce(self.source, self.target)
        self.by_layer = by_layer
        self.prompts = [prompt(seed, 1) for seed in range(count + 2)]
        for tokens in self.prompts:
            self.source.compute(tokens)
        self.tickets = [self.send(number) for number in range(count)]
        self.settle()

    def send(self, number: int) -> Any:
        return self.source.send(self.prompts[number], "b", f"r{number}", by_layer=self.by_layer)

    def settle(self) -> None:
        for _ in range(6):
            while self.network.run_one():
                pass
            self.source.poll()
            self.target.poll()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def send_one(scene: Scene) -> None:
    scene.send(len(scene.tickets))
    scene.settle()


def cancel_one(scene: Scene) -> None:
    scene.source.channel.cancel(scene.tickets[0])
    scene.settle()


CALLS: dict[str, Callable[[Scene], object]] = {
    "poll of the sender": lambda scene: scene.source.channel.poll(),
    "poll of the target": lambda scene: scene.target.channel.poll(),
    "wait of the sender": lambda scene: scene.source.channel.wait(0.0),
    "wait of the target": lambda scene: scene.target.channel.wait(0.0),
    "one more, offered and queued": send_one,
    "one ends, and the next begins": cancel_one,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_costs_as_much_with_many_transfers_as_with_few(name: str, stack: ExitStack) -> None:
    few, many = (Scene(stack, count, num_blocks=12) for count in (FEW, MANY))
    for scene in (few, many):
        assert len(scene.target.channel._receiver._offers) >= len(scene.tickets) - 12
        assert not scene.source.reports
    works = [work_of(lambda scene=scene: CALLS[name](scene)) for scene in (few, many)]  # type: ignore[misc]
    assert 0 < works[1] <= 1.1 * works[0] + 10, works


def test_all_of_many_transfers_cost_as_much_each_as_few(stack: ExitStack) -> None:
    def move_all(count: int) -> None:
        scene = Scene(stack, count, num_blocks=count + 8, by_layer=False)
        while len(scene.source.reports) < count:
            scene.settle()
        assert {each.status for each in scene.source.reports.values()} == {TransferStatus.DONE}

    works = [work_of(partial(move_all, count)) / count for count in (FEW, 8 * FEW)]
    assert works[1] <= 1.2 * works[0], works


def test_deadlines() -> None:
    kept: Deadlines[str] = Deadlines()
    assert kept.take_due(1e9) == []
    kept.set("late", 5.0)
    kept.set("late", 7.0)  # it is looked at before, and set anew
    kept.set("early", 3.0)
    kept.set("early", 2.0)
    kept.set("gone", 1.0)
    kept.set("never", float("inf"))
    kept.drop("gone")
    assert kept.next_s == 2.0
    assert kept.take_due(2.0) == ["early"]
    assert kept.take_due(4.0) == [], "the time that was replaced counts no longer"
    assert kept.take_due(5.0) == ["late"]
    kept.set("late", 7.0)
    assert kept.next_s == 7.0
