"""The store's half in a worker: the order of copies and steps on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from sagellm.engines.vllm.store_messages import StoreMetadata
from sagellm.engines.vllm.store_worker import StoreWorker
from tests.engines.vllm.store_world import BLOCK_GB, World, store_config, write_folder

pytestmark = pytest.mark.peer
PROMPTS = [[100 + i] * 4 + list(range(1000 * i, 1000 * i + 36)) for i in range(8)]
"""Ten blocks each: eight of them are twice what forty blocks hold."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_folder(tmp_path / "model")


@pytest.fixture
def one(model: str) -> Iterator[World]:
    made = World(model, store_config(policy="lru", host_gb=200 * BLOCK_GB))
    yield made
    made.close()


# -- copies behind the steps of a GPU


class Device:
    """Stands for a GPU's stream: what was queued is done when somebody waits for an event behind it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.num_waits = 0

    def record_event(self) -> Event:
        return Event(self, list(self.queue))

    def synchronize(self) -> None:
        """Of the stream for copies, which has nothing of the model's in it."""

    def catch_up(self, queued: list[Callable[[], Any]]) -> None:
        for each in queued:
            if each in self.queue:
                self.queue.remove(each)
                each()


class Event:
    def __init__(self, device: Device, before: list[Callable[[], Any]]) -> None:
        self._device, self._before = device, before

    def synchronize(self) -> None:
        self._device.num_waits += 1
        self._device.catch_up(self._before)


def test_a_load_waits_for_the_steps_before_it(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step under way still writes blocks that the scheduler has given to a load.

    They are of a request that has ended, and the step was scheduled before that, or zeroes them.
    """
    device = Device()
    answers = [one.ask(prompt) for prompt in PROMPTS]
    worker = one.workers[0]._worker
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(worker._data, "_stream", device)
    begin, report = StoreWorker.begin, StoreWorker.report

    def behind_a_step(self: StoreWorker, metadata: StoreMetadata) -> None:
        for move in metadata.loads:
            for block_id in move.plan.targets[0].block_ids:
                device.queue += [cache[block_id].zero_ for cache in one.kv[0].values()]
        begin(self, metadata)

    def after_all(self: StoreWorker) -> Any:
        made = report(self)
        if self.finished:
            device.catch_up(list(device.queue))
        return made

    monkeypatch.setattr(StoreWorker, "begin", behind_a_step)
    monkeypatch.setattr(StoreWorker, "report", after_all)
    assert [one.ask(prompt) for prompt in PROMPTS] == answers
    assert one.counts("dram")["loaded"] >= 60
    assert device.num_waits > 0
    one.check_idle()
