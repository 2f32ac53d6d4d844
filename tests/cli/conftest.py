"""A CLI in process, a clean environment, and a fake model that answers by rule."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sagellm.cli.commands import app
from sagellm.core.config import Config
from sagellm.core.types import SamplingParams
from sagellm.engines import build
from sagellm.engines.llm import RequestOptions, TextDelta, Usage
from tests import quick_commands  # noqa: F401


@dataclass
class FakeLLM:
    """Answers with the words of the last message in reverse; records what it was asked."""

    config: Config
    model_name: str = "fake"
    interrupt_after: int | None = None
    error: str | None = None
    asked: list[tuple[Any, RequestOptions]] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)
    closed_streams: int = 0
    closed: bool = False

    def sampling_params(self, **given: Any) -> SamplingParams:
        self.given = given
        return SamplingParams(**given)

    def stream(self, prompt: Any, options: RequestOptions) -> Iterator[TextDelta]:
        self.asked.append((prompt, options))
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        try:
            for number, word in enumerate(reversed(text.split())):
                if number + 1 == self.interrupt_after:
                    signal.raise_signal(signal.SIGINT)
                yield TextDelta("r", 0, f"{word} ", (number,), Usage(7, number + 1, 4), error=self.error)
        finally:
            self.closed_streams += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SAGELLM_")]:
        monkeypatch.delenv(name)


class Made(list[FakeLLM]):
    """The fakes that commands have built, in order; `behaviour` is how the next ones behave."""

    def __init__(self) -> None:
        super().__init__()
        self.behaviour: dict[str, Any] = {}

    def build(self, config: Config, *, progress: Any, events: Any = None) -> FakeLLM:
        progress(1, 1)
        self.append(FakeLLM(config, **self.behaviour))
        return self[-1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made()
    monkeypatch.setattr(build, "build_llm", made.build)
    monkeypatch.setattr(build, "located", lambda config: config)
    return made


@pytest.fixture
def fake() -> FakeLLM:
    return FakeLLM(Config())


class Cli:
    def __call__(self, *arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False)


@pytest.fixture
def cli() -> Cli:
    return Cli()
