"""Measured request timings, as serving engines log them, and what a simulation makes of the same requests."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.events import EventBus
from sagellm.core.protocols.engine import EngineCore, InferenceBackend
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.simulator.backend import SimulatedBackend
from sagellm.engines.simulator.cost_model import CostModel, StepShape
from sagellm.engines.simulator.drive import Timing, drive

TIMES = ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
LENGTHS = ("input_toks", "output_toks")

EngineFactory = Callable[[InferenceBackend, ManualClock, EventBus], EngineCore]
"""Builds the engine that is simulated; whoever joins modules gives it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One request as it was measured, in seconds since the first of its file arrived."""

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


def read_measured(path: Path) -> list[Measured]:
    """The requests of a file, by arrival: a JSON object per line with the fields `TIMES` (seconds; the
    arrival on a clock of its own, the rest on one) and `LENGTHS`; `.xz` is unpacked. Raises `ConfigError`
    naming the line."""
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
    zero = rows[0][1]["arrival_time"]
    # The clocks of client and engine differ by a constant: nobody is queued before it arrives.
    shift = min(row["queued_ts"] - row["arrival_time"] for _, row in rows)
    return [_measured(name, row, zero, zero + shift) for name, row in rows]


def _row(where: str, line: str) -> tuple[str, dict[str, float]]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a JSON object is needed, not a {type(record).__name__}")
    row: dict[str, float] = {}
    for name in (*TIMES, *LENGTHS):
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            needed = ", ".join((*TIMES, *LENGTHS))
            raise ConfigError(f"{where}: {name} is {value!r}; needed as numbers: {needed}")
        row[name] = value
    for name in LENGTHS:
        if row[name] < 1 or row[name] != int(row[name]):
            raise ConfigError(f"{where}: {name} is {row[name]!r}, it must be a whole number, 1 at least")
    order = [row[name] for name in TIMES[1:]]
    if order != sorted(order):
        raise ConfigError(f"{where}: times must rise in this order: {', '.join(TIMES[1:])}")
    return str(record.get("request_id", where)), row


def _measured(name: str, row: dict[str, float], arrival_zero: float, engine_zero: float) -> Measured:
    return Measured(
        name,
        int(row["input_toks"]),
        int(row["output_toks"]),
        row["arrival_time"] - arrival_zero,
        *(row[key] - engine_zero for key in TIMES[1:]),
    )


@dataclass(frozen=True, slots=True)
class Run:
    """A simulation of measured requests: the shape of each step, when it ended, and each request's life."""

    shapes: tuple[StepShape, ...]
    end_s: npt.NDArray[np.float64]
    timings: tuple[Timing, ...]

    def steps_until(self, times_s: Iterable[float]) -> npt.NDArray[np.int64]:
        """How many steps had ended at each of these times, the one that ended just then included."""
        return np.searchsorted(self.end_s, np.fromiter(times_s, np.float64), side="right")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an instance is told beside its model: rows, blocks, and tokens per block."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256


def simulate(
    requests: Sequence[Measured],
    cost_model: CostModel,
    sizes: Sizes,
    make_engine: EngineFactory,
    *,
    pipelined: bool = True,
) -> Run:
    """Serve the requests again, at their arrival times and with their lengths, in simulated time. Prompts
    share no prefix: measurements tell lengths only."""
    clock, events = ManualClock(), EventBus()
    shapes: list[StepShape] = []
    end_s: list[float] = []

    def note(shape: StepShape, seconds: float) -> None:
        shapes.append(shape)
        end_s.append(clock.now() + seconds)

    longest = max(one.num_prompt_tokens + one.num_output_tokens for one in requests)
    backend = SimulatedBackend(
        cost_model,
        clock,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=max(longest, cost_model.model.max_model_len),
        on_step=note,
    )
    engine = make_engine(backend, clock, events)
    timings = drive(engine, clock, events, _as_requests(requests), pipelined=pipelined)
    return Run(tuple(shapes), np.array(end_s), tuple(timings))


def _as_requests(requests: Sequence[Measured]) -> list[Request]:
    """Each prompt is one token again and again, another for each request."""
    return [
        Request(
            f"{number}:{one.request_id}",
            Tokens([number] * one.num_prompt_tokens),
            SamplingParams(max_tokens=one.num_output_tokens, ignore_eos=True),
            arrival_s=one.arrival_s,
        )
        for number, one in enumerate(requests)
    ]
