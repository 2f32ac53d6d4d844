"""What a start says in the log: loading, reading, the process's age, the first step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from sagellm.cli import _loading
from sagellm.core.clock import ManualClock
from sagellm.core.config import Config
from sagellm.core.errors import ModelError
from sagellm.core.events import EventBus, StepDone
from sagellm.engines import build


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """Loading takes 4 s: 1 before the weights, 2 for them, 1 after."""
    clock = ManualClock()

    def slow(config: Config, *, events: EventBus, progress: Any) -> str:
        for seconds, done in ((1.0, 0), (1.5, 3_000_000), (0.5, 5_000_000)):
            clock.advance(seconds)
            progress(done, 5_000_000)
        clock.advance(1.0)
        return "the model"

    monkeypatch.setattr(build, "build_llm", slow)
    return clock


def started(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sagellm.start"]


def step(num_prefill_tokens: int) -> StepDone:
    return StepDone(0, num_prefill_tokens, 0, 1, 0, 0.25)


def test_a_start_is_told_in_full(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    events = EventBus()
    assert _loading.load_llm(Config(), events, log_level=logging.INFO, clock=clock) == "the model"  # type: ignore[comparison-overlap]
    [line] = started(caplog)
    assert line.startswith("loaded in 4.00 s, of which 2.00 s for 5.0 MB of weights")
    for prompt_tokens in (0, 32, 7):
        events.emit(step(prompt_tokens))
    assert started(caplog)[1:] == ["the first step, with 32 tokens of prompts, took 0.25 s"]
    assert not events.wants(StepDone)


def test_commands_for_a_person_say_nothing(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    events = EventBus()
    _loading.load_llm(Config(), events, clock=clock)
    assert started(caplog) == []
    assert not events.wants(StepDone)


def test_garbage_is_collected_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: Config, **_: Any) -> None:
        raise ModelError("no such model")

    monkeypatch.setattr(build, "build_llm", fail)
    with pytest.raises(ModelError):
        _loading.load_llm(Config())


def test_the_age_of_this_process() -> None:
    first = _loading._process_age_s()
    if first is None:
        pytest.skip("the system does not tell when a process was started")
    second = _loading._process_age_s()
    assert second is not None
    assert 0 < first <= second < first + 60


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loading, "PROCESS_STAT", Path("no", "such", "file"))
    assert _loading._process_age_s() is None
