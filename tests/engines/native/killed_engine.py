"""A process with an engine and a disk tier, which a test kills.

It answers prompts and says so in lines: `ready`, then `answered` for each. Without an end, it answers them
again and again in a random order; otherwise it says `settled` when all that it computed is on the disk, and
waits.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.engines.native.tiered import ask, engine


def main(
    model: Path, settings: dict[str, Any], prompts: Sequence[list[int]], seed: int | None, output: Connection
) -> None:
    """Answer each prompt once in order, or without an end if there is a `seed`."""

    def say(word: str) -> None:
        os.write(output.fileno(), f"{word}\n".encode())

    made, rng, count = engine(model, **settings), random.Random(seed), 0
    say("ready")
    while True:
        for prompt in prompts if seed is None else rng.sample(prompts, len(prompts)):
            ask(made, f"r{count}", prompt)
            count += 1
            say("answered")
        if seed is None:
            assert made._kv_waits is not None
            made._kv_waits.settle()
            say("settled")
            time.sleep(600)
