"""What loading KV layer by layer could gain at best.

    python benchmarks/tier_layers.py --shape S --cached 512 2048 8192 --new 16 64 256 1024 --rounds 7

Nothing loads layer by layer here; this measures its bound. `load`: from asking until the KV of a cached
prompt has come from host memory. `step`: the step that computes the new tokens behind it. `beside`: both
begin together, and the step attends to another prompt of that length whose KV is on the device already, so
it waits for nothing: layers that wait for their KV cannot end sooner. `today`: a request that is alone asks
for all of it, and waits for its KV. All of a round is done in random order, in one engine that has no other
request. Milliseconds are medians of the rounds, with CPU time over time in brackets; `hidden` is the median
of 1 - beside / (load + step), with the least and the most.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from sagellm.benchmarks.engine.shapes import shape_named, write_model
from sagellm.benchmarks.reporting import environment
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_tiers import KVTiers, TierLookup
from sagellm.core.types import Namespace, Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import Engine

BLOCK_SIZE = 16
Spent: TypeAlias = tuple[float, float]
"""Seconds, and seconds of CPU time of all threads."""


class Bench:
    """An engine whose host tier has the KV of two prompts of `num_cached` tokens."""

    def __init__(self, settings: dict[str, Any], num_cached: int, rng: random.Random) -> None:
        self.engine, self._rng, self._names = engine_of(settings), rng, map(str, count())
        assert self.engine.kv.tiers is not None
        self.tiers: KVTiers = self.engine.kv.tiers
        self.prompts = [self._tokens(num_cached) for _ in range(2)]
        for prompt in self.prompts:
            self._compute(prompt)
            self._settle()

    def load_and_step(self, num_new: int) -> tuple[Spent, Spent]:
        self._clear()
        load = timed(lambda: self._wait_for(self._begin_load(self.prompts[0])))
        return load, self._timed_compute(self.prompts[0] + self._tokens(num_new), has_kv=True)

    def beside(self, num_new: int) -> Spent:
        """The load of one prompt, and the step behind the other one."""
        self._clear()
        self._wait_for(self._begin_load(self.prompts[0]))
        whole = self.prompts[0] + self._tokens(num_new)

        def both() -> None:
            name = self._begin_load(self.prompts[1])
            self._compute(whole)
            self._wait_for(name)

        return self._settled(both)

    def today(self, num_new: int) -> Spent:
        self._clear()
        return self._timed_compute(self.prompts[0] + self._tokens(num_new), has_kv=False)

    def _timed_compute(self, prompt: list[int], *, has_kv: bool) -> Spent:
        """Raises `BookkeepingError` unless the KV of the cached prompt was there, or was loaded."""
        loaded = self._num_loaded()
        spent = self._settled(lambda: self._compute(prompt))
        if (self._num_loaded() == loaded) != has_kv:
            raise BookkeepingError("the KV was to be on the device" if has_kv else "nothing was loaded")
        return spent

    def _compute(self, prompt: list[int]) -> None:
        """From adding a request until its first token, which is its last."""
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self.engine.add(Request(next(self._names), Tokens(prompt), params))
        while not any(output.new_token_ids for output in self.engine.step()):
            pass

    def _begin_load(self, prompt: list[int]) -> str:
        name = f"load {next(self._names)}"
        outcome = self.tiers.request(name, Tokens(prompt), Namespace(), len(prompt))
        if outcome is not TierLookup.HIT_PENDING:
            raise BookkeepingError(f"a load was to begin: {outcome}")
        return name

    def _wait_for(self, name: str) -> None:
        while self.tiers.is_loading(name):
            self.tiers.wait(1.0)
            self.tiers.poll()

    def _settled(self, action: Callable[[], None]) -> Spent:
        """Seconds of an action; what it has saved is written before this returns."""
        spent = timed(action)
        self._settle()
        return spent

    def _settle(self) -> None:
        while self.engine.has_work():
            self.engine.step()

    def _clear(self) -> None:
        """Evict all of the device."""
        self._settle()
        self.engine.clear_cache()

    def _num_loaded(self) -> int:
        return sum(state.loaded for state in self.tiers.states())

    def _tokens(self, number: int) -> list[int]:
        return [self._rng.randrange(10, 30_000) for _ in range(number)]


def timed(action: Callable[[], None]) -> Spent:
    began_s, cpu_s = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began_s, time.process_time() - cpu_s


def engine_of(settings: dict[str, Any]) -> Engine:
    return build_engine(load_config(cli=settings, environ={}).config)


def settings_of(model: Path, asked: argparse.Namespace, num_cached: int) -> dict[str, Any]:
    """The device has room for both prompts; the tier for all new tokens, too."""
    longest, num_new = max(asked.new), sum(asked.new) * (asked.rounds + 1) * 3
    settings: dict[str, Any] = {
        "model.name": str(model), "model.dtype": asked.dtype, "kv.block_size": BLOCK_SIZE,
        "model.max_model_len": num_cached + longest + 64, "scheduler.max_num_seqs": 4,
        "scheduler.max_batched_tokens": max(2048, longest), "kv.num_blocks": BLOCK_SIZE,
    }  # fmt: skip
    if asked.threads:
        settings["engine.threads"] = asked.threads
    engine = engine_of({**settings, "model.max_model_len": BLOCK_SIZE})
    gb_per_token = engine.backend.get_kv_schema().bytes_per_block / BLOCK_SIZE / 2**30
    engine.close()
    room = 2 * num_cached + longest + 16 * BLOCK_SIZE
    settings["kv.num_blocks"] = room // BLOCK_SIZE
    return {**settings, "kv.host_gb": (room + num_new) * gb_per_token}


def measured(bench: Bench, new: Sequence[int], num_rounds: int, rng: random.Random) -> list[dict[str, Any]]:
    """A row for each number of new tokens; a first round is not counted."""
    spent: dict[int, dict[str, list[Spent]]] = {num_new: defaultdict(list) for num_new in new}
    for number in range(num_rounds + 1):
        for num_new, own in spent.items():
            for name in rng.sample(["apart", "beside", "today"], 3):
                if name == "apart":
                    load, step = bench.load_and_step(num_new)
                    own["load"].append(load)
                    own["step"].append(step)
                else:
                    own[name].append(getattr(bench, name)(num_new))
            if not number:
                own.clear()
    return [{"new": num_new, **row_of(own)} for num_new, own in spent.items()]


def row_of(own: dict[str, list[Spent]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for name in ("load", "step", "beside", "today"):
        row[f"{name}_s"] = statistics.median(spent_s for spent_s, _ in own[name])
        row[f"{name}_cores"] = statistics.median(cpu_s / spent_s for spent_s, cpu_s in own[name])
    triples = zip(own["load"], own["step"], own["beside"], strict=True)
    hidden = [1 - beside / (load + step) for (load, _), (step, _), (beside, _) in triples]
    least, most = min(hidden), max(hidden)
    return {**row, "hidden": statistics.median(hidden), "least_hidden": least, "most_hidden": most}


def show(num_cached: int, row: dict[str, Any]) -> None:
    names = ("load", "step", "beside", "today")
    times = " | ".join(f"{1e3 * row[f'{name}_s']:.0f} ({row[f'{name}_cores']:.1f})" for name in names)
    spread = f"{row['hidden']:.0%} ({row['least_hidden']:.0%} to {row['most_hidden']:.0%})"
    print(f"| {num_cached:,} | {row['new']:,} | {times} | {spread} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="S")
    parser.add_argument("--dtype", default="float32", help="of weights and KV; default: float32")
    parser.add_argument("--cached", type=int, nargs="+", default=[512, 2048, 8192], help="whole blocks of 16")
    parser.add_argument("--new", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of a step; default: as the engine chooses")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rng, rows = random.Random(0), []
    print("| cached | new | load, ms (cores) | step | beside | today | hidden |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as model:
        longest = max(asked.cached) + max(asked.new) + 64
        write_model(shape_named(asked.shape).changed(max_position_embeddings=longest), Path(model))
        for num_cached in asked.cached:
            bench = Bench(settings_of(Path(model), asked, num_cached), num_cached, rng)
            for row in measured(bench, asked.new, asked.rounds, rng):
                rows.append({"cached": num_cached, **row})
                show(num_cached, row)
            bench.engine.close()
    if asked.out is not None:
        results = {"environment": asdict(environment()), "rows": rows}
        asked.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
