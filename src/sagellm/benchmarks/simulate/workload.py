"""Turns a trace into a workload: arrival times, turns, priorities and prompts.

All random draws come from one seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagellm.benchmarks.traces import Trace, TraceRequest
from sagellm.benchmarks.traces.record import infinite_cache_hits
from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError, UnknownNameError, nearest
from sagellm.core.types import SLO, Request, SamplingParams, Tokens

PROCESSES = ("trace", "poisson", "bursty")
MOST_BITS = 16
MIN_VOCAB = 2
_ODD = np.uint32(0x9E3779B1)
HIGH = 1
"""The priority of the drawn requests; the others have 0."""
GREEDY = SamplingParams(0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How arrivals follow each other.

    `trace` keeps the trace's gaps, scaled; `poisson` draws independent exponential gaps; `bursty` draws gamma
    gaps whose coefficient of variation is `cv` (1 is Poisson, more is burstier). `rate` is the mean in
    requests per second; without it the trace's rate is multiplied by `rate_scale`.
    """

    process: str = "trace"
    rate: float | None = None
    rate_scale: float = 1.0
    cv: float = 3.0

    def __post_init__(self) -> None:
        if self.process not in PROCESSES:
            raise UnknownNameError(f"unknown arrivals {self.process!r}.{nearest(self.process, PROCESSES)}")
        for name, value in (("rate", self.rate), ("rate_scale", self.rate_scale), ("cv", self.cv)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be greater than 0, got {value}")
        if not math.isfinite(self.cv):
            raise ConfigError(f"cv must be a finite number, got {self.cv}")

    def times(self, times_s: Sequence[float], seed: int) -> list[float]:
        """Returns arrival times from 0 s on. In the trace, they are `times_s` (ascending)."""
        if self.process == "trace":
            scale = self.rate_scale if self.rate is None else self.rate / self._own_rate(times_s)
            start_s = times_s[0] if times_s else 0.0
            return [(time_s - start_s) / scale for time_s in times_s]
        rate = self.rate or self._own_rate(times_s) * self.rate_scale
        count, random = len(times_s), np.random.default_rng([seed, 1])
        shape = 1.0 / self.cv**2
        poisson = self.process == "poisson"
        gaps = random.exponential(1.0, count) if poisson else random.gamma(shape, 1.0 / shape, count)
        gaps /= rate
        return [float(time_s) for time_s in np.cumsum(gaps) - gaps[0]] if len(gaps) else []

    def _own_rate(self, times_s: Sequence[float]) -> float:
        own = mean_rate(times_s)
        if math.isinf(own):
            raise ConfigError(
                "all requests of the trace come at one moment, so it has no rate of its own: ask for "
                "arrivals 'poisson' or 'bursty' and a rate"
            )
        return own


def mean_rate(times_s: Sequence[float]) -> float:
    """Requests per second from the first arrival to the last. Infinite if all come at once."""
    span_s = times_s[-1] - times_s[0] if times_s else 0.0
    return (len(times_s) - 1) / span_s if span_s > 0 else math.inf


class PromptContent:
    """Makes the tokens of prompts from ids of blocks of `block_tokens` tokens.

    Prompts share the tokens of a block if and only if they share its id. A block is an arithmetic progression
    modulo a power of two, whose start and (odd) step its id gives. With a vocabulary of 65,536 tokens or more
    and ids below 2**30, two ids differ in every run of two tokens at equal places; with smaller vocabularies
    they do for all but a few. If `block_tokens` is 1, the ids are the tokens, modulo the vocabulary.
    """

    def __init__(self, block_tokens: int, vocab_size: int) -> None:
        if vocab_size < MIN_VOCAB:
            raise ConfigError(f"a vocabulary of {vocab_size} tokens cannot tell contents apart: 2 at least")
        self.block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._bits = min(MOST_BITS, vocab_size.bit_length() - 1)
        self._offsets = np.arange(block_tokens).astype(np.uint16)

    def tokens(self, ids: Tokens, num_tokens: int, number: int) -> Tokens:
        """Returns a prompt of exactly `num_tokens` tokens. The blocks of `ids` come first, the last one
        cut; then tokens that only the prompt of this `number` has."""
        known = np.frombuffer(ids.view(), dtype=np.int32)
        if self.block_tokens == 1:
            made = np.mod(known, np.int32(self._vocab_size)).astype(np.int32)[:num_tokens]
        else:
            made = self._blocks(known.view(np.uint32) * np.uint32(2), self._offsets)[:num_tokens]
        rest = num_tokens - len(made)
        if rest:
            own = np.array([2 * number + 1], dtype=np.uint32)
            tail = self._blocks(own, np.arange(rest).astype(np.uint16))
            made = np.concatenate([made, tail])
        return Tokens.frombytes(made.tobytes())

    def _blocks(self, ids: NDArray[np.uint32], offsets: NDArray[np.uint16]) -> NDArray[np.int32]:
        """Returns `len(ids) * len(offsets)` tokens. The product of an id and an odd number is different
        for each id; its low bits are the start, the next ones the step. The 16 bits wrap on purpose."""
        mixed = ids * _ODD
        start = mixed.astype(np.uint16)
        step = ((mixed >> np.uint32(self._bits)) << np.uint32(1)).astype(np.uint16) | np.uint16(1)
        made: NDArray[np.uint16] = np.multiply.outer(step, offsets)
        made += start[:, None]
        if self._bits < MOST_BITS:
            made &= np.uint16((1 << self._bits) - 1)
        return made.ravel().astype(np.int32)


def check_lengths(trace: Trace) -> None:
    """Raises `ConfigError` for a request with more block ids than its prompt has blocks."""
    for number, request in enumerate(trace.requests):
        blocks = cdiv(request.num_input_tokens, trace.block_tokens)
        if len(request.ids) > blocks:
            raise ConfigError(
                f"request {number} of trace {trace.name!r} names {len(request.ids)} blocks of "
                f"{trace.block_tokens} tokens, its {request.num_input_tokens} tokens have {blocks}"
            )


def uncached_tokens(requests: tuple[TraceRequest, ...], block_tokens: int) -> NDArray[np.int64]:
    """Prompt tokens per request that a cache which never evicts must still compute. All earlier requests
    of the trace count as served."""
    lengths = np.array([request.num_input_tokens for request in requests], dtype=np.int64)
    hits = np.array(infinite_cache_hits(requests), dtype=np.int64)
    uncached: NDArray[np.int64] = np.maximum(lengths - hits * block_tokens, 0)
    return uncached


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """How a trace becomes a workload.

    `closed_loop`: the next turn of a session comes a pause after the last answer, without it at the trace's
    time. `agents`: so many sessions run at once in a closed loop, from 0 s on, and each that ends lets the
    next one of the trace begin; without it sessions begin at the trace's times. The pause is the trace's
    (`meta["think_time"]`, seconds) or, with `think_s`, exponential with that
    mean; 0 is no pause. High priority has a share, drawn by seed, of the requests with fewer than
    `high_priority_below` uncached tokens (see `uncached_tokens`).
    `max_requests`: only the first of the trace.
    """

    arrivals: Arrivals = field(default_factory=Arrivals)
    closed_loop: bool = False
    agents: int | None = None
    think_s: float | None = None
    high_priority_share: float = 0.0
    high_priority_below: int = 2000
    max_requests: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        share, below = self.high_priority_share, self.high_priority_below
        if self.think_s is not None and not (self.think_s >= 0 and math.isfinite(self.think_s)):
            raise ConfigError(f"the time to think must be 0 or more seconds, got {self.think_s}")
        if self.agents is not None and not (self.closed_loop and self.agents >= 1):
            raise ConfigError(f"agents needs a closed loop and is at least 1, got {self.agents}")
        if not 0 <= share <= 1:
            raise ConfigError(f"the share of high priority must be 0 to 1, got {share}")
        if below < 0:
            raise ConfigError(f"high priority needs a number of uncached tokens from 0 on, got {below}")
        if self.max_requests is not None and self.max_requests < 1:
            raise ConfigError(f"at least one request must be left, got {self.max_requests}")
        if self.seed < 0:
            raise ConfigError(f"a seed is 0 or more, got {self.seed}")


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """Requests by number.

    `times_s[i]` is the arrival of request i; for a later turn (`follows[i]` is set) it is the pause after the
    answer to the request that it follows. `waiting`: first turns that begin when other sessions end, in
    order; their times are 0. `rate`: mean arrivals per second of requests that follow no other.
    `left_out`: requests of the trace that the model cannot hold, and those beyond `max_requests`.
    """

    trace: Trace
    spec: WorkloadSpec
    requests: tuple[TraceRequest, ...]
    times_s: tuple[float, ...]
    follows: Mapping[int, int] = field(default_factory=dict)
    waiting: tuple[int, ...] = ()
    priorities: tuple[int, ...] = ()
    rate: float = math.inf
    rate_scale: float = 1.0
    left_out: Mapping[str, int] = field(default_factory=dict)

    def first(self) -> list[tuple[float, int]]:
        """Time and number of every request that does not wait for another."""
        later = {*self.follows.values(), *self.waiting}
        return [(time_s, number) for number, time_s in enumerate(self.times_s) if number not in later]

    def described(self) -> dict[str, Any]:
        """Describes the workload for a manifest."""
        spec = self.spec
        return {
            "name": self.trace.name, "format": self.trace.format, "sha256": self.trace.sha256,
            "block_tokens": self.trace.block_tokens, "requests": len(self.requests),
            "left_out": dict(self.left_out), "arrivals": spec.arrivals.process,
            "cv": spec.arrivals.cv if spec.arrivals.process == "bursty" else None,
            "rate": _finite(self.rate), "rate_scale": _finite(self.rate_scale),
            "closed_loop": spec.closed_loop, "agents": spec.agents,
            "think_s": spec.think_s if spec.closed_loop else None,
            "high_priority_share": spec.high_priority_share, "high_priority_below": spec.high_priority_below,
            "high_priority_requests": sum(self.priorities), "seed": spec.seed,
            "prompt_tokens": sum(request.num_input_tokens for request in self.requests),
            "output_tokens": sum(output_tokens(request) for request in self.requests),
        }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def output_tokens(request: TraceRequest) -> int:
    """The trace's number, at least 1. An engine draws a token for every computed prompt."""
    return max(1, request.num_output_tokens)


def workload(trace: Trace, spec: WorkloadSpec, max_model_len: int) -> SimulatedWorkload:
    """Returns the workload of a trace for a model of that context length. Raises `ConfigError` if no
    request is left, or if the trace lacks what `spec` needs."""
    check_lengths(trace)
    asked = trace.requests[: spec.max_requests]
    requests = tuple(
        request for request in asked if 0 < request.num_input_tokens <= max_model_len - output_tokens(request)
    )
    if not requests:
        raise ConfigError(
            f"nothing is left of trace {trace.name!r}: of {len(asked)} requests none has a prompt and fits "
            f"with its answer into a context of {max_model_len} tokens"
        )
    follows = _turns(requests) if spec.closed_loop else {}
    later = set(follows.values())
    roots = [number for number in range(len(requests)) if number not in later]
    own_s = [requests[number].time_s for number in roots]
    if spec.agents is None:
        times = dict(zip(roots, spec.arrivals.times(own_s, spec.seed), strict=True))
    else:
        times = dict.fromkeys(roots, 0.0)
    times |= _pauses(requests, sorted(later), spec)
    made = [times[number] for number in range(len(requests))]
    rate = mean_rate([times[number] for number in roots])
    own = mean_rate(own_s)
    return SimulatedWorkload(
        trace, spec, requests, tuple(made), follows,
        () if spec.agents is None else tuple(roots[spec.agents :]),
        _priorities(trace, requests, spec),
        rate=rate,
        rate_scale=rate / own if math.isfinite(own) else 1.0,
        left_out={
            "too long or empty": len(asked) - len(requests),
            "behind the limit": len(trace.requests) - len(asked),
        },
    )  # fmt: skip


def _turns(requests: Sequence[TraceRequest]) -> dict[int, int]:
    """Maps each turn to the next one of its session."""
    sessions: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        if request.session is not None:
            sessions.setdefault(request.session, []).append(number)
    if not sessions:
        raise ConfigError(
            "a closed loop needs a trace with sessions, as the formats sagellm, coding_agents and "
            "lmcache_agents have them"
        )
    return {turn: after for numbers in sessions.values() for turn, after in pairwise(numbers)}


def _pauses(requests: Sequence[TraceRequest], later: Sequence[int], spec: WorkloadSpec) -> dict[int, float]:
    if spec.think_s is not None:
        drawn = np.random.default_rng([spec.seed, 2]).exponential(1.0, len(later)) * spec.think_s
        return {number: float(pause_s) for number, pause_s in zip(later, drawn, strict=True)}
    return {number: max(0.0, float(requests[number].meta.get("think_time") or 0.0)) for number in later}


def _priorities(trace: Trace, requests: tuple[TraceRequest, ...], spec: WorkloadSpec) -> tuple[int, ...]:
    made = np.zeros(len(requests), dtype=np.int64)
    if spec.high_priority_share:
        small = np.flatnonzero(uncached_tokens(requests, trace.block_tokens) < spec.high_priority_below)
        count = round(spec.high_priority_share * len(small))
        made[np.random.default_rng([spec.seed, 3]).choice(small, count, replace=False)] = HIGH
    return tuple(made.tolist())


class RequestMaker:
    """Makes requests when they arrive, so that only prompts in progress use memory."""

    def __init__(self, workload: SimulatedWorkload, vocab_size: int, slo: SLO | None = None) -> None:
        self._workload = workload
        self._content = PromptContent(workload.trace.block_tokens, vocab_size)
        self._slo = slo or SLO()

    def make(self, number: int, arrival_s: float, num_tokens: int) -> Request:
        """Returns request `number`, arrived at `arrival_s`, which will generate `num_tokens` tokens. The
        request itself sets no limit."""
        trace_request = self._workload.requests[number]
        return Request(
            str(number),
            self._content.tokens(trace_request.ids, trace_request.num_input_tokens, number),
            GREEDY,
            arrival_s=arrival_s,
            priority=self._workload.priorities[number],
            namespace=trace_request.namespace,
            slo=self._slo,
            session_id=trace_request.session,
            scripted_output=num_tokens,
        )
