"""The demo model's tasks as batch work: prompts and the answers expected, in tokens of its own tokenizer.

The tasks are made by `tools/demo_data.py`, which is part of a checkout and of no wheel.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sagellm
from sagellm.benchmarks.lifetime.samples import PARTS, LengthSample, LengthWorkload
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.engines.build import DEMO_MODEL

TOOLS = Path(sagellm.__file__).resolve().parents[2] / "tools"
COUNTS = {"train": 16_000, "validation": 1000, "test": 1000}
TURNS, SHARES = (1, 2, 3), (6, 2, 2)
MAX_TOKENS = 512
"""Of a prompt, its end: nothing looks further back."""


def demo_tasks(seed: int = 0, tools: Path = TOOLS) -> LengthWorkload:
    """Conversations of one to three turns whose last answer is to be predicted, its end token included.

    The parts are those of the demo model's data: nothing asked in one occurs in another.
    """
    samples = tuple(_samples(seed, tools))
    return LengthWorkload("demo_tasks", "by content", samples, learns_in_test=False)


def _samples(seed: int, tools: Path) -> Iterator[LengthSample]:
    data, text = _generator(tools)
    tokenizer = _tokenizer()
    for part in PARTS:
        chance = random.Random(f"{part}:{seed}")
        for number in range(COUNTS[part]):
            made = data.conversation(chance, part, chance.choices(TURNS, SHARES)[0])
            prompt = tokenizer.encode(text.prompt_text(made)).tolist()
            answer = tokenizer.encode(made.turns[-1].answer)
            yield LengthSample(
                name=f"{part}-{number}",
                time_s=float(number),
                num_input=len(prompt),
                num_output=len(answer) + 1,
                part=part,
                tokens=prompt[-MAX_TOKENS:],
            )


def _generator(tools: Path) -> tuple[Any, Any]:
    if not (tools / "demo_data.py").is_file():
        raise ConfigError("the workload demo_tasks needs a checkout of sageLLM, whose tools make the tasks")
    with _importable(tools):
        return importlib.import_module("demo_data"), importlib.import_module("demo_text")


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _tokenizer() -> Any:
    try:
        from sagellm.engines.native.tokenizer import Tokenizer
    except ImportError as error:
        raise MissingExtraError("the demo model's tokenizer", "native") from error
    return Tokenizer.from_folder(DEMO_MODEL)
