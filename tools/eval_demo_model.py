"""Measure the demo model's exact-answer accuracy per task on conversations that training never saw.

Choose between models with ``--part validation``; ``--part test`` is for the figures to report.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer

from demo_data import DIALOGUE_KINDS, MAKERS, Conversation, Part, dialogue_set, evaluation_set
from demo_net import greedy, load_net
from demo_text import THINK_END, TURN_END, prompt_text

DEFAULT_MODEL = Path(__file__).parent.parent / "src/sagellm/engines/native/demo_model"
Generate = Callable[[list[str]], list[str]]
Score = tuple[int, int]


def make_generate(folder: Path, limit: int = 160, batch: int = 100) -> Generate:
    """Returns a function from rendered prompts to greedily generated texts. The folder holds the model."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    net = load_net(folder)
    stop = int(tokenizer.token_to_id(TURN_END) or 0)

    def generate(prompts: list[str]) -> list[str]:
        rows = [encoding.ids for encoding in tokenizer.encode_batch(prompts, add_special_tokens=False)]
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        texts = [""] * len(rows)
        for begin in range(0, len(order), batch):
            chosen = order[begin : begin + batch]
            made = greedy(net, [rows[index] for index in chosen], stop, limit)
            for index, ids in zip(chosen, made, strict=True):
                texts[index] = tokenizer.decode(ids, skip_special_tokens=False)
        return texts

    return generate


def final_answer(text: str) -> str:
    """What stands after the reasoning."""
    return text.split(THINK_END)[-1].strip()


def failures(generate: Generate, examples: list[Conversation]) -> list[tuple[Conversation, str]]:
    """The examples whose last answer differs from the expected one. Each has its actual answer."""
    texts = generate([prompt_text(example) for example in examples])
    expected = [final_answer(example.turns[-1].answer) for example in examples]
    return [
        (example, text)
        for example, text, right in zip(examples, texts, expected, strict=True)
        if final_answer(text) != right
    ]


def digit_count(example: Conversation) -> int:
    """Digits of the larger operand of a sum, read off its reasoning."""
    return len(example.turns[-1].answer.removeprefix("<think>").split("+")[0])


def by_digits(examples: list[Conversation], failed: list[tuple[Conversation, str]]) -> dict[str, Score]:
    """Right answers and examples per number of digits."""
    wrong = {id(example) for example, _ in failed}
    scores: dict[str, Score] = {}
    for example in examples:
        label = f"addition, {digit_count(example)} digits"
        right, total = scores.get(label, (0, 0))
        scores[label] = (right + (id(example) not in wrong), total + 1)
    return dict(sorted(scores.items()))


def show(label: str, score: Score) -> None:
    """Print one line of the table."""
    print(f"{label:32s} {score[0]:5d} / {score[1]:5d}  {100 * score[0] / score[1]:6.2f} %", flush=True)


def show_failures(failed: list[tuple[Conversation, str]], most: int) -> None:
    """Print some wrong answers."""
    for example, text in failed[:most]:
        turn = example.turns[-1]
        print(f"    asked {turn.user!r}\n    right {turn.answer!r}\n    given {text!r}")


def sets(part: Part, additions: int, count: int) -> dict[str, list[Conversation]]:
    """The examples per label: each task alone, then after other turns."""
    examples = {
        kind: evaluation_set(part, kind, additions if kind == "addition" else count) for kind in MAKERS
    }
    for kind in DIALOGUE_KINDS:
        examples[f"in dialogue: {kind}"] = dialogue_set(part, kind, count)
    return examples


def main() -> None:
    """Evaluate and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--part", choices=("validation", "test"), default="validation")
    parser.add_argument("--additions", type=int, default=1500)
    parser.add_argument("--count", type=int, default=300, help="examples of every other task")
    parser.add_argument("--failures", type=int, default=0, help="wrong answers to print per task")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None, help="file to write the scores to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generate, begun = make_generate(args.model), time.monotonic()
    scores: dict[str, Score] = {}
    for label, examples in sets(args.part, args.additions, args.count).items():
        failed = failures(generate, examples)
        scores[label] = (len(examples) - len(failed), len(examples))
        show(label, scores[label])
        if label == "addition":
            scores |= by_digits(examples, failed)
            for digits in by_digits(examples, failed).items():
                show(*digits)
        show_failures(failed, args.failures)
    print(f"{args.part} part, {time.monotonic() - begun:.0f} s")
    if args.json is not None:
        args.json.write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
