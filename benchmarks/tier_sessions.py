"""Twelve times more conversations than the device's KV pool holds: what tiers gain.

    python benchmarks/tier_sessions.py --folder DIR_ON_A_DISK [--shape S] [--rounds 3] [--out FILE]

Each session opens with a prompt of `--history` tokens (a system prompt, documents, what was said before), and
each of `--turns` turns adds a question of `--question` tokens and the answer, which has `--answer` tokens. In
each turn all sessions ask once, in a new random order, `--at-once` of them at a time. The pool holds one in
twelve of the sessions at their full length. Three engines are measured in turns, each time from an empty
cache: without tiers, with host memory for everything, with a quarter of that and a disk. A ratio is the
median of the rounds' ratios. `later turns` leaves out the first turn, in which no engine can reuse anything.
`same_answers` is the share of sessions whose answers equal those of the engine without tiers.

Published for this kind of work, on GPUs: LMCache with vLLM "up to 15x improvement in throughput across
workloads such as multi-round question answering and document analysis" (arXiv 2510.09665), "3-10x delay
savings" (README of github.com/LMCache/LMCache).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shutil
import statistics
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sagellm.benchmarks.engine.shapes import shape_named, write_model
from sagellm.benchmarks.reporting import environment
from sagellm.core.blocks import cdiv
from sagellm.core.types import FinishReason, KVCacheSchema, Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import Engine

BLOCK = 16
WITHOUT, HOST, BOTH = "without tiers", "host", "host and disk"


@dataclass(frozen=True)
class Workload:
    """Sizes in tokens. `times`: sessions for one that the pool holds."""

    sessions: int
    times: int
    turns: int
    history: int
    question: int
    answer: int
    at_once: int

    @property
    def session_blocks(self) -> int:
        """Of a session at its full length."""
        return cdiv(self.history + self.turns * (self.question + self.answer), BLOCK)

    @property
    def pool_blocks(self) -> int:
        return self.session_blocks * self.sessions // self.times


@dataclass
class Measured:
    """Of one run. `turns_s`: seconds of each turn of all sessions; tokens are of prompts."""

    turns_s: list[float]
    answers: list[list[int]]
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def total_s(self) -> float:
        return sum(self.turns_s)

    @property
    def later_s(self) -> float:
        return sum(self.turns_s[1:])


def run(engine: Engine, work: Workload) -> Measured:
    """All turns of all sessions; answers in the order of sessions and turns."""
    rng = random.Random(0)

    def drawn(num_tokens: int) -> list[int]:
        return [rng.randrange(10, 30_000) for _ in range(num_tokens)]

    texts = [drawn(work.history) for _ in range(work.sessions)]
    measured = Measured([], [[] for _ in texts])
    for turn in range(work.turns):
        for text in texts:
            text.extend(drawn(work.question))
        order = rng.sample(range(work.sessions), work.sessions)
        began_s = time.perf_counter()
        answers = ask_all(engine, turn, [(number, texts[number]) for number in order], work, measured)
        measured.turns_s.append(time.perf_counter() - began_s)
        for number, text in enumerate(texts):
            text.extend(answers[number])
            measured.answers[number].extend(answers[number])
    return measured


def ask_all(
    engine: Engine, turn: int, asked: list[tuple[int, list[int]]], work: Workload, measured: Measured
) -> dict[int, list[int]]:
    """Ask in order, `at_once` requests at a time; returns the answers by session."""
    params = SamplingParams(max_tokens=work.answer, temperature=0.0, ignore_eos=True)
    waiting, answers, num_open = deque(asked), dict[int, list[int]](), 0
    while waiting or num_open:
        while waiting and num_open < work.at_once:
            number, text = waiting.popleft()
            answers[number] = []
            engine.add(Request(f"{number} {turn}", Tokens(text), params))
            num_open += 1
        for output in engine.step():
            answers[int(output.request_id.split()[0])] += output.new_token_ids
            if output.finish_reason is not None:
                if output.finish_reason is not FinishReason.LENGTH:
                    raise RuntimeError(f"{output.request_id} ended: {output.finish_reason}, {output.error}")
                num_open -= 1
                measured.num_prompt_tokens += output.num_prompt_tokens
                measured.num_cached_tokens += output.num_cached_tokens
    return answers


def measure(work: Workload, settings: dict[str, Any]) -> tuple[Measured, list[Any]]:
    """One engine, from an empty cache; also the final state of its tiers."""
    given = {
        "kv.num_blocks": work.pool_blocks, "kv.block_size": BLOCK,
        "model.max_model_len": work.session_blocks * BLOCK + BLOCK,
        "scheduler.max_num_seqs": work.at_once, **settings,
    }  # fmt: skip
    engine = build_engine(load_config(cli=given, environ={}).config)
    measured = run(engine, work)
    states = [] if engine.kv.tiers is None else [state._asdict() for state in engine.kv.tiers.states()]
    engine.close()
    del engine
    gc.collect()
    return measured, states


def settings_of(
    work: Workload, model: dict[str, Any], block_bytes: int, folder: Path
) -> dict[str, dict[str, Any]]:
    """Of the engines. All sessions fit into host memory, or into the disk, with a tenth to spare."""
    gb = 1.1 * work.sessions * work.session_blocks * block_bytes / 2**30
    return {
        WITHOUT: model,
        HOST: {**model, "kv.host_gb": gb},
        BOTH: {**model, "kv.host_gb": gb / 4, "kv.disk_gb": gb, "kv.dir": str(folder)},
    }


def compare(runs: dict[str, list[Measured]]) -> list[dict[str, Any]]:
    """A row for each engine. A ratio of 2 means twice the throughput."""
    base, rows = runs[WITHOUT], []
    for name, own in runs.items():
        pairs = list(zip(base, own, strict=True))
        row = {
            "engine": name,
            "total_s": statistics.median(each.total_s for each in own),
            "later_turns_s": statistics.median(each.later_s for each in own),
            "ratio": statistics.median(without.total_s / each.total_s for without, each in pairs),
            "later_turns_ratio": statistics.median(without.later_s / each.later_s for without, each in pairs),
            "reused": own[-1].num_cached_tokens / own[-1].num_prompt_tokens,
            "same_answers": statistics.mean(
                answers == expected
                for without, each in pairs
                for answers, expected in zip(each.answers, without.answers, strict=True)
            ),
        }
        rows.append(row)
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="S")
    parser.add_argument("--dtype", default="auto", help="float32 where runs on several days are compared")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--times", type=int, default=12, help="sessions for one that the pool holds")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--history", type=int, default=2000)
    parser.add_argument("--question", type=int, default=120)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = vars(parser.parse_args())
    shape, dtype, parent, num_rounds, file = (
        asked.pop(name) for name in ("shape", "dtype", "folder", "rounds", "out")
    )
    work = Workload(**asked)
    tiers: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory(dir=parent) as folder:
        write_model(shape_named(shape), Path(model))
        named = {"model.name": model, "model.dtype": dtype}
        schema = kv_schema(named)
        engines = settings_of(work, named, schema.bytes_per_block, Path(folder, "kv"))
        print(f"{work}, pool of {work.pool_blocks} blocks, KV in {schema.dtype}", flush=True)
        runs: dict[str, list[Measured]] = {name: [] for name in engines}
        for _ in range(num_rounds):
            for name, settings in engines.items():
                measured, tiers[name] = measure(work, settings)
                runs[name].append(measured)
                print(f"{name}: {measured.total_s:.1f} s, later turns {measured.later_s:.1f} s", flush=True)
                shutil.rmtree(Path(folder, "kv"), ignore_errors=True)
    rows = compare(runs)
    if file is not None:
        results = {
            "environment": asdict(environment()),
            "workload": asdict(work),
            "rows": rows,
            "tiers": tiers,
        }
        results["turns_s"] = {name: [each.turns_s for each in own] for name, own in runs.items()}
        file.write_text(json.dumps(results, indent=1, default=str) + "\n")


def kv_schema(model: dict[str, Any]) -> KVCacheSchema:
    """Of the engine's blocks, in the dtype that it chooses."""
    engine = build_engine(load_config(cli={**model, "kv.num_blocks": 64}, environ={}).config)
    schema = engine.backend.get_kv_schema()
    engine.close()
    return schema


if __name__ == "__main__":
    main()
