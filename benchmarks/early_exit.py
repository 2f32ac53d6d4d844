"""Measures budgets and early exits of reasoning: tokens, probe cost and accuracy.

    PYTHONPATH=tools python benchmarks/early_exit.py [--model FOLDER] [--count N] [--temperature T]

Questions are sums, differences and products whose operands the model has not seen in training. Each rule is
tried with several settings on the validation part. The setting that saves most tokens there, at an accuracy
at most one point below that of the full budget, is measured on the test part. `--model` is one of
`tools/train_cot_model.py`, which checks its results, a line at a time; without it the demo model is asked,
which reasons once, without lines.

Tokens are those of the answers and of the probes. `computed`: all tokens that the engine computed, with the
prompts of probes and what an exit computes again.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cot_data import Sum, draw_sum
from demo_data import Part
from sagellm.accel.cot.answers import answer_of
from sagellm.core.events import StepDone
from sagellm.core.protocols.cot import EarlyExit, ProbePlace
from sagellm.engines.build import load
from sagellm.engines.engine import Engine
from sagellm.engines.llm import LLM, RequestOptions

BATCH = 16
LOSS_ALLOWED = 1.0
"""Points of accuracy."""


@dataclass(frozen=True)
class Rule:
    """A way to end reasoning: sampling parameters, and `early_exit`."""

    kind: str
    name: str
    params: Mapping[str, Any]
    early_exit: EarlyExit | None = None


@dataclass(frozen=True)
class Figures:
    """Means over the questions; `accuracy` in percent."""

    accuracy: float
    tokens: float
    probe_tokens: float
    probes: float
    computed: float
    steps: float
    seconds: float

    @property
    def spent(self) -> float:
        return self.tokens + self.probe_tokens


FULL = Rule("full", "full budget", {})


def rules(place: ProbePlace, every: int, budgets: Sequence[int]) -> Iterator[Rule]:
    for budget in budgets:
        yield Rule("hard", f"hard budget {budget}", {"max_reasoning_tokens": budget})
    for budget in (0, *budgets[:-1]):
        for slope in (0.1, 0.4):
            given = {"soft_reasoning_tokens": budget, "soft_reasoning_slope": slope}
            yield Rule("soft", f"soft budget {budget}, slope {slope}", given)
    for threshold in (0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999):
        asked = EarlyExit(threshold, None, every, place, probe="", max_probe_tokens=8)
        yield Rule("confidence", f"confidence {threshold}", {}, asked)
    for window in (2, 3, 4):
        asked = EarlyExit(None, window, every, place, probe="", max_probe_tokens=8)
        yield Rule("agreement", f"agreement of {window}", {}, asked)


def questions(count: int, part: Part) -> list[Sum]:
    draw = random.Random(f"early exit:{part}")
    return [draw_sum(draw, part) for _ in range(count)]


def measure(llm: LLM, asked: Sequence[Sum], rule: Rule, temperature: float) -> Figures:
    engine = llm.engine
    assert isinstance(engine, Engine)
    counts, right, tokens, probe_tokens, probes = list[int](), 0, 0, 0, 0

    def on_step(event: StepDone) -> None:
        counts.append(event.num_prefill_tokens + event.num_decode_tokens)

    engine.clear_cache()
    unsubscribe = engine.events.subscribe(StepDone, on_step)
    params = llm.sampling_params(temperature=temperature, seed=7, max_tokens=600, **rule.params)
    options = RequestOptions(params, early_exit=rule.early_exit)
    began_s = time.perf_counter()
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        chats: list[Any] = [[{"role": "user", "content": each.question}] for each in batch]
        for each, completion in zip(batch, llm.generate(chats, options), strict=True):
            right += answer_of(completion.text, "</think>") == str(each.result)
            tokens += completion.usage.completion_tokens
            probe_tokens += completion.usage.probe_tokens
            found = completion.choices[0].exit
            probes += 0 if found is None else found.num_probes
    seconds, number = time.perf_counter() - began_s, len(asked)
    unsubscribe()
    return Figures(
        100 * right / number, tokens / number, probe_tokens / number, probes / number,
        sum(counts) / number, len(counts) / number, seconds / number,
    )  # fmt: skip


def line(rule: Rule, found: Figures, full: Figures) -> str:
    def change(ours: float, whole: float) -> str:
        return f"{100 * ours / whole - 100:+.0f} %"

    return (
        f"| {rule.name} | {found.accuracy:.1f} ({found.accuracy - full.accuracy:+.1f}) "
        f"| {found.tokens:.1f} | "
        f"{found.probe_tokens:.1f} ({found.probes:.1f}) | {change(found.spent, full.spent)} | "
        f"{change(found.computed, full.computed)} | {change(found.steps, full.steps)} | "
        f"{change(found.seconds, full.seconds)} |"
    )


HEAD = (
    "| rule | right, % | tokens | probe tokens (probes) | tokens with probes | computed | steps | time |\n"
    "|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--count", type=int, default=400, help="questions of each part")
    parser.add_argument("--temperature", type=float, default=1.0)
    chosen = parser.parse_args()
    checks = chosen.model is not None
    candidates = list(rules("line", 1, (32, 64, 96)) if checks else rules("token", 4, (8, 16, 24)))
    with load(None if chosen.model is None else str(chosen.model), {"kv.num_blocks": 4096}) as llm:
        asked, held_out = questions(chosen.count, "validation"), questions(chosen.count, "test")
        full = measure(llm, asked, FULL, chosen.temperature)
        print(f"validation, {chosen.count} questions, temperature {chosen.temperature}\n\n{HEAD}")
        print(line(FULL, full, full), flush=True)
        best: dict[str, tuple[float, Rule]] = {}
        for rule in candidates:
            found = measure(llm, asked, rule, chosen.temperature)
            print(line(rule, found, full), flush=True)
            if found.accuracy >= full.accuracy - LOSS_ALLOWED and found.spent < full.spent:
                best[rule.kind] = min(
                    best.get(rule.kind, (full.spent, rule)), (found.spent, rule), key=lambda e: e[0]
                )
        full = measure(llm, held_out, FULL, chosen.temperature)
        print(f"\ntest, {chosen.count} questions: for each kind the setting chosen above\n\n{HEAD}")
        print(line(FULL, full, full), flush=True)
        for kind in ("hard", "soft", "confidence", "agreement"):
            if kind not in best:
                print(f"| {kind}: none saves tokens at {LOSS_ALLOWED:.0f} point of loss | | | | | | | |")
                continue
            rule = best[kind][1]
            print(line(rule, measure(llm, held_out, rule, chosen.temperature), full), flush=True)


if __name__ == "__main__":
    main()
