"""SGLang's real scheduler on a CPU, without a model: `Driver` plans steps and makes up their tokens.

Admission, retraction, aborts, the prefix cache and the allocator are SGLang's. Only the forward pass and what
follows it (streams, metrics, processes) are replaced.
"""

from __future__ import annotations

import types
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from benchmarks.hosts.sglang import prefix_cache
from sagellm.core.clock import ManualClock
from sagellm.engines.sglang.hooks import VARIABLE, SchedulingHooks, register_scheduling

OFF = (
    "enable_hisparse", "enable_lora", "enable_hicache_storage", "enable_lmcache", "enable_hierarchical_cache",
    "enable_priority_preemption", "enable_unified_cache_external_linker", "require_mlp_sync",
    "is_mixed_chunk", "is_hybrid_swa", "is_hybrid_ssm", "enable_fpm", "abort_on_priority_when_disabled",
)  # fmt: skip
NOT_THERE = (
    "dllm_config", "last_batch", "chunked_req", "_pending_chunked_abort_req", "min_free_slots_delayer",
    "dynamic_chunk_sizer", "prefill_delayer", "mm_receiver", "hisparse_coordinator", "decode_offload_manager",
    "max_queued_requests", "lora_drainer", "truncation_align_size", "scheduler_stage_metrics",
)  # fmt: skip


@contextmanager
def hooked(setting: str | None, clock: ManualClock) -> Iterator[SchedulingHooks | None]:
    """SGLang's classes with our hooks, as its plug-in system applies them; afterwards as they were."""
    before = [(owner, dict(vars(owner))) for owner in (Scheduler, SchedulePolicy, ScheduleBatch)]
    HookRegistry.reset()
    try:
        hooks = register_scheduling({VARIABLE: setting} if setting else {}, clock)
        HookRegistry.apply_hooks()
        yield hooks
    finally:
        HookRegistry.reset()
        for owner, members in before:
            for name, value in members.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)


class Results:
    """What follows a forward pass: one more token for each request; some end with it."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def process_batch_result_prefill(self, batch: Any, result: Any) -> None:
        for req in batch.reqs:
            if req.finished() or req.is_retracted:
                continue
            if req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
            elif not self._appended(req):
                checkpoint_kv_cache(req, self._cache)

    def process_batch_result_decode(self, batch: Any, result: Any) -> None:
        for req in batch.reqs:
            if not req.finished() and not req.is_retracted:
                self._appended(req)

    def _appended(self, req: Any) -> bool:
        req.output_ids.append(500 + len(req.output_ids))
        req.update_finish_state(1)
        if req.finished():
            release_kv_cache(req, self._cache, checkpoint=True)
        return bool(req.finished())


class Driver:
    """A scheduler with `num_tokens` slots of KV. Make it within `hooked`. `clock` gives requests their times.

    `overlap`: results of a step are processed after the next one is planned, as SGLang does by default.
    """

    def __init__(
        self,
        clock: ManualClock,
        num_tokens: int = 400,
        *,
        max_running: int = 8,
        chunk: int | None = None,
        overlap: bool = False,
        **options: Any,
    ) -> None:
        self.clock, self.overlap = clock, overlap
        cache = prefix_cache(num_tokens, "python", max_context=512)
        arguments = ServerArgs(
            model_path="dummy", page_size=1, attention_backend="torch_native",
            pp_max_micro_batch_size=max_running, schedule_conservativeness=0.1, **options,
        )  # fmt: skip
        set_global_server_args_for_scheduler(arguments)
        self.scheduler: Any = Scheduler.__new__(Scheduler)
        self._fill(cache, arguments, max_running, chunk)
        self.set_up(self.scheduler)
        self.scheduler.init_schedule_policy()
        self.scheduler.enable_priority_preemption = False
        self.reqs: dict[str, Any] = {}
        self.admitted: list[str] = []
        self.retracted: list[str] = []

    def set_up(self, scheduler: Any) -> None:
        """For tests: the scheduler before it makes its policy."""

    def _fill(self, cache: Any, arguments: Any, max_running: int, chunk: int | None) -> None:
        """What `Scheduler.__init__` sets beside models, processes and metrics."""
        scheduler = self.scheduler
        for name in OFF:
            setattr(scheduler, name, False)
        for name in NOT_THERE:
            setattr(scheduler, name, None)
        scheduler.tree_cache, scheduler.token_to_kv_pool_allocator = cache, cache.token_to_kv_pool_allocator
        scheduler.req_to_token_pool = cache.req_to_token_pool
        scheduler.page_size, scheduler.max_running_requests = 1, max_running
        scheduler.chunked_prefill_size, scheduler.max_prefill_tokens = chunk, 16384
        scheduler.schedule_policy = arguments.schedule_policy
        scheduler.enable_priority_scheduling = arguments.enable_priority_scheduling
        scheduler.schedule_low_priority_values_first = arguments.schedule_low_priority_values_first
        scheduler.priority_scheduling_preemption_threshold = 10
        scheduler.disaggregation_mode = DisaggregationMode.NULL
        scheduler.waiting_queue, scheduler.result_queue = [], deque()
        scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        scheduler.processed_tokens_counter = scheduler.forward_ct = 0
        scheduler.prefill_decode_interval = scheduler._prefill_decode_interval_remaining = 0
        scheduler.enable_overlap = scheduler.enable_skip_finishing_decode = self.overlap
        scheduler.enable_continuous_input_polling = False
        scheduler.device, scheduler.spec_algorithm = "cpu", SpeculativeAlgorithm.NONE
        scheduler.model_config = types.SimpleNamespace(
            vocab_size=1000, is_encoder_decoder=False, is_multimodal=False
        )
        for name in (
            "metrics_reporter", "metrics_collector", "load_inquirer", "load_publisher", "send_abort_output",
            "publish_load_snapshot", "_record_step_counters", "_maybe_clear_mm_inputs",
            "maybe_send_health_check_signal", "on_idle",
        ):  # fmt: skip
            setattr(scheduler, name, mock.MagicMock(name=name))
        scheduler.tp_worker = types.SimpleNamespace(
            model_runner=types.SimpleNamespace(attn_backend=None, prefill_aware_swa=False)
        )
        scheduler.grammar_manager = mock.MagicMock(has_waiting_grammars=lambda: False)
        scheduler.beam_coordinator = mock.MagicMock(pending_member_rows=lambda batch: 0)
        scheduler.dp_attn_adapter = types.SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, **options: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        )
        scheduler.ngram_embedding_manager = types.SimpleNamespace(
            prepare_for_forward=lambda batch, **options: batch
        )
        scheduler.batch_result_processor = Results(cache)

    # -- requests

    def add(
        self,
        name: str,
        prompt: list[int],
        num_tokens: int = 4,
        *,
        priority: int | None = None,
        **custom: Any,
    ) -> Any:
        """A request enters the queue. `custom`: its `custom_params`."""
        params = SamplingParams(max_new_tokens=num_tokens, custom_params=custom or None)
        params.normalize(None)
        req = Req(name, "", array("q", prompt), params, priority=priority, vocab_size=1000)
        req.time_stats.created_time = self.clock.now()
        self.reqs[name] = req
        self.scheduler._add_request_to_queue(req)
        return req

    def abort(self, name: str) -> None:
        if any(req.rid == name for req in self.scheduler.waiting_queue):
            del self.reqs[name]
        self.scheduler.abort_request(AbortReq(rid=name))

    # -- steps

    def step(self) -> Any:
        """One turn of SGLang's event loop; returns the batch that it computes, or None."""
        scheduler = self.scheduler
        known = {name for name, req in self.reqs.items() if req.kv.holds_kv}
        counts = {name: req.retraction_count for name, req in self.reqs.items()}
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        self.retracted += [name for name, req in self.reqs.items() if req.retraction_count > counts[name]]
        if batch is not None:
            self.admitted += [req.rid for req in batch.reqs if req.rid not in known]
            scheduler.result_queue.append((batch.copy(), None))
        self.clock.advance(0.01)
        if len(scheduler.result_queue) > int(self.overlap and batch is not None):
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
        scheduler.last_batch = batch
        self.reqs = {name: req for name, req in self.reqs.items() if not req.finished()}
        return batch

    @property
    def is_idle(self) -> bool:
        scheduler = self.scheduler
        busy = scheduler.waiting_queue or scheduler.running_batch.reqs or scheduler.result_queue
        return not busy and scheduler.chunked_req is None

    def run(self, num_steps: int = 1000) -> None:
        """Until every request has ended, and one idle turn."""
        for _ in range(num_steps):
            is_idle = self.is_idle
            if self.step() is None and is_idle:
                return
        raise AssertionError(f"{len(self.scheduler.waiting_queue)} requests still wait")
