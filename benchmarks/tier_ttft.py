"""Time to first token of an evicted prompt: computed, from host memory, from disk.

    python benchmarks/tier_ttft.py --shape S --tokens 32768 --folder DIR_ON_A_DISK [--out FILE]

The device's pool has room for one such prompt. A first prompt is computed, a second one evicts it, and the
first one is asked again; the same without tiers, in the same process. Also what the engine's thread spends in
the tiers' calls, by step. A tier has room for both prompts, unless it is given another size.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sagellm.benchmarks.engine.shapes import shape_named, write_model
from sagellm.benchmarks.reporting import environment
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import Engine

CALLS = ("offer", "request", "start_loads", "poll", "hold", "give_way")
BLOCK_SIZE = 16


class Timed:
    """Adds up the seconds of calls since `take`."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.spent_s += time.perf_counter() - began_s

        return timed

    def take(self) -> float:
        taken, self.spent_s = self.spent_s, 0.0
        return taken


def ask(
    engine: Engine, name: str, prompt: list[int], timed: Timed, steps_s: list[float]
) -> tuple[float, list[int]]:
    """Seconds to the first token, and the greedy tokens."""
    params, began_s = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), time.perf_counter()
    first_s, drawn = 0.0, list[int]()
    engine.add(Request(name, Tokens(prompt), params))
    while engine.has_work():
        for output in engine.step():
            if output.new_token_ids and not drawn:
                first_s = time.perf_counter() - began_s
            drawn += output.new_token_ids
        steps_s.append(timed.take())
    return first_s, drawn


def engine_of(model: Path, num_tokens: int, settings: dict[str, Any]) -> Engine:
    """Its KV pool has room for one prompt of so many tokens."""
    given = {
        "model.name": str(model), "model.max_model_len": num_tokens + 64, "kv.block_size": BLOCK_SIZE,
        "kv.num_blocks": num_tokens // BLOCK_SIZE + 8, "scheduler.max_num_seqs": 4, **settings,
    }  # fmt: skip
    return build_engine(load_config(cli=given, environ={}).config)


def gb_of_two(model: Path, num_tokens: int, settings: dict[str, Any]) -> float:
    """GiB of KV of two prompts of so many tokens."""
    engine = engine_of(model, BLOCK_SIZE, settings)
    block_bytes = engine.backend.get_kv_schema().bytes_per_block
    engine.close()
    return 2 * (num_tokens // BLOCK_SIZE + 8) * block_bytes / 2**30


def measured(model: Path, num_tokens: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One engine: the first prompt computed, another one, the first one again."""
    rng = random.Random(0)
    first, second = ([rng.randrange(10, 30_000) for _ in range(num_tokens)] for _ in range(2))
    engine = engine_of(model, num_tokens, settings)
    timed, steps_s, tiers = Timed(), list[float](), engine.kv.tiers
    for name in CALLS if tiers is not None else ():
        setattr(tiers, name, timed.wrap(getattr(tiers, name)))
    computed_s, expected = ask(engine, "first", first, timed, steps_s)
    ask(engine, "second", second, timed, steps_s)
    again_s, drawn = ask(engine, "again", first, timed, steps_s)
    states = [] if tiers is None else [state._asdict() for state in tiers.states()]
    engine.close()
    steps_s.sort()
    return {
        "settings": settings, "computed_s": computed_s, "again_s": again_s, "same_tokens": drawn == expected,
        "tier_call_p50_ms": 1e3 * steps_s[len(steps_s) // 2],
        "tier_call_p99_ms": 1e3 * steps_s[int(0.99 * (len(steps_s) - 1))],
        "tier_call_max_ms": 1e3 * steps_s[-1], "steps": len(steps_s), "tiers": states,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="S")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--dtype", default="float32", help="of weights and KV; default: float32")
    parser.add_argument("--host-gb", type=float, help="default: two prompts")
    parser.add_argument("--disk-gb", type=float, help="default: two prompts")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        shape = shape_named(asked.shape).changed(max_position_embeddings=asked.tokens + 64)
        write_model(shape, Path(model))
        kv, dtype = Path(folder, "kv"), {"model.dtype": asked.dtype}
        enough_gb = gb_of_two(Path(model), asked.tokens, dtype)
        for name, settings in (
            ("host", {"kv.host_gb": asked.host_gb or enough_gb}),
            ("disk", {"kv.disk_gb": asked.disk_gb or enough_gb, "kv.dir": str(kv)}),
            ("none", {}),
        ):
            found = measured(Path(model), asked.tokens, {**dtype, **settings})
            row = {"tier": name, "tokens": asked.tokens, **found}
            rows.append(row)
            print({key: value for key, value in row.items() if key != "settings"}, flush=True)
            shutil.rmtree(kv, ignore_errors=True)
    if asked.out is not None:
        results = {"environment": asdict(environment()), "rows": rows}
        asked.out.write_text(json.dumps(results, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
