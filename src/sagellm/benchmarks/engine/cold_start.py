"""Measures the time from a new process to the first token.

    python -m sagellm.benchmarks.engine.cold_start

The parent writes a configuration and its start time to stdin; the child answers with one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
from random import Random
from typing import Any

from sagellm.benchmarks.process import peak_resident_bytes, resident_bytes, run_module
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.config import Config
from sagellm.core.garbage import nothing_collected

NUM_TOKENS = 32


def cold_start(config: Config, clock: Clock) -> dict[str, float]:
    """Returns the seconds of each part and in total, and the resident bytes.

    `start_s` is the interpreter and the configuration, `import_s` torch and the engine's code, `load_s` the
    model, `first_s` a prompt of 32 tokens and one answer. The clock must be one that all processes share.
    Raises `SageError` if the child fails.
    """
    given = {"began_s": clock.now(), "config": config.model_dump(mode="json")}
    return dict(run_module(__name__, given, "the cold start"))


def _measure(given: dict[str, Any], clock: Clock) -> dict[str, float]:
    stamps = [given["began_s"], clock.now()]
    with nothing_collected():  # as `build_engine` does when it imports torch
        from sagellm.accel.fusion import cpu  # noqa: F401 - otherwise imported, and timed, while loading
        from sagellm.engines.build import build_engine
        from sagellm.engines.native import backend  # noqa: F401 - the same

    stamps.append(clock.now())
    engine = build_engine(Config.model_validate(given["config"]))
    stamps.append(clock.now())
    from sagellm.benchmarks.engine.session import PromptJob, Session
    from sagellm.benchmarks.engine.workloads import COLD_CODE, TokenDraws

    session = Session(engine, clock)
    prompt = TokenDraws(Random(f"{COLD_CODE}/0"), session.vocab_size).tokens(NUM_TOKENS)
    session.run([PromptJob(prompt, 1)])
    stamps.append(clock.now())
    parts = [after - before for before, after in itertools.pairwise(stamps)]
    return {
        "total": stamps[-1] - stamps[0],
        **dict(zip(("start_s", "import_s", "load_s", "first_s"), parts, strict=True)),
        "resident_bytes": resident_bytes() or 0,
        "peak_bytes": peak_resident_bytes(),
    }


if __name__ == "__main__":
    print(json.dumps(_measure(json.load(sys.stdin), MonotonicClock())))
