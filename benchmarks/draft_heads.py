"""Measures the demo model with its draft head beside plain decoding.

    python benchmarks/draft_heads.py [--count N] [--rounds N] [--batch N ...] [--methods NAME ...]
        [--heads FILE ...]

Engines with each method answer the same questions in turns, greedily; all must give the same tokens.
`--heads` are other heads of the model, of any kind. Training never saw these questions. Of each group of them
the time without a proposer is divided by that with one: the median, over all groups and rounds, of elapsed
time and of CPU time (on a machine with other work the second means more). Both have the prompts in them, and
answers are short. Of decoding alone: the median of steps without prompts, and with it the time of a token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sagellm.core.events import EventBus, StepDone
from sagellm.core.protocols.tokenizer import Message
from sagellm.engines.build import build_llm, load_config
from sagellm.engines.llm import LLM

sys.path.append(str(Path(__file__).parent.parent / "tools"))
from demo_data import MAKERS, dialogue_set, evaluation_set

FIXED = {"speculative.method": "heads", "speculative.adaptive": False}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "auto": {"speculative.method": "auto"},
    "heads, 2 at once": FIXED | {"speculative.num_tokens": 2},
    "heads, 4 at once": FIXED | {"speculative.num_tokens": 4},
    "heads, 8 at once": FIXED | {"speculative.num_tokens": 8},
    "suffix": {"speculative.method": "suffix"},
}
WARM_UPS = 2


def of_head(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Methods with the head of a file.

    All that it proposes is verified, or what pays.
    """
    own = {"speculative.method": "heads", "speculative.method_options": {"model": str(path)}}
    fixed = {f"{path.stem}, {num} at once": own | FIXED | {"speculative.num_tokens": num} for num in (4, 8)}
    return {**fixed, f"{path.stem}, adaptive": own}


def questions(count: int) -> list[Sequence[Message]]:
    """So many of each task alone, and in dialogues."""
    asked = [made for kind in MAKERS for made in evaluation_set("test", kind, count)]
    asked += dialogue_set("test", "addition", count)
    return [[{"role": m["role"], "content": m["content"]} for m in each.messages()] for each in asked]


class Arm:
    """An engine with one method, and what its answers have taken."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        events = EventBus()
        events.subscribe(StepDone, self._note)
        self.llm: LLM = build_llm(load_config(cli=settings).config, events=events)
        self.decode_s: list[float] = []
        self.elapsed_s: list[float] = []
        self.cpu_s: list[float] = []
        self.num_tokens = self.num_steps = 0

    def _note(self, step: StepDone) -> None:
        if not step.num_prefill_tokens:
            self.decode_s.append(step.duration_s)

    def answer(self, prompts: Sequence[Sequence[Message]], *, counts: bool) -> list[list[int]]:
        params = self.llm.sampling_params(temperature=0.0, max_tokens=200)
        self.llm.clear_cache()
        steps, cpu_s, began_s = self.llm.stats().num_steps, time.process_time(), time.perf_counter()
        done = self.llm.generate(prompts, params)
        elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        tokens = [list(choice.token_ids) for completion in done for choice in completion.choices]
        if counts:
            self.elapsed_s.append(elapsed_s)
            self.cpu_s.append(cpu_s)
            self.num_tokens += sum(map(len, tokens))
            self.num_steps += self.llm.stats().num_steps - steps
        else:
            self.decode_s.clear()
        return tokens


def measure(
    asked: Sequence[Sequence[Message]], methods: Mapping[str, Mapping[str, Any]], rounds: int, batch: int
) -> None:
    arms = {name: Arm(settings) for name, settings in methods.items()}
    groups = [asked[first : first + batch] for first in range(0, len(asked), batch)]
    for number in range(WARM_UPS + rounds):
        for group in groups if number >= WARM_UPS else groups[: len(groups) // 4 + 1]:
            answers = [arm.answer(group, counts=number >= WARM_UPS) for arm in arms.values()]
            if any(answer != answers[0] for answer in answers):
                raise SystemExit(f"answers differ: {group}")
    plain = arms["none"]
    print(f"batch {batch}: {len(asked)} questions, {plain.num_tokens // rounds} tokens")
    for name, arm in arms.items():
        counts = arm.llm.diagnostics().speculation
        proposed, accepted = sum(counts.proposed), sum(counts.accepted)
        speed_up, of_cpu = (
            median(a / b for a, b in zip(theirs, own, strict=True))
            for theirs, own in ((plain.elapsed_s, arm.elapsed_s), (plain.cpu_s, arm.cpu_s))
        )
        per_step = arm.num_tokens / arm.num_steps / batch
        step_s = median(arm.decode_s)
        token_s = step_s * len(arm.decode_s) / (arm.num_tokens - rounds * len(asked))
        share = f"{accepted / proposed:5.0%}" if proposed else "    -"
        print(
            f"  {name:18} {arm.num_tokens / sum(arm.elapsed_s):7.0f} tokens/s  x {speed_up:.2f} elapsed  "
            f"x {of_cpu:.2f} CPU  {per_step:.2f} tokens a row and step  accepted {share}  "
            f"decoding: step {step_s * 1e6:5.0f} us, token {token_s * 1e6:4.0f} us"
        )
        arm.llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=4, help="questions of each task")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--heads", nargs="*", type=Path, default=[])
    args = parser.parse_args()
    methods = {name: METHODS[name] for name in args.methods}
    for path in args.heads:
        methods |= of_head(path)
    for batch in args.batch:
        measure(questions(args.count), methods, args.rounds, batch)


if __name__ == "__main__":
    main()
