"""Asks prompts cold and warm, and keeps how far their answers are apart."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sagellm.diagnostics.verify.answers import Answer, Difference, compare, score_distance
from sagellm.diagnostics.verify.discovery import Facts
from sagellm.diagnostics.verify.report import Evidence, Finding, Kind
from sagellm.diagnostics.verify.statistics import RANKED_ANSWERS
from sagellm.diagnostics.verify.target import COMPLETIONS, Prompt, Question, TargetServer

NUM_GENERATED = 8
"""Generated tokens that are compared."""
USUAL_GRANULARITY = 16
"""Tokens; where a server does not tell hits."""
NUM_BESIDE = 3
"""Other prompts beside the cold one of a batch arm."""
WHOLE_WORD = re.compile(" [A-Za-z]+")
MAX_NOTES = 3
"""Findings of one kind that are kept."""


@dataclass(slots=True)
class Trial:
    """One scenario: differences of its cold arms and of its warm answers.

    `cold` is None until two cold answers were compared in every way that the server allows. `hit` is None
    if hits are not told. Sizes are those of `Difference`; so many tokens were compared in each arm.
    """

    family: str
    variant: str
    arms: dict[str, float] = field(default_factory=dict)
    complete: bool = False
    warm_sizes: list[float] = field(default_factory=list)
    num_cold_tokens: int = 0
    num_warm_tokens: int = 0
    hit: bool | None = None
    cold_divergences: int = 0
    warm_divergences: int = 0
    evidence: Evidence | None = None

    @property
    def cold(self) -> float | None:
        return max(self.arms.values()) if self.complete and self.arms else None

    @property
    def warm(self) -> float:
        """The largest difference of a warm answer; 0 if there is none."""
        return max(self.warm_sizes, default=0.0)

    @property
    def ranked(self) -> float:
        """The same over `RANKED_ANSWERS` of them, evenly spaced, the last one included."""
        count = len(self.warm_sizes)
        places = {(i + 1) * count // RANKED_ANSWERS - 1 for i in range(RANKED_ANSWERS)} if count else ()
        return max((self.warm_sizes[max(0, place)] for place in places), default=0.0)

    def add_cold(self, arm: str, difference: Difference) -> None:
        self.arms[arm] = max(self.arms.get(arm, 0.0), difference.size)
        self.cold_divergences += difference.divergence is not None
        self.num_cold_tokens += difference.num_tokens


@dataclass(slots=True)
class Lane:
    """What was asked in one namespace of the cache."""

    salt: str | None
    asked: list[tuple[Prompt, int]] = field(default_factory=list)

    def shared(self, prompt: Prompt) -> int:
        """The most units that the cache can hold of a prompt.

        Those that it shares with an asked one and its answer.
        """
        longest = 0
        for other, generated in self.asked:
            common = _common(prompt, other)
            longest = max(longest, common + (generated if common == len(other) else 0))
        return min(longest, len(prompt))


def _common(left: Prompt, right: Prompt) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


async def all_of(*asked: Awaitable[Any]) -> list[Any]:
    """The results of all at once. Raises the first error after all have ended."""
    results = await asyncio.gather(*asked, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Prober:
    """Owns the randomness of a run, its salts and its certain findings."""

    def __init__(self, server: TargetServer, facts: Facts, seed: int, concurrency: int) -> None:
        self.server = server
        self.facts = facts
        self._nonce = random.Random().getrandbits(64)
        self.rng = random.Random(f"verify {seed}" if facts.salts else self._nonce)
        self.concurrency = concurrency
        self.notes: dict[str, list[Finding]] = {}
        self.num_salted_hits = 0
        self.num_cold = 0
        self.num_monotone = 0
        self.num_shrunk = 0
        self.churn_tokens = 2 * facts.max_units
        self.max_churn_tokens = 2**17
        self.most_churned = 0
        self.evictions_seen = 0
        self.pressure = 4 * concurrency
        self._num_salts = 0
        self._num_trials = 0

    @property
    def granularity(self) -> int:
        return self.facts.granularity or USUAL_GRANULARITY

    def prompt(self, length: int, *, unlike: int | str | None = None) -> Prompt:
        """A random prompt of this many units; its first one is not `unlike`."""
        units = self.rng.choices(self.facts.units, k=max(1, length))
        while units[0] == unlike:
            units[0] = self.rng.choice(self.facts.units)
        return tuple(units)

    def border(self, room: int) -> int:
        """A random prompt length in units that ends at a block's border.

        So many units are left above it. Every third is among the longest.
        """
        step, first = self.granularity, self.facts.phase or max(1, self.granularity - self.facts.overhead)
        blocks = max(0, (self.facts.max_units - room - first) // step)
        shortest = 0 if blocks < 3 else (2 * blocks // 3 if self.rng.random() < 1 / 3 else 1)
        chosen = self.rng.randint(shortest, blocks if shortest > 1 else min(blocks, max(4, 64 // step)))
        return first + step * chosen

    def salt(self) -> str | None:
        """A new salt, or None if the server keeps none apart."""
        self._num_salts += 1
        return f"verify-{self._nonce:x}-{self._num_salts}" if self.facts.salts else None

    async def lane(self) -> Lane:
        """An empty namespace of the cache, where the server allows it."""
        await self._displace()
        return Lane(self.salt())

    async def _displace(self) -> None:
        for _ in range(self.facts.displacers):
            await self.server.ask(Question(self.prompt(self.facts.displacer_units)), alone=False)

    async def cold(
        self,
        prompt: Prompt,
        *,
        alone: bool = True,
        max_tokens: int = NUM_GENERATED,
        forced: bool = False,
        model: str | None = None,
    ) -> Answer:
        """The answer without cached KV. A hit under a fresh salt is a finding."""
        if alone:
            await self._displace()
        fields = {"cache_prompt": False} if self.facts.cold_by == "cache_prompt" else {}
        salt = self.salt()
        self.num_cold += 1
        answer = await self.server.ask(Question(prompt, salt, max_tokens, forced, model, fields), alone=alone)
        if salt is not None and (answer.cached_tokens or 0) > 0 and not answer.retried:
            self.num_salted_hits += 1
            if self.server.form.hits != "metrics":
                text = (
                    f"a fresh cache_salt had a hit of {answer.cached_tokens} of {answer.prompt_tokens} tokens"
                )
                self.note("isolation", "isolation", text)
        return answer

    async def cold_arms(self, trial: Trial, prompt: Prompt, model: str | None = None) -> list[Answer]:
        """Cold answers to a prompt. Their differences become the noise of the trial."""
        colds = [await self.cold(prompt, model=model)]
        if self.facts.cold_by == "unique prompts":
            return colds
        colds.append(await self.cold(prompt, model=model))
        trial.add_cold("again", compare(colds[0], colds[1]))
        self._num_trials += 1
        if model is None:
            await self._path_arm(trial, prompt, colds[0])
            if self.facts.displacers == 0 and self._num_trials % 4 == 1:
                await self._batch_arm(trial, prompt, colds[0])
        trial.complete = model is None
        return colds

    async def _batch_arm(self, trial: Trial, prompt: Prompt, reference: Answer) -> None:
        beside = [
            self.cold(self.prompt(self.rng.randint(8, len(prompt) + 8)), alone=False, max_tokens=4)
            for _ in range(NUM_BESIDE)
        ]
        answer, *_ = await all_of(self.cold(prompt, alone=False), *beside)
        trial.add_cold("batch", compare(reference, answer))

    async def _path_arm(self, trial: Trial, prompt: Prompt, reference: Answer) -> None:
        """The same tokens by prefill instead of decode, both without cached KV."""
        forced = self.server.form.forced
        if forced is not None:
            decoded = await self.cold(prompt, max_tokens=6, forced=True)
            for position in (2, 5):
                prefilled = await self.cold(prompt + (forced,) * position, max_tokens=1, forced=True)
                if len(decoded.scores) == 6 and prefilled.scores:
                    size = score_distance(decoded.scores[position], prefilled.scores[0])
                    trial.add_cold("path", Difference(size))
        elif self.server.form.words is not None and self.server.form.path == COMPLETIONS:
            await self._text_path_arm(trial, prompt, reference)

    async def _text_path_arm(self, trial: Trial, prompt: Prompt, reference: Answer) -> None:
        """An answer's beginning goes into the prompt, if it keeps its tokens there.

        Whole words do: a tokenizer splits text before a space. Other texts may become other tokens.
        """
        begun = NUM_GENERATED // 2
        if not all(WHOLE_WORD.fullmatch(score.token) for score in reference.scores[:begun]):
            return
        first = await self.cold(prompt, max_tokens=begun)
        rest = await self.cold((*prompt, first.text), max_tokens=NUM_GENERATED - begun)
        if first.prompt_tokens is None or rest.prompt_tokens != first.prompt_tokens + begun:
            return
        if not reference.text.startswith(first.text):
            return
        whole = Answer(reference.text.removeprefix(first.text), reference.scores[begun:], None, None, 0.0)
        trial.add_cold("path", compare(whole, rest))

    async def warm_up(self, lane: Lane, prompt: Prompt, *, alone: bool = True, max_tokens: int = 1) -> Answer:
        """Asks a prompt for the KV that it leaves in the cache."""
        answer = await self.server.ask(Question(prompt, lane.salt, max_tokens), alone=alone)
        lane.asked.append((prompt, max_tokens))
        return answer

    async def warm(
        self,
        trial: Trial,
        lane: Lane,
        prompt: Prompt,
        colds: Sequence[Answer],
        *,
        alone: bool = True,
        model: str | None = None,
        max_tokens: int = NUM_GENERATED,
        steps: str,
    ) -> Answer:
        """Asks a prompt whose KV may be cached, and records the answer."""
        answer = await self.ask_warm(lane, prompt, alone=alone, model=model, max_tokens=max_tokens)
        self.record(trial, Question(prompt, lane.salt, NUM_GENERATED, model=model), answer, colds, steps)
        return answer

    async def ask_warm(
        self,
        lane: Lane,
        prompt: Prompt,
        *,
        alone: bool = True,
        model: str | None = None,
        max_tokens: int = NUM_GENERATED,
    ) -> Answer:
        """Asks a prompt whose KV may be cached. Implausible counts of cached tokens are findings."""
        answer = await self.server.ask(Question(prompt, lane.salt, max_tokens, model=model), alone=alone)
        if alone:
            self._check_usage(lane, prompt, answer)
        lane.asked.append((prompt, max_tokens))
        return answer

    def record(
        self, trial: Trial, question: Question, answer: Answer, colds: Sequence[Answer], steps: str
    ) -> None:
        """Adds a warm answer to its trial."""
        nearest = min(colds, key=lambda cold: compare(cold, answer).size)
        difference = compare(nearest, answer)
        trial.warm_divergences += difference.divergence is not None
        if answer.cached_tokens is not None:
            trial.hit = bool(trial.hit) or answer.cached_tokens > 0
        if trial.evidence is None or difference.size > trial.warm:
            trial.evidence = self._evidence(question, answer, nearest, difference, steps)
        trial.warm_sizes.append(difference.size)
        trial.num_warm_tokens += difference.num_tokens

    def _evidence(
        self, question: Question, answer: Answer, cold: Answer, difference: Difference, steps: str
    ) -> Evidence:
        split = difference.divergence
        return Evidence(
            prompt=self.server.render(question.prompt),
            steps=steps,
            cold=tuple(score.token for score in cold.scores) or (cold.text,),
            warm=tuple(score.token for score in answer.scores) or (answer.text,),
            size=difference.size,
            cached_tokens=answer.cached_tokens,
            prompt_tokens=answer.prompt_tokens,
            position=split.position if split else None,
            cold_token=split.reference if split else None,
            warm_token=split.other if split else None,
            margin=split.margin if split else None,
        )

    def _check_usage(self, lane: Lane, prompt: Prompt, answer: Answer) -> None:
        cached, total = answer.cached_tokens, answer.prompt_tokens
        if cached is None or answer.retried or self.server.form.hits == "metrics":
            return
        counted = not any(isinstance(unit, str) for unit in prompt)  # texts of answers are several tokens
        shown = f"cached_tokens is {cached} for a prompt of {total} tokens"
        most = lane.shared(prompt) + self.facts.overhead
        if cached < 0 or (total is not None and cached > total):
            self.note("accounting", "accounting", f"{shown}: not in its range")
        elif counted and self.facts.salts and cached > most:
            self.note(
                "accounting", "accounting", f"{shown}, of which only {most} were asked before under its salt"
            )
        elif cached != total and not self._at_border(cached):
            self.note(
                "accounting",
                "accounting",
                f"{shown}: no multiple of the granularity {self.facts.granularity}",
            )

    def _at_border(self, cached: int) -> bool:
        if not self.facts.granularity or not cached:
            return True
        return (cached - (self.facts.smallest or 0)) % self.facts.granularity == 0

    def note(self, family: str, kind: Kind, message: str, p_value: float | None = None) -> None:
        """Keep a finding of another kind than answers; only the first ones."""
        kept = self.notes.setdefault(f"{family} {kind}", [])
        if len(kept) < MAX_NOTES and all(finding.message != message for finding in kept):
            kept.append(Finding(family, kind, message, p_value=p_value))
