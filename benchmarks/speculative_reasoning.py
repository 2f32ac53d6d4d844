"""Measures speculative reasoning: accuracy, what the served model still computes, and CPU time.

    PYTHONPATH=tools python benchmarks/speculative_reasoning.py --target FOLDER --small FOLDER [--batch N]

Both models are of `tools/train_cot_model.py`, the small one trained for fewer steps. Questions and parts are
those of `benchmarks/early_exit.py`. Thresholds are tried on the validation part; the one with which the
target draws least, at an accuracy at most one point below its own, is measured on the test part.

`drawn`: tokens that the target has drawn itself. `computed`: all that it has computed, judges' prompts and
what is computed again included. CPU time is that of the thread, both models together.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cot_data import Sum, draw_sum
from demo_data import Part
from sagellm.accel.cot.answers import answer_of
from sagellm.core.events import StepDone
from sagellm.core.protocols.cot import SpeculativeReasoning
from sagellm.engines.build import load
from sagellm.engines.engine import Engine
from sagellm.engines.llm import LLM, RequestOptions

LOSS_ALLOWED = 1.0
"""Points of accuracy."""

HEAD = (
    "| rule | right, % | drawn | small model's (accepted) | judge tokens | steps accepted | computed "
    "| target's steps | CPU ms |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass
class Figures:
    """Sums over `count` questions."""

    count: int
    right: int = 0
    tokens: int = 0
    accepted_tokens: int = 0
    draft_tokens: int = 0
    judge_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0
    computed: int = 0
    engine_steps: int = 0
    cpu_s: float = 0.0

    @property
    def accuracy(self) -> float:
        return 100 * self.right / self.count

    @property
    def drawn(self) -> float:
        return (self.tokens - self.accepted_tokens) / self.count

    def line(self, name: str) -> str:
        count = self.count
        share = f"{100 * self.num_accepted / self.num_steps:.0f} %" if self.num_steps else ""
        return (
            f"| {name} | {self.accuracy:.1f} | {self.drawn:.1f} | {self.draft_tokens / count:.1f} "
            f"({self.accepted_tokens / count:.1f}) | {self.judge_tokens / count:.1f} | {share} "
            f"| {self.computed / count:.1f} | {self.engine_steps / count:.1f} "
            f"| {1000 * self.cpu_s / count:.1f} |"
        )


def questions(count: int, part: Part) -> list[Sum]:
    draw = random.Random(f"early exit:{part}")
    return [draw_sum(draw, part) for _ in range(count)]


def ask(
    llm: LLM,
    asked: Sequence[Sum],
    rules: Sequence[SpeculativeReasoning | None],
    batch: int,
    temperature: float,
) -> list[Figures]:
    """Figures of each rule; rules take turns from batch to batch."""
    engine = llm.engine
    assert isinstance(engine, Engine)
    found = [Figures(len(asked)) for _ in rules]
    params = llm.sampling_params(temperature=temperature, seed=7, max_tokens=600)
    for start in range(0, len(asked), batch):
        some = asked[start : start + batch]
        chats: list[Any] = [[{"role": "user", "content": each.question}] for each in some]
        for rule, figures in zip(rules, found, strict=True):
            engine.clear_cache()

            def on_step(event: StepDone, figures: Figures = figures) -> None:
                figures.computed += event.num_prefill_tokens + event.num_decode_tokens
                figures.engine_steps += 1

            unsubscribe, began_s = engine.events.subscribe(StepDone, on_step), time.thread_time()
            completions = llm.generate(chats, RequestOptions(params, speculative_reasoning=rule))
            figures.cpu_s += time.thread_time() - began_s
            unsubscribe()
            for each, completion in zip(some, completions, strict=True):
                figures.right += answer_of(completion.text, "</think>") == str(each.result)
                figures.tokens += completion.usage.completion_tokens
                steps = completion.choices[0].drafted
                if steps is not None:
                    figures.accepted_tokens += steps.num_accepted_tokens
                    figures.draft_tokens += steps.num_draft_tokens
                    figures.judge_tokens += steps.num_judge_tokens
                    figures.num_steps += steps.num_steps
                    figures.num_accepted += steps.num_accepted
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--small", required=True)
    parser.add_argument("--count", type=int, default=200, help="questions of each part")
    parser.add_argument("--batch", type=int, default=16, help="questions that run together")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--judge", default="", help="text that asks for a score; none: probabilities")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.0, 8.7, 8.8, 8.9, 8.95, 8.98])
    given = parser.parse_args()
    rules = [SpeculativeReasoning(threshold, judge=given.judge) for threshold in given.thresholds]
    validation, test = questions(given.count, "validation"), questions(given.count, "test")
    print(
        f"{given.count} questions a part, {given.batch} together, temperature {given.temperature}\n\n{HEAD}"
    )
    with load(given.small, {"kv.num_blocks": 4096}) as llm:
        [alone] = ask(llm, validation, [None], given.batch, given.temperature)
        print(alone.line("validation: small model alone"), flush=True)
    settings = {"kv.num_blocks": 4096, "speculative.reasoning_model": given.small}
    with load(given.target, settings) as llm:
        target, *tried = ask(llm, validation, [None, *rules], given.batch, given.temperature)
        print(target.line("validation: target alone"))
        for rule, figures in zip(rules, tried, strict=True):
            print(figures.line(f"validation: threshold {rule.threshold}"))
        good = [
            (figures.drawn, index)
            for index, figures in enumerate(tried)
            if figures.accuracy >= target.accuracy - LOSS_ALLOWED
        ]
        if not good:
            print(f"no threshold loses at most {LOSS_ALLOWED:.0f} point")
            return
        best = rules[min(good)[1]]
        target, chosen = ask(llm, test, [None, best], given.batch, given.temperature)
        print(target.line("test: target alone"))
        print(chosen.line(f"test: threshold {best.threshold}"))


if __name__ == "__main__":
    main()
