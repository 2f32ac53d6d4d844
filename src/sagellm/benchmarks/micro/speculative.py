"""`sagellm bench micro speculative`: what proposers cost, and how many tokens a step settles.

Section p: the first proposal of a request, whose prompt is taken in. Section s: a step behind a prompt of
`paths` tokens, of which one token is new. Section m: bytes for each token of a tree. Section e: an output of
1,024 tokens comes to the shared outputs, and as many leave. Section r: recorded answers with forced tokens.
Section a: an engine with random weights, by acceptance (`acceptance.py`).
Sections p, s and e have suffix trees in Python beside those in C++; what both propose is equal. "suffix with
branches" proposes trees of as many tokens as the others propose in chains.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

from sagellm.benchmarks.micro.acceptance import acceptance_table, by_acceptance
from sagellm.benchmarks.micro.cases import (
    MicroBenchCell,
    MicroBenchmark,
    MicroBenchPlan,
    MicroBenchRow,
    Recipe,
    Section,
    Stopwatch,
    TimedOperation,
    timed,
)
from sagellm.benchmarks.micro.forced_answers import REPORT, WORKLOADS, replay, workload
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.protocols.speculative import Asked
from sagellm.core.registry import registry
from sagellm.core.types import Request, Tokens

TRACES = "SAGELLM_TRACES"
PYTHON, TREES = "suffix in Python", "suffix with branches"
BRANCHES = 4
VOCABULARY = 8192
OUTPUT_TOKENS, COMING_TOKENS = 1024, 20_000
LIMITS = (4, 8, 16)
"""Tokens proposed in a step at most."""


def _words(seed: int, count: int) -> list[int]:
    """Tokens of Zipf's law, in phrases that come again."""
    draw = random.Random(seed)
    weights = list(accumulate(1 / rank for rank in range(1, VOCABULARY)))
    phrases = [draw.choices(range(VOCABULARY - 1), cum_weights=weights, k=12) for _ in range(200)]
    found: list[int] = []
    while len(found) < count:
        found += (
            draw.choice(phrases)
            if draw.random() < 0.1
            else draw.choices(range(VOCABULARY - 1), cum_weights=weights, k=12)
        )
    return found[:count]


TEXTS: dict[str, Callable[[int, int], list[int]]] = {
    "words": _words,
    "one token": lambda seed, count: [7] * count,
}


def _made(variant: str, **options: int) -> Any:
    """A proposer. Options are those of `suffix`, and left out for others."""
    if variant == PYTHON:
        return registry("proposer").create("suffix", native=False, **options)
    if variant == TREES:
        return registry("proposer").create("suffix", branches=BRANCHES, **options)
    return registry("proposer").create(variant, **(options if variant == "suffix" else {}))


def _check(variant: str) -> object:
    if variant in (PYTHON, TREES):
        return variant
    try:
        return registry("proposer").get(variant)
    except UnknownNameError as error:
        raise UnknownNameError(f"{error} {PYTHON!r} and {TREES!r} are measured too") from error


def _prompt(cell: MicroBenchCell, calls: int, text: str) -> TimedOperation:
    proposer = _made(cell.variant)
    request = Request("prompt", Tokens(TEXTS[text](cell.plan.seed, cell.size)))

    def end(_: object, __: object) -> None:
        proposer.forget(request, request.tokens)

    asked = [Asked(request, request.tokens, LIMITS[-1])]
    return TimedOperation(lambda _: proposer.propose(asked), teardown=end)


def _step(cell: MicroBenchCell, calls: int, text: str) -> TimedOperation:
    """The tokens go on as the text does.

    The shared outputs are four times as long, and of another text.
    """
    proposer = _made(cell.variant)
    words = TEXTS[text](cell.plan.seed, cell.size + COMING_TOKENS)
    proposer.forget(Request("past", Tokens([1])), Tokens(_words(cell.plan.seed + 1, 4 * cell.size)))
    request, coming = Request("step", Tokens(words[: cell.size])), cycle(words[cell.size :])
    tokens = Tokens(request.tokens)
    proposer.propose([Asked(request, tokens, LIMITS[-1])])

    def step(_: object) -> object:
        tokens.append(next(coming))
        return proposer.propose([Asked(request, tokens, LIMITS[-1])])

    return TimedOperation(step)


def _end(cell: MicroBenchCell, calls: int) -> TimedOperation:
    """The shared outputs are full, so that as many tokens leave."""
    kept = 8 * max(cell.plan.paths)
    proposer, request = _made(cell.variant, shared_tokens=kept), Request("end", Tokens([1]))
    words = _words(cell.plan.seed, 2 * kept + OUTPUT_TOKENS)
    starts = cycle(range(0, 2 * kept, OUTPUT_TOKENS))

    def output() -> Tokens:
        start = next(starts)
        return Tokens([1, *words[start : start + OUTPUT_TOKENS]])

    for _ in range(kept // OUTPUT_TOKENS + 1):
        proposer.forget(request, output())
    return TimedOperation(lambda tokens: proposer.forget(request, tokens), setup=output)


def _memory(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    from sagellm.accel.speculative.native_suffix_tree import NativeSuffixTree, native_suffix_trees
    from sagellm.accel.speculative.suffix_tree import SuffixRules

    library = native_suffix_trees()
    if library is None or "suffix" not in plan.variants:
        return
    for name, text in {**TEXTS, "random tokens": _random}.items():
        for size in plan.paths:
            tree = NativeSuffixTree(library, SuffixRules(64, 1.0, 0.1, 1, 0.0), removes=False)
            tree.propose(Tokens(text(plan.seed, size)), 1)
            yield MicroBenchRow("m", name, size, "suffix", "bytes/token", tree.num_bytes / size)


def _random(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def _replayed(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    folder = os.environ.get(TRACES)
    if not folder:
        raise ConfigError(f"section r needs the folder of recorded texts: set {TRACES}, or --sections psme")
    for name in WORKLOADS:
        answers = workload(name, Path(folder), REPORT)
        for variant in (each for each in plan.variants if each != PYTHON):
            for most in LIMITS:
                made = replay(answers, _made(variant), most)
                judged = max(1, made.num_judged)
                figures: Sequence[tuple[str, str, float]] = (
                    ("tokens settled", "tokens/step", made.tokens_per_step),
                    ("accepted of proposed", "%", 100 * made.num_accepted / max(1, made.num_proposed)),
                    ("proposed", "tokens/step", made.num_proposed / max(1, made.num_steps)),
                    ("accepted of judged", "%", 100 * made.num_accepted / judged),
                    ("expected of judged", "%", 100 * made.estimated / judged),
                    ("CPU time", "us/step", 1e6 * made.spent_s / max(1, made.num_steps)),
                )
                for case, unit, value in figures:
                    yield MicroBenchRow("r", f"{name}: {case}", most, variant, unit, value)


def _sections() -> dict[str, Section]:
    prompts = [Recipe(f"prompt of {text}", partial(_prompt, text=text), calls=1) for text in TEXTS]
    steps = [Recipe(f"step, {text}", partial(_step, text=text), "paths") for text in TEXTS]
    ends = Recipe(f"output of {OUTPUT_TOKENS} tokens ends", _end, "one_machine", calls=1)
    return {
        "p": timed("p", *prompts),
        "s": timed("s", *steps),
        "e": timed("e", ends),
        "m": _memory,
        "r": _replayed,
        "a": by_acceptance,
    }


def _variants() -> list[str]:
    """Proposers that need no model; of one a slow twin, and one with trees."""
    proposers = registry("proposer")
    alone = (
        name
        for name in proposers.names()
        if all(option.default is not option.empty for option in proposers.options(name).values())
    )
    return [*alone, PYTHON, TREES]


BENCHMARK = MicroBenchmark("speculative", _variants, _check, _sections(), {"a": acceptance_table})
