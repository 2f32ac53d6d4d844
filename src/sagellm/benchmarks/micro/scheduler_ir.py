"""`sagellm bench micro scheduler_ir`: what a step costs beside its execution.

Section e, as in the peers' harness: prompts of 512 tokens in lock step, all in decode. A step is plan and
commit, and the backend answers with tokens that were drawn before, so every 16 steps all requests need a
block at once. Section n: many new requests at once.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from sagellm.benchmarks.micro.cases import (
    BLOCK_SIZE,
    MICROSECONDS,
    MicroBenchmark,
    MicroBenchPlan,
    MicroBenchRow,
    Spread,
    Stopwatch,
    Timing,
    garbage_frozen,
)
from sagellm.core.config import Config
from sagellm.core.errors import CapacityError
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.types import CapabilityDescriptor, KVCacheSchema, Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine
from sagellm.engines.engine import Engine
from sagellm.kvmgr.scheduler_ir import strategies

STEP = "decode step: plan + commit"
READ = "the same, outputs looked at"
BUILD = "new requests: draft + passes + verify"
ADMIT = "new requests: whole step"
PROMPT, VOCAB, LONGEST = 512, 32_000, 4096
MANY = 1024


class _Scripted:
    """A backend that answers with tokens that were made before the step."""

    def __init__(self, num_blocks: int, num_rows: int) -> None:
        schema = KVCacheSchema(1, 1, 1, "int8", BLOCK_SIZE, "none")
        self._capability = CapabilityDescriptor(
            "none", "int8", VOCAB, 200_000, num_blocks, BLOCK_SIZE, num_rows, schema
        )
        self.token_ids: tuple[int, ...] = ()

    def capability(self) -> CapabilityDescriptor:
        return self._capability

    def get_kv_schema(self) -> KVCacheSchema:
        assert self._capability.kv_schema is not None
        return self._capability.kv_schema

    def execute(self, plan: ExecutionPlan) -> StepResult:
        return StepResult(plan.step, self.token_ids[: len(plan.sample_rows)])

    def close(self) -> None:
        return None


def _engine(plan: MicroBenchPlan, preset: str, num_requests: int) -> tuple[Engine, _Scripted]:
    """Returns an engine with that many waiting requests. Its blocks suffice for all tokens of all
    requests, plus 1 in 16, since a strategy that admits by predicted memory keeps some blocks free."""
    num_blocks = num_requests * ((PROMPT + LONGEST) // BLOCK_SIZE) * 17 // 16 + 64
    backend = _Scripted(num_blocks, num_requests)
    settings = Config.model_validate(
        {
            "kv": {
                "block_size": BLOCK_SIZE,
                "eviction": plan.policy,
                "index_as_computed": preset == "vllm-like",
            },
            "scheduler": {
                "strategy": preset,
                "max_num_seqs": num_requests,
                "max_batched_tokens": max(65_536, num_requests * PROMPT),
            },
        }
    )
    engine = build_engine(settings, backend)
    draw = random.Random(plan.seed)
    params = SamplingParams(max_tokens=LONGEST, ignore_eos=True)
    for i in range(num_requests):
        tokens = Tokens([draw.randrange(3, VOCAB) for _ in range(PROMPT)])
        engine.add(Request(f"r{i}", tokens, params))
    return engine, backend


def _in_decode(plan: MicroBenchPlan, preset: str, num_requests: int) -> tuple[Engine, _Scripted]:
    engine, backend = _engine(plan, preset, num_requests)
    backend.token_ids = (7,) * num_requests
    for _ in range(10 * num_requests):
        engine.step()
        if engine.last_plan is not None and len(engine.last_plan.decode_rows) == num_requests:
            return engine, backend
    raise CapacityError(f"{preset} does not run {num_requests} requests together")


def _decode(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    for preset in plan.variants:
        for size in plan.running:
            steps = min(2 * stopwatch.repeats, 60) if size >= MANY else 2 * stopwatch.repeats
            engine, backend = _in_decode(plan, preset, size)
            draw = random.Random(5)
            for case, look in ((STEP, False), (READ, True)):
                timing = _time_steps(engine, backend, size, steps, draw, look=look)
                yield MicroBenchRow("e", case, size, preset, MICROSECONDS, timing.cpu.median, timing)


def _time_steps(
    engine: Engine, backend: _Scripted, size: int, steps: int, draw: random.Random, *, look: bool
) -> Timing:
    overhead_us = _overhead_us()
    cpu_us, wall_us = [], []
    with garbage_frozen():
        for _ in range(steps):
            backend.token_ids = tuple(draw.randrange(3, VOCAB) for _ in range(size))
            cpu_start, wall_start = time.thread_time_ns(), time.perf_counter_ns()
            outputs = engine.step()
            if look:
                list(outputs)
            wall_end, cpu_end = time.perf_counter_ns(), time.thread_time_ns()
            if len(engine.last_plan.decode_rows if engine.last_plan else ()) != size:
                raise CapacityError(f"not all of {size} requests took part in a step")
            cpu_us.append(max(0.0, (cpu_end - cpu_start) / 1000 - overhead_us))
            wall_us.append((wall_end - wall_start) / 1000)
    return Timing(steps, 1, Spread.of(cpu_us), Spread.of(wall_us), round(median(cpu_us), 3))


def _overhead_us() -> float:
    """Returns the cost of reading the clocks."""
    samples = []
    for _ in range(1000):
        start, _, _ = time.thread_time_ns(), time.perf_counter_ns(), time.perf_counter_ns()
        samples.append((time.thread_time_ns() - start) / 1000)
    return median(samples)


def _new(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    overhead_us = _overhead_us()
    for preset in plan.variants:
        for size in plan.new:
            spent: dict[str, list[float]] = {BUILD: [], ADMIT: []}
            for _ in range(max(3, stopwatch.repeats // 5)):
                for case, samples in spent.items():
                    engine, backend = _engine(plan, preset, size)
                    backend.token_ids = (7,) * size
                    run: Callable[[], object] = engine.draft if case == BUILD else engine.step
                    gc.collect()
                    start = time.thread_time_ns()
                    run()
                    samples.append((time.thread_time_ns() - start) / 1000 - overhead_us)
            for case, samples in spent.items():
                spread = Spread.of(samples)
                timing = Timing(len(samples), 1, spread, spread, spread.median)
                yield MicroBenchRow("n", case, size, preset, MICROSECONDS, spread.median, timing)


class _Strategies:
    """The scheduler's presets by name."""

    def names(self) -> Sequence[str]:
        return tuple(strategies.STRATEGIES)

    def get(self, name: str) -> object:
        return strategies.make(name)


BENCHMARK = MicroBenchmark("scheduler_ir", _Strategies(), {"e": _decode, "n": _new})
