"""From nothing to the first token, in a process of its own:

    python -m sagellm.benchmarks.engine.cold_start

The parent writes a configuration and the time at which it began to stdin; the answer is one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from random import Random
from typing import Any

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.config import Config
from sagellm.core.errors import SageError
from sagellm.core.garbage import nothing_collected

NUM_TOKENS = 32


def cold_start(config: Config, clock: Clock) -> dict[str, float]:
    """Seconds of each part and in all, and the resident bytes after the first token.

    `start_s` is the interpreter and the configuration, `import_s` torch and the engine's code, `load_s` the
    model, `first_s` a prompt of 32 tokens and one answer. The clock must be one that all processes share.
    """
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", __name__]
    given = json.dumps({"began_s": clock.now(), "config": config.model_dump(mode="json")})
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise SageError(f"the cold start failed: {' '.join(last) or f'exit status {done.returncode}'}")
    values: dict[str, float] = json.loads(done.stdout)
    return values


def _measure(given: dict[str, Any], clock: Clock) -> dict[str, float]:
    stamps = [given["began_s"], clock.now()]
    with nothing_collected():  # as `build_engine` does it, where torch is imported by that
        from sagellm.accel.fusion import cpu  # noqa: F401 - what the engine would import while it loads
        from sagellm.engines.build import build_engine
        from sagellm.engines.native import backend  # noqa: F401 - the same

    stamps.append(clock.now())
    engine = build_engine(Config.model_validate(given["config"]))
    stamps.append(clock.now())
    from sagellm.benchmarks.engine.session import PromptJob, Session, peak_resident_bytes, resident_bytes
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
