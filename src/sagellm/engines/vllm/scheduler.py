"""`SageScheduler`: our scheduling passes in vLLM's scheduler.

    vllm serve MODEL --scheduler-cls sagellm.engines.vllm.scheduler.SageScheduler \\
        --additional-config '{"sagellm": {"strategy": "fair"}}'

Before each step the passes order vLLM's waiting and running requests; vLLM then admits, chunks and preempts
as it does. A request says more of itself in `vllm_xargs` (`SamplingParams.extra_args`): `sage_tenant`,
`sage_class`, `sage_ttft_s`, `sage_tpot_s`. Making a `SageScheduler` gives a subclass of vLLM's
`AsyncScheduler` where asynchronous scheduling is on, else of its `Scheduler`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request as VllmRequest

from sagellm.core.errors import SageError
from sagellm.core.protocols.scheduler_ir import StepFacts
from sagellm.core.types import SLO, Namespace, Request, SamplingParams, Tokens
from sagellm.engines.guests.hosted_passes import HostedPasses
from sagellm.engines.guests.settings import SchedulingSettings

logger = logging.getLogger("vllm.sagellm")  # below "vllm": vLLM sets that logger up
SETTINGS = "sagellm"
"""The key of our settings in vLLM's `additional_config`."""


class VllmKV:
    """What vLLM's KV cache manager tells of its cache."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._manager = scheduler, scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self.block_size, self.num_blocks = scheduler.block_size, self._pool.num_gpu_blocks - 1

    def num_free(self) -> int:
        """Free blocks, cached ones included."""
        return int(self._pool.get_num_free_blocks())

    def num_cached(self, request_id: str) -> int:
        """Cached leading tokens, without a count in vLLM's statistics."""
        request = self._scheduler.requests[request_id]
        if not self._manager.enable_caching:
            return 0
        found = self._manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return int(found[1])

    def num_held(self, request_id: str) -> int:
        """Blocks of a running request, of its first KV cache group."""
        return len(self._manager.get_block_ids(request_id)[0])


class _Ordering:
    """What is added to a scheduler of vLLM."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._passes: HostedPasses | None = None
        self._began_s, self._facts = 0.0, (0, 0)
        given = self.vllm_config.additional_config  # type: ignore[attr-defined]
        settings = SchedulingSettings.of(dict(given.get(SETTINGS, {})))
        try:
            self._passes = self._made(settings)
        except AttributeError as error:
            logger.warning("sageLLM: vLLM schedules in its own order: %s", error)

    def _made(self, settings: SchedulingSettings) -> HostedPasses | None:
        scheduler: Any = self
        if type(scheduler.waiting) is not FCFSRequestQueue:
            logger.warning("sageLLM: vLLM schedules by its own priorities: leave out --scheduling-policy")
            return None
        return HostedPasses(
            settings.strategy,
            settings.options,
            VllmKV(scheduler),
            max_num_seqs=scheduler.max_num_running_reqs,
            max_batched_tokens=scheduler.max_num_scheduled_tokens,
        )

    def add_request(self, request: VllmRequest) -> None:
        """A new request, or more input of one that is known."""
        is_new = request.request_id not in self.requests  # type: ignore[attr-defined]
        super().add_request(request)  # type: ignore[misc]
        if is_new and self._passes is not None and request.prompt_token_ids:
            try:
                self._passes.enter(our_request(request))
            except (SageError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
                logger.warning("sageLLM: request %s keeps its place: %s", request.request_id, error)

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """One step of vLLM, in our order."""
        hidden = self._arrange()
        try:
            output = super().schedule(*arguments, **options)  # type: ignore[misc]
        finally:
            if hidden:
                self.waiting.extend(hidden)  # type: ignore[attr-defined]
        if self._passes is not None:
            counts = output.num_scheduled_tokens
            decodes = sum(count == 1 for count in counts.values())
            self._began_s = time.monotonic()
            self._facts = decodes, sum(counts.values()) - decodes
        return output

    def _arrange(self) -> list[VllmRequest]:
        """Order vLLM's requests; returns those that are taken out of its queue."""
        scheduler: Any = self
        if self._passes is None:
            return []
        waiting = {request.request_id: request for request in scheduler.waiting}
        running = {request.request_id: request for request in scheduler.running}
        try:
            order = self._passes.order(time.time(), list(waiting), list(running))
        except Exception as error:  # noqa: BLE001 - a pass may fail in any way; the server must go on
            logger.warning("sageLLM: vLLM schedules in its own order from now on: %r", error)
            self._passes = None
            return []
        hidden = [waiting[name] for name in order.deferred]
        if hidden and not running and not order.waiting:
            return []  # nothing else could run
        scheduler.waiting.clear()
        scheduler.waiting.extend(waiting[name] for name in order.waiting)
        scheduler.running[:] = [running[name] for name in order.running]
        return hidden

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Takes a step's tokens."""
        result = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        passes, requests = self._passes, self.requests  # type: ignore[attr-defined]
        if passes is not None:
            passes.stepped(StepFacts(time.monotonic() - self._began_s, *self._facts))
            for name in scheduler_output.num_scheduled_tokens:
                request = requests.get(name)
                if request is not None and name in passes.states:
                    passes.progressed(name, request.num_computed_tokens, request.num_tokens)
        return result

    def _free_request(self, request: VllmRequest, *arguments: Any, **options: Any) -> Any:
        """A request ends."""
        if self._passes is not None:
            whole = request.get_finished_reason() is not None and request.num_output_tokens > 0
            self._passes.ended(request.request_id, whole=whole and not _was_aborted(request))
        return super()._free_request(request, *arguments, **options)  # type: ignore[misc]


def _was_aborted(request: VllmRequest) -> bool:
    return "ABORT" in request.status.name


class _SyncScheduler(_Ordering, Scheduler):  # type: ignore[misc]
    pass


class _AsyncScheduler(_Ordering, AsyncScheduler):  # type: ignore[misc]
    pass


class SageScheduler(Scheduler):  # type: ignore[misc]
    """Makes a scheduler of vLLM with our passes, asynchronous where vLLM's configuration says so."""

    def __new__(cls, vllm_config: Any, *arguments: Any, **options: Any) -> Any:
        kind = _AsyncScheduler if vllm_config.scheduler_config.async_scheduling else _SyncScheduler
        return kind(vllm_config, *arguments, **options)


def our_request(request: VllmRequest) -> Request:
    """A request of vLLM as one of ours. Raises `RequestError` for goals or names that make no sense."""
    params = request.sampling_params
    extra: Mapping[str, Any] = (params.extra_args if params is not None else None) or {}
    limit = params.max_tokens if params is not None else 1
    return Request(
        request.request_id,
        Tokens(request.prompt_token_ids),
        SamplingParams(max_tokens=limit),
        arrival_s=request.arrival_time,
        priority=-request.priority,
        namespace=Namespace(tenant=str(extra.get("sage_tenant", "")), adapter=request.cache_salt or ""),
        slo=SLO(extra.get("sage_ttft_s"), extra.get("sage_tpot_s")),
        service_class=str(extra.get("sage_class", "")),
    )
