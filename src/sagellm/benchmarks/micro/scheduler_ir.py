"""`sagellm bench micro scheduler_ir`: what a step costs beside its execution.

Section e, as in the peers' harness: prompts of 512 tokens in lock step, all in decode. A step is plan and
commit, and the backend answers with tokens that were drawn before, so every 16 steps all requests need a
block at once. Section n: many new requests at once.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from functools import partial

from sagellm.benchmarks.micro.cases import (
    BLOCK_SIZE,
    MicroBenchCell,
    MicroBenchmark,
    MicroBenchPlan,
    MicroBenchRow,
    Recipe,
    Stopwatch,
    TimedOperation,
    timed,
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


def _engine(cell: MicroBenchCell) -> tuple[Engine, _Scripted]:
    """Returns an engine with `cell.size` waiting requests. Its blocks suffice for all tokens of all
    requests, plus 1 in 16, since a strategy that admits by predicted memory keeps some blocks free."""
    plan, preset, num_requests = cell.plan, cell.variant, cell.size
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
    backend.token_ids = (7,) * num_requests
    draw = random.Random(plan.seed)
    params = SamplingParams(max_tokens=LONGEST, ignore_eos=True)
    for i in range(num_requests):
        tokens = Tokens([draw.randrange(3, VOCAB) for _ in range(PROMPT)])
        engine.add(Request(f"r{i}", tokens, params))
    return engine, backend


def _num_decodes(engine: Engine) -> int:
    return len(engine.last_plan.decode_rows) if engine.last_plan is not None else 0


def _step(cell: MicroBenchCell, calls: int, *, look: bool) -> TimedOperation:
    """A step of requests that all decode. `look`: at the outputs, which are made on first access."""
    engine, backend = _engine(cell)
    for _ in range(10 * cell.size):
        engine.step()
        if _num_decodes(engine) == cell.size:
            break
    draw = random.Random(5)

    def draw_tokens() -> None:
        backend.token_ids = tuple(draw.randrange(3, VOCAB) for _ in range(cell.size))

    def run(_: object) -> None:
        outputs = engine.step()
        if look:
            list(outputs)

    def check(_: object, result: object) -> None:
        if _num_decodes(engine) != cell.size:
            raise CapacityError(f"{cell.variant} does not run {cell.size} requests together")

    return TimedOperation(run, draw_tokens, check)


def _admission(cell: MicroBenchCell, calls: int, *, whole_step: bool) -> TimedOperation:
    def fresh_engine() -> Engine:
        engine, _ = _engine(cell)
        gc.collect()
        return engine

    return TimedOperation(run=Engine.step if whole_step else Engine.draft, setup=fresh_engine)


def _admissions(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Fewer samples: each needs a new engine."""
    section = timed(
        "n",
        Recipe(BUILD, partial(_admission, whole_step=False), "new", calls=1),
        Recipe(ADMIT, partial(_admission, whole_step=True), "new", calls=1),
    )
    yield from section(plan, Stopwatch(max(3, stopwatch.repeats // 5)))


BENCHMARK = MicroBenchmark(
    "scheduler_ir",
    lambda: tuple(strategies.STRATEGIES),
    strategies.make,
    {
        "e": timed(
            "e",
            Recipe(STEP, partial(_step, look=False), "running", calls=1),
            Recipe(READ, partial(_step, look=True), "running", calls=1),
        ),
        "n": _admissions,
    },
)
