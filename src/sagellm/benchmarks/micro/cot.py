"""`sagellm bench micro cot`: what accelerations of reasoning save, beside accuracy and cost.

Section b: budgets of reasoning. Section e: reasoning that is closed once probes know its answer. Section s:
samples of one prompt that end once they agree, one query at a time, beside all samples. Section t: the first
token of a chat's second turn, whose template leaves the reasoning of the first one out. Section f: prompts
that go on from an answer that still runs, as branches of it and as plain prompts. Questions are made up by
the plan's seed, `repeats` of them.
"""

from __future__ import annotations

import operator
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sagellm.accel.cot.answers import answer_of
from sagellm.benchmarks.micro.cases import (
    MicroBenchmark,
    MicroBenchPlan,
    MicroBenchRow,
    Section,
    Stopwatch,
)
from sagellm.core.clock import MonotonicClock
from sagellm.core.protocols.cot import EarlyExit, EarlyStop
from sagellm.core.protocols.tokenizer import Message
from sagellm.core.types import FinishReason
from sagellm.engines.build import load
from sagellm.engines.llm import LLM, Completion, RequestOptions
from sagellm.engines.llm.next_turns import NextTurns, turn_behind

DEMO = "demo"
NUM_SAMPLES, TEMPERATURE = 16, 1.0
MAX_ANSWER_TOKENS = 100
BUDGETS, SLOPE = (0, 8, 16, 32), 0.2
RULES: Mapping[str, EarlyStop | None] = {
    "all samples": None,
    "window 4, growth 1": EarlyStop(4, growth=1),
    "window 4, growth 2": EarlyStop(4, growth=2),
    "window 4, growth 4": EarlyStop(4, growth=4),
    "confidence 0.95": EarlyStop(4, 0.95),
}
EXITS: Mapping[str, EarlyExit | None] = {
    "no exit": None,
    "confidence 0.95": EarlyExit(0.95, every=8, at="token", probe="", max_probe_tokens=8),
    "agreement of 2": EarlyExit(None, 2, every=8, at="token", probe="", max_probe_tokens=8),
}
KINDS: Mapping[str, tuple[Callable[[int, int], int], int, int]] = {
    "+": (operator.add, 1000, 1000),
    "-": (operator.sub, 1000, 1000),
    "*": (operator.mul, 100, 10),
}
"""By sign: the operation, and the bounds of its operands."""

NUM_CHATS, ANSWER_WORDS, REASONING_WORDS = 20, (16, 64, 256), 128
NUM_DRAWN = 256
"""Tokens of an answer when it is branched from."""
STRIPS = """{% for message in messages %}{% set said = message['content'] %}\
{% if message['role'] == 'assistant' %}{% set said = said.split('</think>')[-1] %}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' + said + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""The demo model's own template leaves nothing out."""

Question = tuple[Sequence[Message], str]


def questions(count: int, seed: int) -> list[Question]:
    """Sums, differences and small products as chats, each with its right answer."""
    draw, found = random.Random(seed), list[Question]()
    for _ in range(count):
        sign = draw.choice([*KINDS])
        operation, first, second = KINDS[sign]
        a, b = draw.randrange(2, first), draw.randrange(2, second)
        found.append(([{"role": "user", "content": f"What is {a} {sign} {b}?"}], str(operation(a, b))))
    return found


def majority(completion: Completion) -> str | None:
    """The answer that most choices give, of those that came to one."""
    ended = (choice for choice in completion.choices if choice.finish_reason is FinishReason.STOP)
    answers = [answer for choice in ended if (answer := answer_of(choice.text, "</think>")) is not None]
    return Counter(answers).most_common(1)[0][0] if answers else None


@dataclass(slots=True)
class _Sum:
    """What the queries of one setting took together."""

    num_right: int = 0
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_probe_tokens: int = 0
    num_samples: int = 0
    wall_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def add(self, completion: Completion, right: str, wall_s: float, cpu_s: float) -> None:
        self.num_right += majority(completion) == right
        self.num_tokens += completion.usage.completion_tokens
        self.num_reasoning_tokens += completion.usage.reasoning_tokens
        self.num_probe_tokens += completion.usage.probe_tokens
        self.num_samples += len(completion.choices)
        self.wall_s.append(wall_s)
        self.cpu_s += cpu_s

    def figures(self) -> Iterator[tuple[str, str, float]]:
        count = len(self.wall_s)
        yield "right", "%", 100 * self.num_right / count
        yield "generated", "tokens/query", self.num_tokens / count
        yield "reasoning", "tokens/query", self.num_reasoning_tokens / count
        yield "probes", "tokens/query", self.num_probe_tokens / count
        yield "samples", "samples/query", self.num_samples / count
        yield "wall time", "ms/query", 1000 * statistics.mean(self.wall_s)
        yield "median wall time", "ms/query", 1000 * statistics.median(self.wall_s)
        yield "CPU time", "ms/query", 1000 * self.cpu_s / count


def _compared(
    letter: str, plan: MicroBenchPlan, options_of: Callable[[LLM], Mapping[str, RequestOptions]]
) -> Iterator[MicroBenchRow]:
    """Each question with each of the options in turns. Its prompt is cached before."""
    for variant in plan.variants:
        with _loaded(variant) as llm:
            options = options_of(llm)
            sums = {name: _Sum() for name in options}
            for number, (messages, right) in enumerate(questions(plan.repeats, plan.seed)):
                llm.generate([messages], llm.sampling_params(temperature=0, max_tokens=MAX_ANSWER_TOKENS))
                order = list(options)
                for name in order if number % 2 else reversed(order):
                    began_s, cpu_s = time.perf_counter(), time.process_time()
                    [completion] = llm.generate([messages], options[name])
                    spent_s = time.perf_counter() - began_s
                    sums[name].add(completion, right, spent_s, time.process_time() - cpu_s)
        for name, found in sums.items():
            for case, unit, value in found.figures():
                yield MicroBenchRow(letter, f"{name}: {case}", plan.repeats, variant, unit, value)


def _budgets(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    def options(llm: LLM) -> dict[str, RequestOptions]:
        def of(**given: Any) -> RequestOptions:
            return RequestOptions(llm.sampling_params(temperature=0, max_tokens=MAX_ANSWER_TOKENS, **given))

        hard = {f"budget {budget}": of(max_reasoning_tokens=budget) for budget in BUDGETS}
        soft = {
            f"soft budget {budget}": of(soft_reasoning_tokens=budget, soft_reasoning_slope=SLOPE)
            for budget in BUDGETS
        }
        return {"no budget": of(), **hard, **soft}

    return _compared("b", plan, options)


def _exits(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    def options(llm: LLM) -> dict[str, RequestOptions]:
        params = llm.sampling_params(temperature=0, max_tokens=MAX_ANSWER_TOKENS)
        return {name: RequestOptions(params, early_exit=rule) for name, rule in EXITS.items()}

    return _compared("e", plan, options)


def _samples(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    def options(llm: LLM) -> dict[str, RequestOptions]:
        params = llm.sampling_params(
            n=NUM_SAMPLES, temperature=TEMPERATURE, seed=plan.seed, max_tokens=MAX_ANSWER_TOKENS
        )
        return {name: RequestOptions(params, early_stop=rule) for name, rule in RULES.items()}

    return _compared("s", plan, options)


def _second_turns(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Second turns of chats with a given first answer. Every other one is computed ahead."""
    for variant in plan.variants:
        with _loaded(variant, strips=True) as llm:
            for size in ANSWER_WORDS:
                chats = [_chat(llm, number, size) for number in range(2 * min(plan.repeats, NUM_CHATS))]
                plain, ahead = (
                    [_second_turn(llm, *chat, ahead=on) for chat in chats[on::2]] for on in (False, True)
                )
                for case, turns in (("next turn not computed", plain), ("next turn computed", ahead)):
                    first_s, computed, cached = zip(*turns, strict=True)
                    figures = (
                        ("time to first token", "ms", 1000 * statistics.median(first_s)),
                        ("cached", "tokens", statistics.mean(cached)),
                        ("computed while idle", "tokens", statistics.mean(computed)),
                    )
                    for what, unit, value in figures:
                        yield MicroBenchRow("t", f"{case}: {what}", size, variant, unit, value)


def _chat(llm: LLM, number: int, size: int) -> tuple[list[Message], Completion]:
    """A first turn, and an answer of `size` words behind its reasoning."""
    draw = random.Random(number)
    text = " ".join(str(draw.randrange(10)) for _ in range(REASONING_WORDS))
    answer = f"<think>{text}</think>" + " ".join(str(draw.randrange(10)) for _ in range(size))
    completion = Completion.empty("", 1)
    completion.choices[0].text, completion.choices[0].token_ids = answer, llm.encode(answer).tolist()
    return [{"role": "user", "content": f"Chat {number}: say numbers."}], completion


def _second_turn(
    llm: LLM, messages: list[Message], answer: Completion, *, ahead: bool
) -> tuple[float, float, float]:
    """Seconds to the first token, tokens computed before, cached tokens of the prompt."""
    llm.clear_cache()
    one_token = RequestOptions(llm.sampling_params(temperature=0, max_tokens=1))
    prompt = llm.encode(messages)
    llm.generate([[*prompt, *answer.choices[0].token_ids]], one_token)
    turns = NextTurns(llm, MonotonicClock())
    turn = turn_behind(llm, prompt, messages, {}, answer, one_token) if ahead else None
    if turn is not None:
        turns.add(turn)
    while turns.has_work:
        turns.begin_chunk()
        turns.take(llm.step())
    said: Any = {"role": "assistant", "content": answer.text}
    tokens = llm.encode([*messages, said, {"role": "user", "content": "And now?"}])
    began_s = time.perf_counter()
    [second] = llm.generate([tokens], one_token)
    first_s = time.perf_counter() - began_s
    spent = sum(each.spent.get("tokens", 0) for each in llm.accelerations.report())
    return first_s, spent, second.usage.cached_tokens


def _branches(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Each branch keeps a part of an answer, and goes on differently."""
    for variant in plan.variants:
        with _loaded(variant) as llm:
            params = llm.sampling_params(temperature=0, max_tokens=2 * NUM_DRAWN, ignore_eos=True)
            found: dict[bool, list[tuple[float, int, int]]] = {True: [], False: []}
            for number in range(2 * min(plan.repeats, NUM_CHATS)):
                llm.clear_cache()
                prompt = llm.encode(f"Question {number}: " + "1 + 1 = 2, " * 20)
                parent, drawn = llm.submit(prompt, params), list[int]()
                while len(drawn) < NUM_DRAWN:
                    drawn += [token for each in llm.step() for token in each.token_ids]
                kept = random.Random(number).randrange(NUM_DRAWN // 2, NUM_DRAWN)
                shares = number % 2 == 0
                options = RequestOptions(
                    llm.sampling_params(temperature=0, max_tokens=1),
                    branch_of=(parent, 0) if shares else None,
                )
                began_s = time.perf_counter()
                [branch] = llm.generate([[*prompt, *drawn[:kept], drawn[0]]], options)
                first_s = time.perf_counter() - began_s
                found[shares].append((first_s, branch.usage.prompt_tokens, branch.usage.cached_tokens))
                llm.abort(parent)
        for shares, rows in found.items():
            case = "branch" if shares else "plain prompt"
            first, tokens, cached = zip(*rows, strict=True)
            for what, unit, value in (
                ("time to first token", "ms", 1000 * statistics.median(first)),
                ("cached of its prompt", "%", 100 * sum(cached) / sum(tokens)),
            ):
                yield MicroBenchRow("f", f"{case}: {what}", NUM_DRAWN, variant, unit, value)


def _loaded(variant: str, *, strips: bool = False) -> LLM:
    """The model. `strips`: the demo model has a template that leaves reasoning out."""
    settings: dict[str, Any] = {"kv.num_blocks": 2048}
    if variant != DEMO or not strips:
        return load(None if variant == DEMO else variant, settings)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "strips.jinja"
        path.write_text(STRIPS)
        return load(None, settings | {"model.chat_template": str(path)})


_SECTIONS: dict[str, Section] = {
    "b": _budgets,
    "e": _exits,
    "s": _samples,
    "t": _second_turns,
    "f": _branches,
}

BENCHMARK = MicroBenchmark("cot", lambda: [DEMO], lambda variant: variant, _SECTIONS)
