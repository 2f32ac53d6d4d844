"""Generates seeded traces: chats, agent loops, shared prompts, tenants of unequal rates.

Sessions arrive as a Poisson process. A session is a list of tokens that only grows: a system prompt, drawn
from a few by a Zipf law, then a question in each turn; the answer is part of the next turn's prompt. Lengths
are lognormal, pauses exponential, the number of turns geometric.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from sagellm.benchmarks.traces.record import Trace, TraceRequest
from sagellm.core.errors import ConfigError, UnknownNameError, nearest
from sagellm.core.types import Namespace, Tokens

FORMAT = "synth"
SECONDS_PER_OUTPUT_TOKEN = 0.02
"""The assumed speed of answers: a generator has no engine to measure it."""
SUBAGENT = "subagent"


@dataclass(frozen=True, slots=True)
class SynthProfile:
    """How the users of one kind behave.

    Lengths in tokens are medians, with `spread` as the deviation of their logarithm; `system_spread` is that
    of the system prompts' lengths. After a turn, with the probability `subagents`, a second conversation of
    `subagent_turns` turns begins with a system prompt of its own, and the session continues when it is over.
    A session ends before a prompt would exceed `max_input_tokens`.
    """

    sessions_per_s: float
    turns: float
    think_s: float
    num_system_prompts: int
    system_tokens: int
    question_tokens: int
    answer_tokens: int
    first_question_tokens: int | None = None
    zipf: float = 1.0
    spread: float = 0.7
    system_spread: float = 0.3
    subagents: float = 0.0
    subagent_turns: float = 6.0
    max_input_tokens: int = 131_072

    def __post_init__(self) -> None:
        at_least = {"turns": 1, "subagent_turns": 1, "num_system_prompts": 1, "question_tokens": 1}
        at_least |= {"answer_tokens": 1, "max_input_tokens": 1}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            lowest = at_least.get(field.name, 0)
            if value is not None and not (lowest <= value and math.isfinite(value)):
                raise ConfigError(f"{field.name} must be at least {lowest}, got {value}")
        if not self.sessions_per_s or self.subagents > 1:
            raise ConfigError("sessions_per_s must be greater than 0, and subagents at most 1")


PROFILES: Mapping[str, SynthProfile] = {
    "chat": SynthProfile(
        sessions_per_s=0.25, turns=4.0, think_s=45.0, num_system_prompts=8, system_tokens=400,
        question_tokens=60, answer_tokens=250, first_question_tokens=250,
    ),
    "agents": SynthProfile(
        sessions_per_s=0.01, turns=40.0, think_s=6.0, num_system_prompts=3, system_tokens=12_000,
        question_tokens=500, answer_tokens=120, first_question_tokens=1_500, spread=1.1, subagents=0.04,
    ),
    "shared_prompts": SynthProfile(
        sessions_per_s=2.0, turns=1.0, think_s=0.0, num_system_prompts=200, system_tokens=2_000,
        question_tokens=80, answer_tokens=150, zipf=0.8,
    ),
    "tenants": SynthProfile(
        sessions_per_s=2.0, turns=1.3, think_s=60.0, num_system_prompts=60, system_tokens=2_000,
        question_tokens=80, answer_tokens=150, zipf=0.6,
    ),
}  # fmt: skip
"""Multi-turn chat; agent loops with long prompts, tool results and sub-agents; single questions about a few
shared documents; and the same from tenants with documents of their own."""

TENANT_SHARES: Mapping[str, tuple[float, ...]] = {"tenants": (8.0, 1.0, 1.0)}
"""The kinds with several tenants by default, and the ratio of the tenants' rates."""


def profile(kind: str, **changes: Any) -> SynthProfile:
    """Returns the profile of a kind with changed fields. Raises `UnknownNameError`, `ConfigError`."""
    if kind not in PROFILES:
        raise UnknownNameError(f"unknown kind of trace {kind!r}.{nearest(kind, PROFILES)}")
    names = [field.name for field in dataclasses.fields(SynthProfile)]
    for name, value in changes.items():
        if name not in names:
            raise UnknownNameError(f"a profile has no {name!r}; it has {', '.join(names)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} must be a number, got {value!r}")
        if isinstance(getattr(PROFILES[kind], name), int) and not isinstance(value, int):
            raise ConfigError(f"{name} must be a whole number, got {value!r}")
    return replace(PROFILES[kind], **changes)


def synthesize(
    kind: str,
    *,
    seed: int = 0,
    duration_s: float = 3600.0,
    block_tokens: int = 64,
    tenants: Sequence[float] | None = None,
    **changes: Any,
) -> Trace:
    """Returns requests that arrive within `duration_s`; the same arguments give the same trace.

    `tenants`: shares of the sessions, one tenant each. Their contents are disjoint: tenants are namespaces,
    and no id occurs in two. By default the kind decides, mostly one nameless tenant. `changes` are fields of
    `SynthProfile`.
    """
    if not (duration_s > 0 and math.isfinite(duration_s)) or block_tokens < 1:
        raise ConfigError(
            "duration_s must be greater than 0 and block_tokens at least 1; "
            f"got {duration_s} and {block_tokens}"
        )
    chosen = profile(kind, **changes)
    shares = tuple(TENANT_SHARES.get(kind, (1.0,)) if tenants is None else tenants)
    if not shares or not all(share > 0 and math.isfinite(share) for share in shares):
        raise ConfigError(f"tenants must be shares greater than 0, for example 8,1,1; got {shares}")
    fresh = itertools.count()
    requests: list[TraceRequest] = []
    for number, share in enumerate(shares):
        tenant = f"tenant-{number + 1}" if len(shares) > 1 else ""
        rate = chosen.sessions_per_s * share / sum(shares)
        random = Random(f"{seed}/{number}")
        traffic = _Tenant(replace(chosen, sessions_per_s=rate), tenant, random, fresh, block_tokens)
        requests += traffic.requests(duration_s)
    requests.sort(key=lambda request: request.time_s)
    name = f"{kind}-seed{seed}"
    return Trace(name=name, format=FORMAT, block_tokens=block_tokens, requests=tuple(requests))


class _Content:
    """A growing list of tokens as ids of its blocks. A whole block keeps its id. The partial last block
    gets a new id each time that the list is sent."""

    def __init__(self, fresh: Iterator[int], block_tokens: int, shared: Sequence[int], length: int) -> None:
        self._fresh = fresh
        self._block_tokens = block_tokens
        self._whole = list(shared)
        self.length = length

    def prompt(self) -> Tokens:
        whole, partial = divmod(self.length, self._block_tokens)
        self._whole += itertools.islice(self._fresh, whole - len(self._whole))
        return Tokens([*self._whole, next(self._fresh)] if partial else self._whole)


class _Tenant:
    """The traffic of one tenant: its system prompts and sessions."""

    def __init__(
        self, profile: SynthProfile, tenant: str, random: Random, fresh: Iterator[int], block_tokens: int
    ) -> None:
        self._profile = profile
        self._tenant = tenant
        self._namespace = Namespace(tenant=tenant)
        self._random = random
        self._fresh = fresh
        self._block_tokens = block_tokens
        self._systems = [self._system() for _ in range(profile.num_system_prompts)]
        self._subagent_system = self._system()
        self._weights = [(rank + 1) ** -profile.zipf for rank in range(profile.num_system_prompts)]

    def requests(self, duration_s: float) -> Iterator[TraceRequest]:
        """Yields session after session; within a session in order of time."""
        start_s = 0.0
        for number in itertools.count(1):
            start_s += self._random.expovariate(self._profile.sessions_per_s)
            if start_s >= duration_s:
                return
            name = f"{self._tenant}/{number}" if self._tenant else str(number)
            [system] = self._random.choices(self._systems, self._weights)
            for request in self._conversation(name, start_s, system, self._turns(self._profile.turns)):
                if request.time_s < duration_s:
                    yield request

    def _conversation(
        self, session: str, now_s: float, system: tuple[list[int], int], turns: int, kind: str = ""
    ) -> Iterator[TraceRequest]:
        """Yields one turn after the other, with the requests of sub-agents in between."""
        profile, (shared, system_tokens) = self._profile, system
        content = _Content(self._fresh, self._block_tokens, shared, system_tokens)
        question = profile.first_question_tokens or profile.question_tokens
        for turn in range(1, turns + 1):
            content.length += self._length(question)
            question = profile.question_tokens
            if content.length > profile.max_input_tokens:
                return
            meta = {"turn": turn, "type": kind} if kind else {"turn": turn}
            request = self._request(session, now_s, content, meta)
            yield request
            content.length += request.num_output_tokens
            now_s = self._after(request)
            if not kind and self._random.random() < profile.subagents:
                turns_of_it = self._turns(profile.subagent_turns)
                for request in self._conversation(
                    session, now_s, self._subagent_system, turns_of_it, SUBAGENT
                ):
                    yield request
                    now_s = self._after(request)

    def _request(
        self, session: str, time_s: float, content: _Content, meta: Mapping[str, Any]
    ) -> TraceRequest:
        return TraceRequest(
            time_s=round(time_s, 3),
            ids=content.prompt(),
            namespace=self._namespace,
            num_input_tokens=content.length,
            num_output_tokens=self._length(self._profile.answer_tokens),
            session=session,
            tenant=self._tenant,
            meta=meta,
        )

    def _after(self, request: TraceRequest) -> float:
        """Returns the time of the next question: after the answer and a pause."""
        mean_s = self._profile.think_s
        pause_s = self._random.expovariate(1 / mean_s) if mean_s else 0.0
        return request.time_s + request.num_output_tokens * SECONDS_PER_OUTPUT_TOKEN + pause_s

    def _system(self) -> tuple[list[int], int]:
        """Returns the ids of a system prompt's whole blocks, and its tokens."""
        tokens = self._length(self._profile.system_tokens, self._profile.system_spread)
        return list(itertools.islice(self._fresh, tokens // self._block_tokens)), tokens

    def _length(self, middle: int, spread: float | None = None) -> int:
        """Draws a length of at least one token. It is 0 if the median is 0."""
        deviation = self._profile.spread if spread is None else spread
        return max(1, round(self._random.lognormvariate(math.log(middle), deviation))) if middle else 0

    def _turns(self, mean: float) -> int:
        """Draws a geometric number of turns, at least one."""
        if mean <= 1:
            return 1
        return 1 + int(math.log(1 - self._random.random()) / math.log(1 - 1 / mean))
