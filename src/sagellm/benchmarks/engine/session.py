"""Runs batches on one engine; records when tokens come and how long steps take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """One request: its prompt and the exact number of tokens to generate."""

    prompt: Sequence[int]
    num_outputs: int


@dataclass(slots=True)
class PromptAnswer:
    """The tokens of one request and when they came. Times are in seconds after the batch was sent."""

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
    """Totals over steps. `execute_s` is the backend's part; `tokens_read` counts tokens whose KV was read."""

    num_steps: int = 0
    total_s: float = 0.0
    execute_s: float = 0.0
    tokens_read: int = 0

    @property
    def overhead(self) -> float:
        """Share of the steps' time outside `execute`, 0 to 1. It is 0 if planning ran fully in parallel
        with execution."""
        return max(0.0, 1.0 - self.execute_s / self.total_s) if self.total_s else 0.0

    def roofline(self, capability: CapabilityDescriptor, bandwidth: float) -> float | None:
        """Share of the steps' time that reading memory at `bandwidth` would take. Each step reads the
        weights once and the KV of every sequence in it; `bandwidth` is in bytes per second. Returns None
        if there is nothing to read."""
        schema = capability.kv_schema
        if not self.total_s or not capability.weight_bytes or schema is None:
            return None
        read = self.num_steps * capability.weight_bytes + self.tokens_read * schema.bytes_per_token
        return read / bandwidth / self.total_s


class Session:
    """Runs greedy requests that ignore the end of sequence, as the harness does."""

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
        """Clears the prefix cache and the step totals."""
        self._engine.kv.clear_cache()
        self.steps = StepTime()

    def run(self, jobs: Sequence[PromptJob]) -> list[PromptAnswer]:
        """Sends all jobs at once and returns the answers in order. Raises `SageError` if the engine ends a
        request with an error."""
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
                if output.finish_reason is FinishReason.ERROR:
                    raise SageError(f"the engine gave up a request: {output.error}")
                answer = answers[output.request_id]
                answer.token_ids += output.new_token_ids
                answer.times_s += [now_s] * len(output.new_token_ids)
                answer.num_cached = output.num_cached_tokens
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
    """Returns the number of tokens whose KV the step reads. Tokens of one chunk share their reads."""
    contexts = [position + 1 for position in plan.decode_positions]
    if window is not None:
        contexts = [min(window, context) for context in contexts]
    return sum(contexts) + sum(
        op.num_tokens + (op.start if window is None else min(window, op.start)) for op in plan.prefills
    )
