"""Measures `max_reasoning_kv_tokens`: accuracy, KV held, and the time of a decode step.

    PYTHONPATH=tools python benchmarks/reasoning_kv.py [--model FOLDER] [--count N] [--limits 32 48 64 96]
    PYTHONPATH=tools python benchmarks/reasoning_kv.py --speed [--shape S]

Without `--speed`: greedy answers to questions of the test part of `benchmarks/early_exit.py`, whose model is
the one of `tools/train_cot_model.py`, or the demo model. KV held: tokens in blocks of running requests,
prompts included, the mean over steps and requests.

With `--speed`: a model of random weights, one request in decode behind a long reasoning, with and without a
limit in turns; the least CPU seconds of the process per token over the rounds.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cot_data import Sum, draw_sum
from sagellm.accel.cot.answers import answer_of
from sagellm.benchmarks.engine.shapes import SHAPES, write_model
from sagellm.core.config import Config
from sagellm.core.events import StepDone
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load
from sagellm.engines.engine import Engine
from sagellm.engines.llm import LLM

BATCH, BLOCK = 16, 4
"""Reasoning of these models is short: blocks of 16 tokens would be a sixth of it."""
LENGTHS, LIMIT, STEPS, ROUNDS = (1024, 2048, 4096), 512, 32, 3
OPEN, CLOSE = 3, 4


@dataclass(frozen=True)
class Found:
    """`accuracy` in percent; the others are means."""

    accuracy: float
    tokens: float
    held: float
    dropped: float


def ask(llm: LLM, asked: Sequence[Sum], limit: int | None) -> Found:
    engine = llm.engine
    assert isinstance(engine, Engine)
    held, right, tokens, before = list[float](), 0, 0, engine.diagnostics().num_dropped_tokens

    def on_step(event: StepDone) -> None:
        if event.num_running:
            held.append(engine.kv.block_states().active * BLOCK / event.num_running)

    engine.clear_cache()
    unsubscribe = engine.events.subscribe(StepDone, on_step)
    params = llm.sampling_params(temperature=0, max_tokens=600, max_reasoning_kv_tokens=limit)
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        chats: list[Any] = [[{"role": "user", "content": each.question}] for each in batch]
        for each, completion in zip(batch, llm.generate(chats, params), strict=True):
            right += answer_of(completion.text, "</think>") == str(each.result)
            tokens += completion.usage.completion_tokens
    unsubscribe()
    number, dropped = len(asked), engine.diagnostics().num_dropped_tokens - before
    return Found(100 * right / number, tokens / number, sum(held) / len(held), dropped / number)


def accuracy(model: str | None, count: int, limits: Sequence[int]) -> None:
    llm = load(model, {"kv.compress_reasoning": True, "kv.block_size": BLOCK})
    print("| limit | right, % | tokens | KV held | dropped |\n|---|---|---|---|---|")
    draw = random.Random("early exit:test")
    asked = [draw_sum(draw, "test") for _ in range(count)]
    for limit in (None, *limits):
        found = ask(llm, asked, limit)
        figures = f"{found.accuracy:.1f} | {found.tokens:.1f} | {found.held:.1f} | {found.dropped:.1f}"
        print(f"| {limit or 'none'} | {figures} |", flush=True)
    llm.close()


def seconds_per_token(
    engine: Engine, name: str, num_reasoned: int, vocab_size: int, limit: int | None
) -> float:
    """CPU seconds of a decode step behind so many tokens of reasoning."""
    reasoned = tuple(10 + i * 7919 % (vocab_size - 10) for i in range(num_reasoned))
    params = SamplingParams(
        temperature=0, max_tokens=num_reasoned + STEPS + 8, ignore_eos=True, logit_bias={CLOSE: -100.0},
        reasoning_token_ids=(OPEN, CLOSE), max_reasoning_kv_tokens=limit,
    )  # fmt: skip
    engine.clear_cache()
    engine.add(Request(name, Tokens([*range(10, 42), OPEN]), params, generated=reasoned))
    num_drawn, began_s = 0, 0.0
    while engine.has_work():
        num_drawn += sum(len(output.new_token_ids) for output in engine.step())
        if num_drawn == 4:  # blocks are dropped, and the step is recorded
            began_s, first = time.process_time(), num_drawn
        if num_drawn == STEPS + 4:
            spent_s = time.process_time() - began_s
            engine.abort(name)
            return spent_s / (num_drawn - first)
    raise RuntimeError("the request has ended before it was measured")


def speed(shape: str) -> None:
    with TemporaryDirectory() as folder:
        write_model(SHAPES[shape], Path(folder))
        longest = LENGTHS[-1] + 256
        config = Config.model_validate(
            {
                "model": {"name": folder, "max_model_len": longest},
                "kv": {"compress_reasoning": True},
                "scheduler": {"max_num_seqs": 1},
            }
        )
        engine = build_engine(config)
        vocab_size = engine.capability().vocab_size
        print(f"| reasoning | all KV, ms | {LIMIT} tokens, ms | |\n|---|---|---|---|")
        for length in LENGTHS:
            least = {None: float("inf"), LIMIT: float("inf")}
            for number in range(ROUNDS):
                for limit, before in least.items():
                    name = f"{length} {number} {limit}"
                    least[limit] = min(before, seconds_per_token(engine, name, length, vocab_size, limit))
            whole, part = 1000 * least[None], 1000 * least[LIMIT]
            print(f"| {length} | {whole:.2f} | {part:.2f} | {100 * (part / whole - 1):+.0f} % |", flush=True)
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--limits", type=int, nargs="+", default=[32, 48, 64, 96])
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--shape", default="S", choices=sorted(SHAPES))
    given = parser.parse_args()
    if given.speed:
        speed(given.shape)
    else:
        accuracy(given.model, given.count, given.limits)


if __name__ == "__main__":
    main()
