"""Measured requests: reading them, serving them again in simulated time, and comparing the latencies."""

from __future__ import annotations

import json
import lzma
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sagellm.core.clock import ManualClock
from sagellm.core.config import Config
from sagellm.core.errors import CapacityError, ConfigError
from sagellm.core.events import EventBus, RequestFinished, RequestScheduled
from sagellm.core.protocols.engine import EngineCore
from sagellm.core.types import FinishReason, Request, SamplingParams, Tokens
from sagellm.engines.simulator.backend import configured_backend
from sagellm.engines.simulator.cost_model import CostModel, StepShape

TIMES = ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
LENGTHS = ("input_toks", "output_toks")
PERCENTILES = (50, 90, 95, 99)
MAX_IDLE_STEPS = 3
"""Steps in a row without time passing, after which an engine that has work is stuck."""

EngineFactory = Callable[..., EngineCore]
"""Builds the engine that is simulated: `engines.build.build_engine`."""


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """The lengths of one request, and when things happened to it, measured or simulated.

    Times are seconds on one clock that starts with the first arrival. `scheduled_s`: when its first step was
    planned.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float
    queued_s: float
    scheduled_s: float
    first_token_s: float
    last_token_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.queued_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first; 0 for an answer of one token."""
        return (self.last_token_s - self.first_token_s) / max(1, self.num_output_tokens - 1)


# -- reading


def read_measured(path: Path) -> list[RequestTiming]:
    """The requests of a file, by arrival; raises `ConfigError` that names the line.

    Each line is a JSON object with `LENGTHS` and with `TIMES` in seconds. Arrivals may be on another clock
    than the other times. A file that ends in `.xz` is decompressed.
    """
    try:
        data = path.read_bytes()
        text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the requests in {path}: {error}") from error
    lines = ((f"{path}, line {number}", line) for number, line in enumerate(text.splitlines(), 1))
    rows = [_row(where, line) for where, line in lines if line.strip()]
    if not rows:
        raise ConfigError(f"{path} holds no request")
    rows.sort(key=lambda row: row[1]["arrival_time"])
    zero_s = rows[0][1]["arrival_time"]
    # The clocks of client and engine differ by a constant: no request is queued before it arrives.
    shift_s = zero_s + min(row["queued_ts"] - row["arrival_time"] for _, row in rows)
    return [
        RequestTiming(
            name,
            int(row["input_toks"]),
            int(row["output_toks"]),
            row["arrival_time"] - zero_s,
            *(row[key] - shift_s for key in TIMES[1:]),
        )
        for name, row in rows
    ]


def _row(where: str, line: str) -> tuple[str, dict[str, Any]]:
    """Id and checked numbers of one line."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a JSON object is needed, not a {type(record).__name__}")
    row: dict[str, Any] = {name: record.get(name) for name in (*TIMES, *LENGTHS)}
    for name, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{where}: {name} is {value!r}; needed as numbers: {', '.join(row)}")
        if name in LENGTHS and (value < 1 or value != int(value)):
            raise ConfigError(f"{where}: {name} is {value!r}, it must be a whole number, 1 at least")
    order = [row[name] for name in TIMES[1:]]
    if order != sorted(order):
        raise ConfigError(f"{where}: times must rise in this order: {', '.join(TIMES[1:])}")
    return str(record.get("request_id", where)), row


# -- serving again


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What a simulation of requests did: steps, when each ended, and request timings."""

    shapes: tuple[StepShape, ...]
    end_s: npt.NDArray[np.float64]
    timings: tuple[RequestTiming, ...]

    def steps_until(self, times_s: Iterable[float]) -> npt.NDArray[np.int64]:
        """Number of steps that had ended by each time, inclusive."""
        return np.searchsorted(self.end_s, np.fromiter(times_s, np.float64), side="right")


def simulate(
    requests: Sequence[RequestTiming],
    cost_model: CostModel,
    config: Config,
    build_engine: EngineFactory,
    *,
    pipelined: bool = True,
) -> SimulatedRun:
    """Serve the requests again at their arrival times, with their lengths.

    Prompts share no prefix, since measurements tell only lengths: each is one token repeated, another for
    each request. `pipelined`: see `drive`.
    """
    clock, events = ManualClock(), EventBus()
    shapes: list[StepShape] = []
    end_s: list[float] = []

    def note(shape: StepShape, seconds: float) -> None:
        shapes.append(shape)
        end_s.append(clock.now() + seconds)

    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in requests)
    length = max(longest, cost_model.model.max_model_len)
    backend = configured_backend(cost_model, config, clock, max_model_len=length, on_step=note)
    engine = build_engine(config, backend, clock=clock, events=events)
    again = [
        Request(
            f"{number}:{request.request_id}",
            Tokens([number] * request.num_prompt_tokens),
            SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True),
            arrival_s=request.arrival_s,
        )
        for number, request in enumerate(requests)
    ]
    timings = drive(engine, clock, events, again, pipelined=pipelined)
    return SimulatedRun(tuple(shapes), np.array(end_s), tuple(timings))


def drive(
    engine: EngineCore,
    clock: ManualClock,
    events: EventBus,
    requests: Iterable[Request],
    *,
    pipelined: bool = True,
) -> list[RequestTiming]:
    """Run the engine until all requests have ended; returns their timings by arrival.

    `events` are those of the engine. `pipelined` (asynchronous scheduling): a step is planned while the one
    before it runs, so a request that arrives during a step is queued at its end and computed in the step
    after the next; without it, in the next. Raises `CapacityError` for a request that cannot be served.
    """
    arrivals = sorted(requests, key=lambda request: request.arrival_s)
    coming = deque(arrivals)
    planned_s = began_s = clock.now()
    queued_s: dict[str, float] = {}
    scheduled_s: dict[str, float] = {}
    ended: dict[str, RequestFinished] = {}

    def note_scheduled(event: RequestScheduled) -> None:
        scheduled_s.setdefault(event.request_id, planned_s)

    unsubscribe = (
        events.subscribe(RequestFinished, lambda event: ended.update({event.request_id: event})),
        events.subscribe(RequestScheduled, note_scheduled),
    )
    num_idle = 0
    try:
        while coming or engine.has_work():
            if not engine.has_work():
                clock.advance(max(0.0, coming[0].arrival_s - clock.now()))
                began_s = clock.now()
            now_s = clock.now()
            planned_s = began_s if pipelined else now_s
            while coming and coming[0].arrival_s <= planned_s:
                request = coming.popleft()
                queued_s[request.request_id] = planned_s
                engine.add(request)
            engine.step()
            began_s = now_s
            num_idle = num_idle + 1 if clock.now() == now_s else 0
            if num_idle > MAX_IDLE_STEPS:
                raise CapacityError("the engine has work and computes nothing: a request does not fit")
    finally:
        for stop in unsubscribe:
            stop()
    names = [request.request_id for request in arrivals]
    return [_timing(r, ended[n], queued_s[n], scheduled_s[n]) for r, n in zip(arrivals, names, strict=True)]


def _timing(request: Request, event: RequestFinished, queued_s: float, scheduled_s: float) -> RequestTiming:
    """The timing of an ended request; raises `CapacityError` unless it got all tokens."""
    wanted = request.params.max_tokens
    cut_short = event.reason == FinishReason.LENGTH and event.num_output_tokens < (wanted or 0)
    served = event.reason in (FinishReason.LENGTH, FinishReason.STOP) and not cut_short
    if event.first_token_s is None or not served:
        raise CapacityError(
            f"request {request.request_id} ended ({event.reason}) with {event.num_output_tokens} tokens: "
            "give the engine more KV blocks and a longer context, or leave the request out"
        )
    times_s = (request.arrival_s, queued_s, scheduled_s, event.first_token_s, event.finished_s)
    return RequestTiming(request.request_id, len(request.tokens), event.num_output_tokens, *times_s)


# -- comparing


@dataclass(frozen=True, slots=True)
class Compared:
    """One statistic of one latency, in seconds."""

    latency: str
    statistic: str
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Relative error of the simulated value; 0 if both are 0."""
        if self.measured_s == 0.0:
            return 0.0 if self.simulated_s == 0.0 else math.inf
        return self.simulated_s / self.measured_s - 1


def compare(measured: Sequence[RequestTiming], simulated: Sequence[RequestTiming]) -> list[Compared]:
    """Mean and percentiles of TTFT and TPOT; raises `ValueError` unless the requests are pairs."""
    if len(measured) != len(simulated) or not measured:
        raise ValueError(f"{len(measured)} measured requests, {len(simulated)} simulated ones: pairs needed")
    rows = []
    for name in ("TTFT", "TPOT"):
        both = [np.array([getattr(t, f"{name.lower()}_s") for t in part]) for part in (measured, simulated)]
        rows.append(Compared(name, "mean", *(float(values.mean()) for values in both)))
        for percent in PERCENTILES:
            pair = (float(np.percentile(values, percent)) for values in both)
            rows.append(Compared(name, f"p{percent}", *pair))
    return rows
