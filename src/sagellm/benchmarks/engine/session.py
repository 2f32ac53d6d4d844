"""Runs batches on one engine and measures steps, memory and CPU use."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sagellm.core.clock import Clock
from sagellm.core.errors import SageError
from sagellm.core.plan import ExecutionPlan
from sagellm.core.types import (
    CapabilityDescriptor,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    Tokens,
)
from sagellm.engines.engine import Engine


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One request: its prompt, and how many tokens it gets, whatever they are."""

    prompt: Sequence[int]
    num_outputs: int


@dataclass(slots=True)
class PromptAnswer:
    """When each token of a request came, in seconds after its batch was sent."""

    times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0

    @property
    def first_s(self) -> float:
        return self.times_s[0]

    @property
    def last_s(self) -> float:
        return self.times_s[-1]


@dataclass(slots=True)
class StepTime:
    """What steps took, and what of it the backend took to compute them; how many tokens' KV they read."""

    num_steps: int = 0
    total_s: float = 0.0
    execute_s: float = 0.0
    tokens_read: int = 0

    @property
    def overhead(self) -> float:
        """The share of the steps that was not `execute`, 0 to 1; 0 where planning went on beside it."""
        return max(0.0, 1.0 - self.execute_s / self.total_s) if self.total_s else 0.0

    def roofline(self, capability: CapabilityDescriptor, bandwidth: float) -> float | None:
        """The share of the steps' time, 0 to 1, that reading the weights once a step, and the KV of every
        sequence in it, takes at `bandwidth` bytes per second; None where there is nothing to read.
        """
        schema = capability.kv_schema
        if not self.total_s or not capability.weight_bytes or schema is None:
            return None
        read = self.num_steps * capability.weight_bytes + self.tokens_read * schema.bytes_per_token
        return read / bandwidth / self.total_s


class Session:
    """An engine, greedy, end of sequence ignored, as every engine of the harness is measured."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._ids = itertools.count()
        self.steps = StepTime()
        self._window = engine.capability().sliding_window

    @property
    def vocab_size(self) -> int:
        return self._engine.capability().vocab_size

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def begin(self) -> None:
        """Nothing is cached, and steps are counted anew."""
        self._engine.kv.clear_cache()
        self.steps = StepTime()

    def run(self, jobs: Sequence[PromptJob]) -> list[PromptAnswer]:
        """Send all at once; the answers in order. Raises `SageError` for one that the engine could not
        give."""
        began_s = self._clock.now()
        answers: dict[str, PromptAnswer] = {}
        for job in jobs:
            request_id = f"bench-{next(self._ids)}"
            answers[request_id] = PromptAnswer()
            params = SamplingParams(temperature=0.0, max_tokens=job.num_outputs, ignore_eos=True)
            self._engine.add(Request(request_id, Tokens(job.prompt), params))
        while self._engine.has_work():
            outputs = self._step()
            now_s = self._clock.now() - began_s
            for output in outputs:
                _take(answers[output.request_id], output, now_s)
        return list(answers.values())

    def _step(self) -> Sequence[RequestOutput]:
        before, began_s = self._engine.last_step, self._clock.now()
        outputs = self._engine.step()
        self.steps.num_steps += 1
        self.steps.total_s += self._clock.now() - began_s
        if self._engine.last_step is not before:  # a step may have nothing to execute
            self.steps.execute_s += self._engine.last_step.duration_s
            if self._engine.last_plan is not None:
                self.steps.tokens_read += _tokens_read(self._engine.last_plan, self._window)
        return outputs


def _tokens_read(plan: ExecutionPlan, window: int | None) -> int:
    """Tokens whose KV the step reads; those of a chunk read the same ones."""
    contexts = [position + 1 for position in plan.decode_positions]
    if window is not None:
        contexts = [min(window, context) for context in contexts]
    return sum(contexts) + sum(
        op.num_tokens + (op.start if window is None else min(window, op.start)) for op in plan.prefills
    )


def _take(answer: PromptAnswer, output: RequestOutput, now_s: float) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise SageError(f"the engine gave up a request: {output.error}")
    answer.token_ids += output.new_token_ids
    answer.times_s += [now_s] * len(output.new_token_ids)
    answer.num_cached = output.num_cached_tokens


STATUS, STAT = Path("/proc/self/status"), Path("/proc/stat")
_IDLE = (3, 4)
"""Idle and waiting for a disk, among the kernel's counters."""


def resident_bytes() -> int | None:
    """Resident memory now, shared pages included."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most that was ever resident."""
    found = _status_bytes("VmHWM")
    if found is not None:
        return found
    import resource  # there is none on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status_bytes(name: str) -> int | None:
    if not STATUS.exists():
        return None
    lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    found = [line.split() for line in lines if line.startswith(name + ":")]
    return int(found[0][1]) * 1024 if found else None


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds since the machine started: of all cores, of all processes, of this one and of those that it
    has started and waited for."""

    total_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> CpuTimes | None:
        if not STAT.exists():
            return None
        first = STAT.read_text(encoding="ascii").split("\n", 1)[0]
        ticks = [int(count) for count in first.split()[1:9]]
        per_second = os.sysconf("SC_CLK_TCK")
        total = sum(ticks)
        busy = total - sum(ticks[i] for i in _IDLE)
        own = os.times()
        return cls(total / per_second, busy / per_second, sum(own[:4]))


def others_share(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """The share of the machine that other processes used in between, 0 to 1."""
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    busy_s, own_s = after.busy_s - before.busy_s, after.own_s - before.own_s
    return min(1.0, max(0.0, (busy_s - own_s) / (after.total_s - before.total_s)))
