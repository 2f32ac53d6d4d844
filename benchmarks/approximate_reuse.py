"""Measures approximate reuse (`kv.approximate_reuse`) in the engine: what it saves, and what it costs.

    PYTHONPATH=tools python benchmarks/approximate_reuse.py [--model FOLDER] [--count N]

A prompt is a conversation of the demo model's held-out part, asked greedily in a cold cache, exactly and then
approximately. Before the second time the engine has computed, exactly,

    alone   each turn but the first as a prompt of its own
    moved   all turns but the first behind the first turn of another conversation: a history with a new head
    asked   the same with the question: only the head is new

Shown for each number k of tokens that are computed again in each run (runs have at least 2 k): tokens of the
prompt that were copied, answer tokens equal to the exact ones at their place, and answers that are right as a
whole. `blend_error.py` measures the same without an engine, and with more ways to choose tokens.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.blend_error import KINDS, Prompt, prompts
from sagellm.core.types import Namespace, Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import Engine
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.tokenizer import Tokenizer

SOURCES = ("alone", "moved", "asked")
RECOMPUTED = (2, 4, 8, 16)


class Asker:
    """Asks one engine. Each prompt has a tenant of its own, so no other conversation helps."""

    def __init__(self, model: Path, recompute_tokens: int) -> None:
        settings = {
            "model.name": str(model), "model.dtype": "float32", "kv.num_blocks": 512, "engine.kernels": "off",
            "kv.approximate_reuse": True, "kv.approximate_recompute_tokens": recompute_tokens,
        }  # fmt: skip
        self.engine: Engine = build_engine(load_config(cli=settings, environ={}).config)
        self.num_asked = 0

    def ask(
        self, tokens: Sequence[int], num_answer: int, tenant: str, *, approximate: bool
    ) -> tuple[list[int], int]:
        """The greedy answer, and how many tokens were copied."""
        self.num_asked += 1
        params = SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True)
        self.engine.add(
            Request(
                str(self.num_asked), Tokens(tokens), params, namespace=Namespace(tenant),
                approximate_reuse=approximate,
            )
        )  # fmt: skip
        drawn, num_copied = list[int](), 0
        while self.engine.has_work():
            for output in self.engine.step():
                drawn += output.new_token_ids
                num_copied = max(num_copied, output.num_approximate_tokens)
        return drawn, num_copied


def source_prompts(prompt: Prompt, other: Prompt, source: str) -> Iterator[list[int]]:
    """What the engine computes before."""
    if source == "alone":
        yield from prompt.turns[1:]
    else:
        question = prompt.question if source == "asked" else []
        yield [*other.turns[0], *(token for turn in prompt.turns[1:] for token in turn), *question]


def measure(model: Path, examples: Sequence[Prompt], source: str, recompute_tokens: int) -> None:
    """Prints a line of the table."""
    asker, others = Asker(model, recompute_tokens), random.Random(0).sample(examples, len(examples))
    num_prompt = num_copied = num_tokens = num_same = right = exactly_right = 0
    for number, (prompt, other) in enumerate(zip(examples, others, strict=True)):
        tokens = [*(token for turn in prompt.turns for token in turn), *prompt.question]
        tenant, size = str(number), len(prompt.answer)
        exact, _ = asker.ask(tokens, size, tenant, approximate=False)
        asker.engine.clear_cache()
        asker.ask([0], 1, tenant, approximate=True)  # from here on its prompts are observed
        for before in source_prompts(prompt, other, source):
            asker.ask(before, 1, tenant, approximate=False)
        drawn, copied = asker.ask(tokens, size, tenant, approximate=True)
        asker.engine.clear_cache()
        num_prompt, num_copied, num_tokens = num_prompt + len(tokens), num_copied + copied, num_tokens + size
        num_same += sum(ours == theirs for ours, theirs in zip(drawn, exact, strict=True))
        right, exactly_right = right + (drawn == prompt.answer), exactly_right + (exact == prompt.answer)
    asker.engine.close()
    figures = f"{100 * num_copied / num_prompt:.1f} % | {100 * num_same / num_tokens:.2f} %"
    rates = f"{100 * right / len(examples):.1f} % | {100 * exactly_right / len(examples):.1f} %"
    print(f"| `{source}` | {recompute_tokens} | {figures} | {rates} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Approximate reuse in the engine.")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--count", type=int, default=30, help="conversations drawn of each kind")
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--sources", nargs="*", default=SOURCES, choices=SOURCES)
    parser.add_argument("--recompute", nargs="*", type=int, default=RECOMPUTED, help="first tokens of a run")
    options = parser.parse_args()
    examples = list(prompts(Tokenizer.from_folder(options.model), options.kinds, options.count))
    num_prompt = sum(sum(map(len, prompt.turns)) + len(prompt.question) for prompt in examples)
    print(f"{len(examples)} prompts of {num_prompt / len(examples):.0f} tokens on average")
    print("| known before | k | copied | same tokens | right | right with exact KV |")
    print("|---|---|---|---|---|---|")
    for source in options.sources:
        for recompute_tokens in options.recompute:
            measure(options.model, examples, source, recompute_tokens)


if __name__ == "__main__":
    main()
