"""Finds out how a server can be tested: forms of prompts, salts, hits, borders."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import gcd, isfinite
from typing import Any, Literal

from sagellm.diagnostics.verify.answers import Answer
from sagellm.diagnostics.verify.target import (
    CHAT,
    COMPLETIONS,
    MAX_RETRIES,
    Prompt,
    Question,
    RefusedError,
    TargetServer,
    UntestableError,
    cached_in_timings,
    cached_in_usage,
)

ColdBy = Literal["cache_salt", "cache_prompt", "displacement", "unique prompts"]

_WORDS = """
a an the of to in is on by it or be at as his so we he you not with for was are but had have from this they
one all were her she there would their will been has more if no out do up said what its about than into them
can only other new some could time these two may then any my now such like our over man me even most made
after also did many
"""
WORDS = tuple(f" {word}" for word in _WORDS.split())
"""Words that are one token each in usual vocabularies."""
SAFE_IDS = (range(1000, 20_000), range(300, 700), range(40, 120))
"""Token ids that are ordinary in usual vocabularies, the largest vocabularies first."""

PROBE_UNITS = 160
LONG_ANSWER = 64
"""Generated tokens of the longest answers that are asked."""
MAX_OTHER_MODELS = 3
SEEN = 16
"""Tokens that a repeated prompt must have cached, so that a hit is told at all."""


@dataclass(slots=True)
class Facts:
    """What was measured. `units` are those that prompts are drawn from.

    `granularity` and `smallest` are in tokens, `phase` is a prompt length in units that ends at a border.
    `salts` is None if the server does not know `cache_salt`, False if it knows it and does not keep it
    apart. `overhead` counts tokens of a prompt beside its units (BOS, chat template).
    """

    units: tuple[int, ...]
    max_units: int
    cold_by: ColdBy = "unique prompts"
    displacers: int = 0
    displacer_units: int = 0
    salts: bool | None = None
    granularity: int | None = None
    smallest: int | None = None
    phase: int = 0
    overhead: int = 0
    other_models: tuple[str, ...] = ()
    limits: list[str] = field(default_factory=list)


class Discovery:
    """Owns the questions that find out what a server can do.

    `run` asks them and sets the server's form.
    """

    def __init__(self, server: TargetServer, long_tokens: int) -> None:
        self._server = server
        self._rng = random.Random()  # prompts that no earlier run has asked
        self._long_tokens = long_tokens
        self._limits: list[str] = []
        self._next_salt = 0

    async def run(self, model: str | None) -> Facts:
        """Raises `UntestableError` if the server generates no text for any form of prompt."""
        listed, limit = await self._models(model)
        await self._choose_path()
        await self._choose_options()
        units = await self._choose_units()
        facts = Facts(units, max_units=0, limits=self._limits)
        facts.max_units = await self._longest(units, limit)
        await self._find_hits(facts)
        await self._find_cold(facts)
        if self._server.form.hits is not None:
            await self._measure_borders(facts)
        await self._choose_forced(facts)
        facts.other_models = await self._other_models(units, listed)
        return facts

    async def _other_models(self, units: tuple[int, ...], listed: list[str]) -> tuple[str, ...]:
        """Those of the first listed ones that generate.

        Some servers list embeddings too, or models that they load on demand.
        """
        others = [name for name in dict.fromkeys(listed) if name != self._server.form.model]
        generating = []
        for name in others[:MAX_OTHER_MODELS]:
            try:
                await self._server.ask(Question(self.prompt(units, 16), model=name))
                generating.append(name)
            except (RefusedError, UntestableError) as error:
                self._limits.append(f"adapters: model {name} is not tested ({error}).")
        return tuple(generating)

    def prompt(self, units: tuple[int, ...], length: int) -> Prompt:
        """A random prompt of this many units."""
        return tuple(self._rng.choices(units, k=length))

    def salt(self) -> str:
        self._next_salt += 1
        return f"discovery-{self._rng.getrandbits(64):x}-{self._next_salt}"

    async def _models(self, wanted: str | None) -> tuple[list[str], int | None]:
        """All model names, and the longest context in tokens if the server tells it."""
        try:
            answer = await self._server.get("/v1/models")
            entries = [entry for entry in answer["data"] if isinstance(entry.get("id"), str)]
        except (RefusedError, KeyError, TypeError, AttributeError) as error:
            if wanted is None:
                text = f"no model is listed ({error}): write http://host:port without a path, or give --model"
                raise UntestableError(text) from error
            entries = []
        names = [entry["id"] for entry in entries]
        if wanted is None and not names:
            raise UntestableError("/v1/models lists no model: give --model")
        chosen = wanted if wanted is not None else names[0]
        if names and chosen not in names:
            raise UntestableError(f"the server has no model {chosen!r}, but {', '.join(names[:8])}")
        self._server.change(model=chosen)
        entry: dict[str, Any] = next((entry for entry in entries if entry["id"] == chosen), {})
        meta = entry.get("meta")
        n_ctx = meta.get("n_ctx") if isinstance(meta, dict) else None
        limits = [entry.get("max_model_len"), n_ctx, entry.get("context_length")]
        return names, next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)

    async def _choose_path(self) -> None:
        """Completions where there are some, else chats."""
        reasons = []
        for path in (COMPLETIONS, CHAT):
            self._server.change(path=path, words=WORDS)
            try:
                await self._server.ask(Question(tuple(range(8))))
                return
            except RefusedError as error:
                reasons.append(f"{path}: {error}")
        raise UntestableError(f"the server generates nothing: {'; '.join(reasons)}")

    async def _accepts(self, question: Question) -> Answer | None:
        try:
            return await self._server.ask(question)
        except RefusedError:
            return None

    async def _choose_options(self) -> None:
        """Log-probabilities, and generation past the end of sequence, where the server takes them."""
        question = Question(tuple(range(8)), max_tokens=2)
        if await self._accepts(Question(question.prompt, fields={"ignore_eos": True})) is not None:
            self._server.change(extra={"ignore_eos": True})
        self._server.change(logprobs=True)
        answer = await self._accepts(question)
        if answer is None or not answer.scores or not all(isfinite(each.logprob) for each in answer.scores):
            self._server.change(logprobs=False)
            self._limits.append(
                "The server gives no log-probabilities: only texts are compared, so only large faults show."
            )

    async def _choose_units(self) -> tuple[int, ...]:
        """Token ids where prompts may be such, else words of one token each."""
        words = self._server.form.words
        if self._server.form.path == COMPLETIONS:
            self._server.change(words=None)
            for ids in SAFE_IDS:
                sample = (ids[-1], *self._rng.sample(ids, 15))
                answer = await self._accepts(Question(sample))
                if answer is not None and answer.prompt_tokens in (16, 17, None):
                    return tuple(ids)
        self._server.change(words=words)
        self._limits.append("Prompts are sent as text, since the server takes no token ids.")
        return await self._single_token_words()

    async def _single_token_words(self) -> tuple[int, ...]:
        """Words of one token each; all words if the server counts no tokens."""
        everything = tuple(range(len(WORDS)))
        short = await self._server.ask(Question((0,) * 4))
        whole = await self._server.ask(Question((0,) * 4 + everything))
        if short.prompt_tokens is None or whole.prompt_tokens is None:
            return everything
        if whole.prompt_tokens - short.prompt_tokens == len(everything):
            return everything
        single = []
        for word in everything[:48]:
            answer = await self._server.ask(Question((0,) * 4 + (word,) * 4))
            if answer.prompt_tokens == short.prompt_tokens + 4:
                single.append(word)
        if len(single) >= 8:
            return tuple(single)
        self._limits.append(
            "No eight words of one token each were found: prompts end near borders by chance alone."
        )
        return everything

    async def _longest(self, units: tuple[int, ...], told: int | None) -> int:
        """The longest prompt in units that leaves room for the longest answer."""
        length = self._long_tokens if told is None else min(self._long_tokens, told - LONG_ANSWER)
        while length >= 32:
            question = Question(self.prompt(units, length), max_tokens=LONG_ANSWER)
            if await self._accepts(question) is not None:
                return length
            length //= 2
        raise UntestableError("the server takes no prompt of 32 tokens")

    async def _find_hits(self, facts: Facts) -> None:
        """Where the server tells hits: asks the longest prompt twice."""
        form = self._server.form
        question = Question(self.prompt(facts.units, facts.max_units))
        body = self._server.body(question)
        first = await self._server.ask(question)
        facts.overhead = max(0, (first.prompt_tokens or 0) - facts.max_units)
        before = await self._server.read_hit_counter()
        again = await self._server.raw_post(form.path, body)
        after = await self._server.read_hit_counter()
        usage = again.get("usage")
        if isinstance(usage, dict) and cached_in_usage(usage):
            self._server.change(hits="usage")
        elif (cached_in_timings(again) or 0) >= SEEN:
            self._server.change(hits="timings")
        elif before is not None and after is not None and after - before >= SEEN:
            self._server.change(hits="metrics")
            self._limits.append(
                "Hits are read from /metrics, so other traffic on the server disturbs their counts."
            )
        elif isinstance(usage, dict) and cached_in_usage(usage) == 0:
            self._server.change(hits="usage")
            self._limits.append("The longest prompt had no hit when it was asked again.")
        else:
            self._limits.append(
                "The server does not tell cached tokens (vLLM: --enable-prompt-tokens-details, SGLang: "
                "--enable-cache-report), or had no hit: granularity, accounting and isolation by counts are "
                "not tested, and probes cannot be checked for having had hits."
            )

    async def _find_cold(self, facts: Facts) -> None:
        """How a prompt can be asked twice without its cached KV."""
        length = min(facts.max_units, PROBE_UNITS)
        if await self._knows_salts(facts.units):
            facts.salts = not await self._shared(
                facts, Question(self.prompt(facts.units, length), salt=self.salt())
            )
            if facts.salts:
                facts.cold_by = "cache_salt"
            return  # salts that share are a finding; nothing else is worth its time then
        if self._server.form.hits is None:
            await self._displace_unseen(facts)
            return
        question = Question(self.prompt(facts.units, facts.max_units))
        await self._server.ask(question)
        without = await self._accepts(Question(question.prompt, fields={"cache_prompt": False}))
        if without is not None and without.cached_tokens == 0:
            facts.cold_by = "cache_prompt"
            return
        await self._displace(facts)

    async def _knows_salts(self, units: tuple[int, ...]) -> bool:
        """Whether the server refuses a `cache_salt` of the wrong type: it knows the field."""
        try:
            await self._server.ask(Question(self.prompt(units, 8), fields={"cache_salt": 7}))
        except RefusedError as error:
            return 400 <= error.status < 500
        return False

    async def _shared(self, facts: Facts, question: Question) -> bool:
        """Whether a fresh salt finds what another has cached."""
        await self._server.ask(question)
        for _ in range(MAX_RETRIES):
            other = await self._server.ask(Question(question.prompt, salt=self.salt()))
            if not other.retried:  # else its own first try may be what it hit
                return (other.cached_tokens or 0) > 0
        return False

    async def _displace(self, facts: Facts) -> None:
        """Finds how many other prompts push one out of the cache."""
        for count, units in ((1, 24), *((2**k, facts.max_units) for k in range(7))):
            question = Question(self.prompt(facts.units, facts.max_units))
            await self._server.ask(question)
            await self._others(facts, count, units)
            if ((await self._server.ask(question)).cached_tokens or 0) <= facts.overhead + 1:
                facts.cold_by, facts.displacers, facts.displacer_units = "displacement", 2 * count, units
                return
        self._limits.append(
            "The server has no cache_salt, and 64 long prompts did not push one out: a prompt can be asked "
            "cold only once, so noise is assumed, not measured, and only large differences are found."
        )

    async def _displace_unseen(self, facts: Facts) -> None:
        """The same by time, for servers that tell no hits."""
        times: list[tuple[float, ...]] = []
        for _ in range(3):
            question = Question(self.prompt(facts.units, facts.max_units))
            new, old = [(await self._server.ask(question)).seconds for _ in range(2)]
            await self._others(facts, 2, 24)
            times.append((new, old, (await self._server.ask(question)).seconds))
        first, again, later = map(min, zip(*times, strict=True))
        if again > 0.7 * first:
            self._limits.append(
                "No hit was seen by time either: a repeated prompt took as long as a new one."
            )
        elif later > (again + first) / 2:
            facts.cold_by, facts.displacers, facts.displacer_units = "displacement", 2, 24

    async def _others(self, facts: Facts, count: int, units: int) -> None:
        for _ in range(count):
            await self._server.ask(Question(self.prompt(facts.units, units)))

    async def _measure_borders(self, facts: Facts) -> None:
        """Smallest reusable prefix and granularity, by bisection over the length of a shared prefix."""
        length = min(PROBE_UNITS, facts.max_units - 8)
        while True:
            prefix = self.prompt(facts.units, length)
            salt = self.salt() if facts.salts else None
            await self._server.ask(Question(prefix, salt=salt))
            most = await self._cached_for(facts, prefix, length, salt)
            smallest = await self._first_above(facts, prefix, 0, length, salt)
            if smallest is not None and most > smallest[1]:
                break
            if length >= facts.max_units - 8:
                self._limits.append(
                    f"No two borders were found within {length} tokens: the granularity is not known."
                )
                return
            length = min(2 * length, facts.max_units - 8)
        second = await self._first_above(facts, prefix, smallest[1], length, salt)
        if second is None:
            self._limits.append("Counts of cached tokens contradict each other: no granularity is known.")
            return
        facts.smallest = smallest[1]
        facts.granularity = gcd(second[1] - smallest[1], most - second[1])
        facts.phase = second[0]

    async def _first_above(
        self, facts: Facts, prefix: Prompt, cached: int, length: int, salt: str | None
    ) -> tuple[int, int] | None:
        """The shortest shared prefix with a hit of more than `cached` tokens.

        Its length in units, and the hit; None if there is none.
        """
        low, high, hit = 0, length, await self._cached_for(facts, prefix, length, salt)
        if hit <= cached:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            now = await self._cached_for(facts, prefix, middle, salt)
            if now > cached:
                high, hit = middle, now
            else:
                low = middle
        return high, hit

    async def _cached_for(self, facts: Facts, prefix: Prompt, shared: int, salt: str | None) -> int:
        """The hit of a prompt that shares leading units with a cached one."""
        following = prefix[shared] if shared < len(prefix) else None
        other = self._rng.choice([unit for unit in facts.units[:64] if unit != following])
        tail = (other, *self.prompt(facts.units, 5))
        answer = await self._server.ask(Question(prefix[:shared] + tail, salt=salt))
        most = shared + facts.overhead  # what is told beyond it is a finding later, and no length of a prompt
        return min(answer.cached_tokens or 0, most)

    async def _choose_forced(self, facts: Facts) -> None:
        """A token that logit_bias forces, so that its id in the answer is known."""
        if self._server.form.words is not None:
            return
        unit = facts.units[len(facts.units) // 2]
        self._server.change(forced=unit)
        answer = await self._accepts(Question(self.prompt(facts.units, 16), max_tokens=4, forced=True))
        tokens = {score.token for score in answer.scores} if answer is not None else set()
        if answer is None or len(answer.scores) != 4 or len(tokens) != 1:
            self._server.change(forced=None)
