"""Time to first token after a restart, with and without `kv.load_hot`.

    python benchmarks/tier_restart.py --folder DIR_ON_A_DISK [--tokens 4096] [--rounds 5] [--out FILE]

An engine computes prompts that begin alike and stores them on a disk. Then engines start with that folder, by
turns with and without `kv.load_hot`; each is idle until it has nothing more to load, and gets a request that
begins like the prompts. Its tokens are compared with those of an engine without tiers. Also the most CPU time
that the idle engine's thread spends in a step, beside waiting: a request that comes then may wait so long.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.tier_ttft import BLOCK_SIZE, Timed, ask
from sagellm.benchmarks.engine.shapes import shape_named, write_model
from sagellm.benchmarks.reporting import environment
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import Engine

NUM_STORED, NUM_OWN = 8, 64
"""Prompts on the disk, and tokens of each behind what they share."""


def idle(engine: Engine) -> tuple[float, list[float]]:
    """As a server's loop without requests, until nothing is left to do.

    Returns the seconds to the last step, and the CPU seconds of each step.
    """
    began_s = ended_s = time.perf_counter()
    steps_s: list[float] = []
    while True:
        while engine.has_work():
            spent_s = time.thread_time()
            engine.step()
            steps_s.append(time.thread_time() - spent_s)
            ended_s = time.perf_counter()
        pause_s = engine.idle_s()
        if pause_s is None:
            break
        time.sleep(pause_s)
    return ended_s - began_s, steps_s


def restarted(settings: dict[str, Any], prompt: list[int], expected: list[int]) -> dict[str, Any]:
    """One engine on the folder: what it does while idle, and its first request."""
    engine = build_engine(load_config(cli=settings, environ={}).config)
    idle_s, steps_s = idle(engine)
    assert engine.kv.tiers is not None
    num_loaded = engine.kv.tiers.states()[0].loaded
    first_s, drawn = ask(engine, "first", prompt, Timed(), [])
    row = {
        "load_hot": settings["kv.load_hot"], "first_token_s": first_s, "same_tokens": drawn == expected,
        "kv_waits": engine.diagnostics().num_kv_waits, "idle_s": idle_s, "blocks_loaded_idle": num_loaded,
        "idle_steps": len(steps_s), "idle_step_max_cpu_ms": 1e3 * max(steps_s, default=0.0),
    }  # fmt: skip
    engine.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="S")
    parser.add_argument("--tokens", type=int, default=4096, help="that all prompts share")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--dtype", default="float32", help="of weights and KV; default: float32")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rng, length = random.Random(0), asked.tokens + NUM_OWN
    shared = [rng.randrange(10, 30_000) for _ in range(asked.tokens)]
    prompts = [
        shared + [rng.randrange(10, 30_000) for _ in range(NUM_OWN)]
        for _ in range(NUM_STORED + 2 * asked.rounds)
    ]
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        write_model(shape_named(asked.shape).changed(max_position_embeddings=length + 64), Path(model))
        base = {
            "model.name": model, "model.dtype": asked.dtype, "model.max_model_len": length + 64,
            "kv.block_size": BLOCK_SIZE, "kv.num_blocks": 3 * length // BLOCK_SIZE + 64,
        }  # fmt: skip
        disk = {**base, "kv.disk_gb": 2.0, "kv.dir": str(Path(folder, "kv"))}
        tokens: list[list[int]] = []
        for settings, some in ((disk, prompts[:NUM_STORED]), (base, prompts[NUM_STORED:])):
            engine = build_engine(load_config(cli=settings, environ={}).config)
            tokens = [ask(engine, str(i), prompt, Timed(), [])[1] for i, prompt in enumerate(some)]
            engine.close()
        rows = []
        for number, prompt in enumerate(prompts[NUM_STORED:]):
            load_hot = number % 4 in (0, 3)
            row = restarted({**disk, "kv.load_hot": load_hot}, prompt, tokens[number])
            rows.append(row)
            print(row, flush=True)
    for load_hot in (True, False):
        seconds = [row["first_token_s"] for row in rows if row["load_hot"] is load_hot]
        print(f"load_hot={load_hot}: first token after {statistics.median(seconds):.3f} s (median)")
    if asked.out is not None:
        results = {"environment": asdict(environment()), "tokens": asked.tokens, "rows": rows}
        asked.out.write_text(json.dumps(results, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
