"""What speculative decoding gains in time: recorded answers, taken as a model's own draws.

    SAGELLM_TRACES=FOLDER python benchmarks/speculative_speed.py [--shape S] [--answers 12] [--out FILE]

A model with random weights computes all steps; each token that it draws is replaced by that of the recorded
answer, so that proposers meet real text and steps take their real time. Answers are those of the part of the
workloads on which nothing was chosen (`forced_answers.REPORT`), spread over all of it; a proposer has met the
outputs before an answer as it would in a server. Each answer is decoded by all methods in turns, one after
the other (batch 1) or `--at-once` at a time, and the time from its first token on counts. Prompts have their
last `--prompt` tokens alone, answers their first 1,024.

Printed for each workload: tokens per second without, and how many times as fast each method is, in all and
for the slowest answer or group. On a machine with other work `--cpu-time` counts CPU seconds, of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sagellm.benchmarks.engine.shapes import shape_named, write_model
from sagellm.benchmarks.micro.forced_answers import REPORT, WORKLOADS, ForcedAnswer, workload
from sagellm.benchmarks.micro.speculative import BRANCHES, TREES
from sagellm.benchmarks.reporting import environment
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import Engine
from sagellm.engines.native import backend as native
from sagellm.engines.native.sampler import RowSampler, SampledTokens, sample

METHODS = ("none", "prompt_lookup", "suffix", TREES)
VOCABULARY = 32_000
MOST_TOKENS = 1024
"""Longer answers are cut."""
Sample = Callable[..., SampledTokens]


class ProcessClock:
    """The CPU time of this process."""

    def now(self) -> float:
        return time.process_time()


class ForcedDraws:
    """Replaces what a model draws.

    The seed of a request is the number of its answer.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self.answers: dict[int, Sequence[int]] = {}

    def __call__(self, logits: Any, rows: Sequence[RowSampler], by_kernel: Any = None) -> SampledTokens:
        drawn = self._sample(logits, rows, by_kernel)
        for place, row in enumerate(rows):
            answer = self.answers[row.seed]
            if row.num_outputs < len(answer):
                drawn.token_ids[place] = answer[row.num_outputs]
        return drawn


def small(tokens: Tokens, most: int | None = None) -> list[int]:
    """The last tokens, as ids of the model."""
    return [token % VOCABULARY for token in tokens.slice(max(0, len(tokens) - most) if most else 0)]


def decode(
    engine: Engine, forced: ForcedDraws, group: Sequence[tuple[int, ForcedAnswer]], most: int, clock: Clock
) -> float:
    """Seconds from the last first token to the end of all answers."""
    for number, answer in group:
        output = small(answer.output)[:MOST_TOKENS]
        forced.answers[number] = output
        params = SamplingParams(temperature=0.0, max_tokens=len(output), seed=number, ignore_eos=True)
        engine.add(Request(f"r{number}", Tokens(small(answer.prompt, most)), params))
    begun, drawn, began_s = set[str](), defaultdict[str, list[int]](list), 0.0
    while engine.has_work():
        for output_part in engine.step():
            drawn[output_part.request_id] += output_part.new_token_ids
            if len(begun) < len(group):
                begun.add(output_part.request_id)
                began_s = clock.now()
    spent_s = clock.now() - began_s
    for number, answer in group:
        assert drawn[f"r{number}"] == small(answer.output)[:MOST_TOKENS]
    return spent_s


def measured(
    engines: dict[str, Engine],
    forced: ForcedDraws,
    answers: Sequence[ForcedAnswer],
    asked: argparse.Namespace,
) -> dict[str, Any]:
    """Figures of one workload."""
    spent = {name: list[float]() for name in engines}
    step = max(1, len(answers) // asked.answers)
    picked = [number for number in range(step - 1, len(answers), step) if len(answers[number].output) > 1]
    groups = [picked[at : at + asked.at_once] for at in range(0, len(picked), asked.at_once)]
    done, num_tokens = 0, 0
    for turn, group in enumerate(groups):
        for number in range(done, group[0]):  # what the server has answered meanwhile
            for engine in engines.values():
                if engine.speculation is not None:
                    prompt = Tokens(small(answers[number].prompt, asked.prompt))
                    tokens = Tokens([*prompt, *small(answers[number].output)])
                    engine.speculation._proposer.forget(Request(f"past {number}", prompt), tokens)
        done = group[-1] + 1
        num_tokens += sum(min(len(answers[number].output), MOST_TOKENS) - 1 for number in group)
        names = list(engines)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            own = [(number, answers[number]) for number in group]
            spent[name].append(decode(engines[name], forced, own, asked.prompt, clock_of(asked)))
    plain = spent["none"]
    row: dict[str, Any] = {"answers": len(picked), "tokens_per_s": round(num_tokens / sum(plain), 1)}
    for name in engines:
        if name != "none":
            ratios = sorted(before / after for before, after in zip(plain, spent[name], strict=True))
            row[name] = round(sum(plain) / sum(spent[name]), 3)
            row[f"{name}, slowest"], row[f"{name}, median"] = (
                round(ratios[0], 3),
                round(ratios[len(ratios) // 2], 3),
            )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="S")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--answers", type=int, default=12, help="of each workload")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=1024, help="the most tokens of a prompt")
    parser.add_argument("--num-tokens", type=int, default=8, help="speculative.num_tokens")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, and its CPU time")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    folder = os.environ.get("SAGELLM_TRACES")
    if not folder:
        parser.error("set SAGELLM_TRACES to the folder of recorded texts")
    forced = ForcedDraws(sample)
    vars(native)["sample"] = forced  # the name that a backend calls
    rows = []
    with tempfile.TemporaryDirectory() as model:
        write_model(shape_named(asked.shape), Path(model))
        engines = {name: engine_of(model, name, asked) for name in asked.methods.split(",")}
        for name in asked.workloads:
            rows.append(
                {"workload": name, **measured(engines, forced, workload(name, Path(folder), REPORT), asked)}
            )
            print(rows[-1], flush=True)
    if asked.out is not None:
        results = {"environment": asdict(environment()), "rows": rows}
        asked.out.write_text(json.dumps(results, indent=1, default=str) + "\n")


def engine_of(model: str, method: str, asked: argparse.Namespace) -> Engine:
    options = {"branches": BRANCHES} if method == TREES else {}
    given = {
        "model.name": model, "model.dtype": asked.dtype, "model.max_model_len": 8192, "kv.num_blocks": 2048,
        "scheduler.max_num_seqs": max(4, asked.at_once), "speculative.num_tokens": asked.num_tokens,
        "speculative.method": "suffix" if method == TREES else method, "speculative.method_options": options,
        "engine.threads": 1 if asked.cpu_time else None,
    }  # fmt: skip
    return build_engine(load_config(cli=given, environ={}).config, clock=clock_of(asked))


def clock_of(asked: argparse.Namespace) -> Clock:
    return ProcessClock() if asked.cpu_time else MonotonicClock()


if __name__ == "__main__":
    main()
