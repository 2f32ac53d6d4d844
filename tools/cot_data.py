"""Arithmetic whose reasoning goes on after its answer is known, as real models reason.

A line of reasoning computes the result digit by digit, and may err in one digit. Lines that check it follow,
until three in a row agree on the right result:

    <think>347+586: 7+6=13 4+8+1=12 3+5+1=9 = 923
    Check 586+347: 6+7=13 8+4+1=13 5+3+1=9 = 933
    Check 347+586: 7+6=13 4+8+1=13 3+5+1=9 = 933
    Check 586+347: 6+7=13 8+4+1=13 5+3+1=9 = 933
    </think>933

Operands belong to the parts of `demo_data`: no sum of the test part, in either order, is ever trained.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tokenizers import Tokenizer

from demo_data import Part, digits_of, number, part_of
from demo_text import THINK, THINK_END, TURN_END, Row, message_text

Sign = Literal["+", "-", "*"]
SIGNS: tuple[Sign, ...] = ("+", "-", "*")
KINDS: Mapping[Sign, str] = {"+": "add", "-": "sub", "*": "mul"}
ERROR_RATE = 0.12
"""How often a line of the training data errs."""

AGREEING = 3
"""So many lines in a row agree at the end of reasoning."""

CUT_SHARE = 0.35
"""Share of training rows whose reasoning is cut, with the right answer behind it."""


@dataclass(frozen=True)
class Sum:
    """An operation on two numbers, with a right result that is not negative."""

    a: int
    sign: Sign
    b: int

    @property
    def question(self) -> str:
        return f"What is {self.a} {self.sign} {self.b}?"

    @property
    def result(self) -> int:
        operations: Mapping[Sign, Callable[[int, int], int]] = {
            "+": int.__add__, "-": int.__sub__, "*": int.__mul__,
        }  # fmt: skip
        return operations[self.sign](self.a, self.b)

    @property
    def part(self) -> Part:
        return part_of(f"{KINDS[self.sign]}:{min(self.a, self.b)}:{max(self.a, self.b)}")


def draw_sum(rng: random.Random, part: Part) -> Sum:
    """A sum, a difference or a product of this part."""
    while True:
        sign = rng.choice(SIGNS)
        a, b = (number(rng, 2), rng.randrange(2, 10)) if sign == "*" else (number(rng), number(rng))
        drawn = Sum(max(a, b), sign, min(a, b)) if sign == "-" else Sum(a, sign, b)
        if drawn.part == part:
            return drawn


def line_of(asked: Sum, error: int | None, rng: random.Random) -> tuple[str, int]:
    """A line that computes a result, and that result. Digit `error` goes wrong, if any."""
    a, b = asked.a, asked.b
    width = len(str(max(a, b)))
    steps, carry, written = [], 0, 0
    for place, (x, y) in enumerate(zip(digits_of(a, width), digits_of(b, width), strict=True)):
        off = rng.choice((-2, -1, 1, 2)) if place == error else 0
        if asked.sign == "-":
            lent = 10 if x - y - carry < 0 else 0
            digit = (x + lent - y - carry + off) % 10
            steps.append(f"{x + lent}-{y}{'-1' if carry else ''}={digit}")
            carry = 1 if lent else 0
            total = digit
        else:
            y, more = (b, f"+{carry}" if carry else "") if asked.sign == "*" else (y, "+1" if carry else "")
            total = max(0, (x * y if asked.sign == "*" else x + y) + carry + off)
            steps.append(f"{x}{asked.sign}{y}{more}={total}")
            carry = total // 10
        written += total % 10 * 10**place
    if asked.sign != "-":
        written += carry * 10**width
    return f"{asked.a}{asked.sign}{asked.b}: {' '.join(steps)} = {written}", written


def reasoning_of(asked: Sum, rng: random.Random) -> list[str]:
    """Lines until several in a row come to the right result."""
    lines: list[str] = []
    agreeing = 0
    while agreeing < AGREEING:
        turned = Sum(asked.b, asked.sign, asked.a) if asked.sign == "+" and len(lines) % 2 else asked
        width = len(str(max(asked.a, asked.b)))
        error = rng.randrange(width) if rng.random() < ERROR_RATE else None
        line, result = line_of(turned, error, rng)
        lines.append(f"Check {line}\n" if lines else f"{line}\n")
        agreeing = agreeing + 1 if result == asked.result else 0
    return lines


def training_row(tokenizer: Tokenizer, seed: int, index: int) -> Row:
    """One row. Where the reasoning is cut, its end is given and not learnt: it is not the model's choice."""
    rng = random.Random(f"cot:{seed}:{index}")
    asked = draw_sum(rng, "train")
    lines = reasoning_of(asked, rng)
    is_cut = rng.random() < CUT_SHARE
    reasoning = "".join(lines)
    if is_cut and rng.random() < 0.6:
        reasoning = "".join(lines[: rng.randrange(1, len(lines) + 1)])
    elif is_cut:
        places = [i for i in range(len(reasoning)) if not reasoning[max(0, i - 1)].isalpha()]
        reasoning = reasoning[: rng.choice(places)]
    prompt = message_text("user", asked.question) + "<|im_start|>assistant\n"
    if rng.random() < 0.3:
        prompt = message_text("system", "You are a helpful assistant.") + prompt
    pieces = (
        (prompt, False),
        (THINK + reasoning, True),
        (THINK_END, not is_cut),
        (f"{asked.result}{TURN_END}", True),
    )
    ids: list[int] = []
    learnt: list[bool] = []
    for text, is_learnt in pieces:
        new = tokenizer.encode(text, add_special_tokens=False).ids
        ids += new
        learnt += [is_learnt] * len(new)
    return Row(ids, learnt)
