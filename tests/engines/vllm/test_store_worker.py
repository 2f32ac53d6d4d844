"""The store's half in a worker: the order of copies and steps on a device, and weights that are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.models.llama import LlamaForCausalLM

from sagellm.engines.vllm.store_format import refusal
from sagellm.engines.vllm.store_messages import StoreMetadata
from sagellm.engines.vllm.store_worker import StoreWorker
from tests.engines.vllm.store_world import BLOCK_GB, SLOT_GB, World, store_config, write_folder

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


# -- weights that are replaced


class OwnWorker:
    """Has the methods of vLLM's worker that replace weights."""

    num_calls = 0

    def reload_weights(self, weights_path: str | None = None) -> str | None:
        self.num_calls += 1
        return weights_path

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.num_calls += 1


@pytest.mark.parametrize("way", ["reload_weights", "update_weights", "load_weights"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_replaced_weights_turn_it_off(
    model: str, tmp_path: Path, way: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Also loads and saves under way: blocks of the old weights fail, and none of the new ones is kept."""
    calls = {
        "reload_weights": lambda: OwnWorker().reload_weights(weights_path="other"),
        "update_weights": lambda: OwnWorker().update_weights({}),
        # as an extension of the worker does
        "load_weights": lambda: LlamaForCausalLM.load_weights(None, []),
    }
    monkeypatch.setattr(LlamaForCausalLM, "load_weights", lambda self, weights: set())
    make = partial(World, model, asynchronous=asynchronous, worker_cls=f"{__name__}.OwnWorker")
    settings = {"policy": "lru", "host_gb": 200 * BLOCK_GB, "disk_gb": 200 * SLOT_GB, "dir": str(tmp_path)}
    one = make(store_config(**settings))
    answers = [one.ask(prompt) for prompt in PROMPTS]
    kept = one.counts("nvme")
    assert kept["stored"] == 8 * 10
    with one.workers[0]._worker._migrator._writing:  # loads do not end
        one.add(PROMPTS[0])
        one.add(PROMPTS[1])
        for _ in range(4):
            one.step()
        assert one.books is not None
        assert one.books._loads
        computed, result = one.num_computed, calls[way]()
    if way == "reload_weights":
        assert result == "other", "the method itself was called"
    one.run()
    assert one.engine.reset_prefix_cache()
    again = [one.ask(prompt) for prompt in PROMPTS]
    assert again == answers, "the model here is the same one"
    assert one.num_computed >= computed + 8 * 42
    assert one.counts("nvme")["stored"] == kept["stored"]
    assert "weights were replaced" in one.counts("nvme")["fault"]
    assert "weights were replaced" in one.counts("dram")["fault"]
    assert caplog.text.count("weights were replaced") == 1
    one.check_idle()
    one.close()
    second = make(store_config(**settings))
    assert [second.ask(prompt) for prompt in PROMPTS] == answers
    assert second.counts("nvme")["loaded"] == 8 * 9, "a restart has the weights of the files again"
    second.close()


def test_a_sleep_frees_what_the_store_copies(model: str) -> None:
    one = World(model, store_config(host_gb=BLOCK_GB))
    config = one.engine.vllm_config
    assert refusal(config, one.engine.kv_cache_config) == ""
    config.model_config.enable_sleep_mode = True
    assert "sleep" in refusal(config, one.engine.kv_cache_config)
    one.close()
