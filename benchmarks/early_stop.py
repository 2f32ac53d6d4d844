"""Measures `early_stop` on the demo model: what it saves, and its accuracy.

    python benchmarks/early_stop.py [--count N] [--samples N] [--temperature T ...]

The questions are additions, subtractions and small products, which are made up by a seed. Each is asked with
`n` samples, once in full and once by each rule, with the same seeds; so sample i has the same text. Accuracy
is that of the majority of the answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sagellm.accel.cot.answers import answer_of
from sagellm.benchmarks.micro.cot import Question, majority, questions
from sagellm.core.protocols.cot import EarlyStop
from sagellm.engines.build import load
from sagellm.engines.llm import LLM, RequestOptions

RULES = (
    EarlyStop(2, growth=1), EarlyStop(4, growth=1), EarlyStop(4, growth=2), EarlyStop(4, growth=4),
    EarlyStop(8, growth=1),
    EarlyStop(4, 0.9), EarlyStop(4, 0.95), EarlyStop(4, 0.99),
)  # fmt: skip


def measure(llm: LLM, asked: Sequence[Question], samples: int, temperature: float) -> None:
    prompts, right = [prompt for prompt, _ in asked], [answer for _, answer in asked]
    params = llm.sampling_params(n=samples, temperature=temperature, seed=5, max_tokens=100)

    def share(answers: Sequence[str | None]) -> float:
        return 100 * sum(given == answer for given, answer in zip(answers, right, strict=True)) / len(right)

    full = llm.generate(prompts, params)
    tokens = sum(completion.usage.completion_tokens for completion in full)
    alone = share([answer_of(completion.text, "</think>") for completion in full])
    most = share([majority(completion) for completion in full])
    print(f"temperature {temperature}: one sample {alone:.1f} % right, {samples} samples {most:.1f} %")
    for rule in RULES:
        voted = llm.generate(prompts, RequestOptions(params, early_stop=rule))
        results = [completion.consensus for completion in voted if completion.consensus is not None]
        used = sum(result.num_used for result in results) / len(voted)
        spent = sum(completion.usage.completion_tokens for completion in voted)
        name = f"window {rule.window}" + (f", confidence {rule.confidence}" if rule.confidence else "")
        name += f", growth {rule.growth}" * (rule.growth > 1)
        print(
            f"  {name:26} {share([result.answer for result in results]):.1f} %, {used:.1f} samples used, "
            f"samples {100 * used / samples - 100:+.0f} %, tokens {100 * spent / tokens - 100:+.0f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.7, 1.0, 1.5])
    chosen = parser.parse_args()
    with load(None, {"kv.num_blocks": 4096}) as llm:
        for temperature in chosen.temperature:
            measure(llm, questions(chosen.count, 1), chosen.samples, temperature)


if __name__ == "__main__":
    main()
