"""Hooks of SGLang's plug-in system through which our passes order its requests.

    SAGELLM_SCHEDULING='{"strategy": "fair", "options": {}}' sglang serve --model-path MODEL

SGLang calls its plug-ins in every process; hooks are registered only in those that have loaded its
scheduler. If this SGLang lacks a name, a setting is invalid or a pass fails, SGLang keeps its own order, and
the log has one warning.
"""

from __future__ import annotations

import json
import logging
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang.srt.observability.req_time_stats import monotonic_time
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.engines.guests.settings import SchedulingSettings

logger = logging.getLogger("sagellm.sglang")
VARIABLE = "SAGELLM_SCHEDULING"
EXAMPLE = '{"strategy": "fair", "options": {}}'
SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
SCHEDULER = f"{SCHEDULER_MODULE}.Scheduler"
CALC_PRIORITY = "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority"
RETRACTION_ORDER = "sglang.srt.managers.schedule_batch.ScheduleBatch._get_decode_retraction_order"
SCHEDULER_NAMES = (
    "max_running_requests", "chunked_prefill_size", "max_prefill_tokens", "page_size", "waiting_queue",
    "result_queue", "chunked_req", "tree_cache", "token_to_kv_pool_allocator", "dllm_config",
    "schedule_low_priority_values_first", "is_hybrid_swa", "is_hybrid_ssm", "policy",
)  # fmt: skip
"""Attributes of SGLang's scheduler that `RequestOrder` or `refusal_of` read."""


class SGLangClock:
    """SGLang's monotonic clock, from which it takes the times of requests."""

    def now(self) -> float:
        return float(monotonic_time())


def scheduling_of(environment: Mapping[str, str]) -> SchedulingSettings | None:
    """The settings in `SAGELLM_SCHEDULING`; None if it is not set.

    Raises `SageError` for an invalid setting.
    """
    text = environment.get(VARIABLE)
    if not text:
        return None
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}={text!r} is not JSON: {error}; use for example {EXAMPLE}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{VARIABLE}={text!r} is not a mapping; use for example {EXAMPLE}")
    return SchedulingSettings.of(given)


def register_scheduling(environment: Mapping[str, str], clock: Clock | None = None) -> SchedulingHooks | None:
    """Register hooks as the environment says; returns None if nothing was registered.

    Raises `SageError` for an invalid setting, `ImportError` or `AttributeError` if this SGLang lacks a name;
    then no hook is registered.
    """
    settings = scheduling_of(environment)
    if settings is None or SCHEDULER_MODULE not in sys.modules:
        return None
    hooks = SchedulingHooks(settings, clock or SGLangClock())
    targets = hooks.targets()
    for target, _, _ in targets:
        pkgutil.resolve_name(target)
    for target, hook, kind in targets:
        HookRegistry.register(target, hook, kind)
    return hooks


class SchedulingHooks:
    """The hooks of one process, and the order of its scheduler's requests.

    `order` is None before the scheduler is made, if it is refused (`refusal_of`), and after a failure.
    """

    def __init__(self, settings: SchedulingSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self.order: Any = None

    def targets(self) -> list[tuple[str, Callable[..., Any], HookType]]:
        """Dotted names in SGLang, each with its hook."""
        return [
            (f"{SCHEDULER}.init_schedule_policy", self.after_init_policy, HookType.AFTER),
            (f"{SCHEDULER}.get_next_batch_to_run", self.after_planning, HookType.AFTER),
            (f"{SCHEDULER}.process_batch_result", self.after_result, HookType.AFTER),
            (f"{SCHEDULER}._get_new_batch_prefill_raw", self.around_admission, HookType.AROUND),
            (CALC_PRIORITY, self.around_calc_priority, HookType.AROUND),
            (RETRACTION_ORDER, self.around_retraction_order, HookType.AROUND),
        ]

    # -- hooks; AFTER hooks return None to keep SGLang's result

    def after_init_policy(self, result: Any, scheduler: Any) -> None:
        """A scheduler has been made: order its requests, unless `refusal_of` has a reason."""
        self.order = None
        try:
            refusal = refusal_of(scheduler)
            if refusal:
                logger.warning("sageLLM: SGLang schedules in its own order: %s", refusal)
                return
            from sagellm.engines.sglang.order import RequestOrder

            self.order = RequestOrder(scheduler, self._settings, self._clock)
        except Exception as error:  # noqa: BLE001 - whatever has changed in SGLang, it must start
            logger.warning("sageLLM: SGLang schedules in its own order: %r", error)
            return
        logger.info("sageLLM: strategy %s orders SGLang's requests", self._settings.strategy)

    def around_admission(
        self, original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any
    ) -> Any:
        """SGLang admits requests in our order; then its own order is restored."""
        order = self.order if self._is_of(scheduler) else None
        if order is None:
            return original(scheduler, *args, **options)
        order.begin_admission()
        try:
            return original(scheduler, *args, **options)
        finally:
            order.end_admission()

    def around_calc_priority(
        self,
        original: Callable[..., Any],
        policy: Any,
        waiting_queue: list[Any],
        running_batch: Any = None,
        *args: Any,
        **options: Any,
    ) -> None:
        """SGLang's policy orders the queue, then the passes do."""
        original(policy, waiting_queue, running_batch, *args, **options)
        if self.order is not None and self.order.scheduler.policy is policy:
            running = () if running_batch is None else running_batch.reqs
            self._try(self.order.arrange, waiting_queue, running)

    def around_retraction_order(self, original: Callable[..., Any], reqs: Sequence[Any]) -> list[int]:
        """Indices of running requests; SGLang retracts the last first."""
        own: list[int] = original(reqs)
        if self.order is None:
            return own
        ours = self._try(self.order.retraction_order, own, reqs)
        return own if ours is None else list(ours)

    def after_planning(self, plan: Any, scheduler: Any, *args: Any, **options: Any) -> None:
        """SGLang has planned a step."""
        if self._is_of(scheduler):
            self._try(lambda: self.order.planned(plan.running_batch.reqs, plan.batch_to_run))

    def after_result(self, result: Any, scheduler: Any, *args: Any, **options: Any) -> None:
        """SGLang has computed a step."""
        if self._is_of(scheduler):
            self._try(self.order.processed)

    # -- inside

    def _is_of(self, scheduler: Any) -> bool:
        return self.order is not None and self.order.scheduler is scheduler

    def _try(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The call's result. An error gives SGLang its own order back, for good; then None."""
        try:
            return call(*arguments)
        except Exception as error:
            logger.debug("sageLLM: ordering failed", exc_info=True)
            logger.warning("sageLLM: SGLang schedules in its own order from now on: %r", error)
            self.order = None
            return None


def refusal_of(scheduler: Any) -> str:
    """Why the requests of this scheduler are not ordered; empty if they can be."""
    from sglang.srt.runtime_context import get_disagg, get_parallel

    missing = [name for name in SCHEDULER_NAMES if not hasattr(scheduler, name)]
    if missing:
        return f"the scheduler of this SGLang has no {', '.join(missing)}"
    parallel = get_parallel()
    sizes = {name: getattr(parallel, name) for name in ("tp_size", "pp_size", "attn_cp_size")}
    several = [f"{name} is {size}" for name, size in sizes.items() if size > 1]
    if several:
        return f"all ranks must order alike, and our passes look at the clock of each: {', '.join(several)}"
    mode = get_disagg().disaggregation_mode
    if mode not in (None, "null"):
        return f"the disaggregation mode {mode!r} has queues of its own; leave --disaggregation-mode out"
    if scheduler.is_hybrid_swa or scheduler.is_hybrid_ssm:
        return "models with sliding windows or recurrent states have memory that our passes do not count"
    return "" if scheduler.dllm_config is None else "diffusion models have queues of their own"
