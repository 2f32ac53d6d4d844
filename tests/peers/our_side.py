"""Our engine on a workload, and its decisions in the form in which `vllm_driver.py` writes those of vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.plan import Chunk, Draft, ExecutionPlan, StepResult
from sagellm.core.protocols.scheduler_ir import SchedulerPass, SchedulingView
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build_kv import build_kv
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir import PassPipeline
from sagellm.kvmgr.scheduler_ir.passes.vllm_like import VllmLikePass
from tests.peers.workloads import Arrival, Settings, Workload

Record = dict[str, Any]
LISTS = ("waiting", "scheduled", "new", "resumed", "preempted")


class ScriptedMemory(TokenMemoryBackend):
    """Draws the tokens of the workload, and still reads every sequence back from its blocks."""

    def __init__(self, settings: Settings, answers: Mapping[str, Sequence[int]]) -> None:
        super().__init__(
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            vocab_size=32000,
        )
        self._answers = answers
        self._drawn_of: dict[int, tuple[str, int]] = {}

    def execute(self, plan: ExecutionPlan) -> StepResult:
        for join in plan.joined:
            self._drawn_of[join.row] = (join.request_id, join.num_prompt_tokens)
        return super().execute(plan)

    def _draw(self, row_id: int, num_tokens: int) -> int:
        super()._draw(row_id, num_tokens)
        name, num_prompt_tokens = self._drawn_of[row_id]
        return self._answers[name][num_tokens - num_prompt_tokens]


class Recorder:
    """The last pass of all: writes down what the passes before it decided."""

    name = "recorder"

    def __init__(self) -> None:
        self.record: Record = {}
        self._seen: set[str] = set()

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        admitted = list(draft.admitted())
        running = [state for state in draft.running if draft.computes(state)]
        scheduled = [
            _line(draft.chunks.get(one.request_id) or Chunk(one, one.num_computed, 1)) for one in running
        ]
        names = [chunk.state.request_id for chunk in admitted]
        self.record = {
            "waiting": [state.request_id for state in draft.waiting],
            "scheduled": scheduled + [_line(chunk) for chunk in admitted],
            "new": [name for name in names if name not in self._seen],
            "resumed": [name for name in names if name in self._seen],
            "preempted": sorted(state.request_id for state in draft.preempted),
        }
        self._seen.update(names)


def _line(chunk: Chunk) -> list[Any]:
    return [chunk.state.request_id, chunk.num_tokens, chunk.start]


class WatchedMemory(ScriptedMemory):
    """Counts the blocks that a step leaves, while the step runs."""

    engine: Engine
    free_blocks = 0

    def execute(self, plan: ExecutionPlan) -> StepResult:
        self.free_blocks = self.engine.kv.quotes.available_blocks()
        return super().execute(plan)


def run(workload: Workload, passes: Sequence[SchedulerPass] | None = None, **kv_options: Any) -> list[Record]:
    """One record per step until every request has ended; books are checked after each."""
    backend = WatchedMemory(workload.settings, {one.id: one.answer for one in workload.requests})
    recorder = Recorder()
    engine = backend.engine = build(workload.settings, backend, recorder, passes, **kv_options)
    to_come = list(workload.requests)
    ended: dict[str | None, int] = {None: 0}
    steps: list[Record] = []
    while to_come or engine.has_work():
        here = [one for one in to_come if ended.get(one.after, math.inf) + one.step <= len(steps)]
        to_come = [one for one in to_come if one not in here]
        for one in here:
            engine.add(_request(one))
        recorder.record = {key: [] for key in LISTS}
        backend.free_blocks = engine.kv.quotes.available_blocks()
        outputs = engine.step()
        engine.check()
        finished = sorted(one.request_id for one in outputs if one.finish_reason is not None)
        steps.append(recorder.record | {"finished": finished, "free_blocks": backend.free_blocks})
        ended |= dict.fromkeys(finished, len(steps))
        assert len(steps) <= workload.max_steps, workload.name
    return steps


def build(
    settings: Settings,
    backend: TokenMemoryBackend,
    recorder: Recorder,
    passes: Sequence[SchedulerPass] | None,
    **kv_options: Any,
) -> Engine:
    clock = ManualClock()
    options: dict[str, Any] = {"eviction": "lru", "index_as_computed": True} | kv_options
    kv = build_kv(
        KVConfig(block_size=settings.block_size, prefix_caching=settings.prefix_caching, **options),
        settings.num_blocks,
        clock=clock,
    )
    chosen = passes if passes is not None else [VllmLikePass(settings.long_prefill_tokens)]
    return Engine(
        backend,
        kv,
        PassPipeline([*chosen, recorder]),
        max_batched_tokens=settings.max_batched_tokens,
        clock=clock,
    )


def _request(one: Arrival) -> Request:
    params = SamplingParams(max_tokens=len(one.answer), ignore_eos=True)
    return Request(one.id, Tokens(one.prompt), params)
