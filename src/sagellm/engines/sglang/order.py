"""`RequestOrder`: our scheduling passes over the requests of SGLang's scheduler.

Before SGLang admits requests, its own policy orders its waiting queue, and the passes reorder the result;
after that the queue is in SGLang's order again. Where KV memory is short, the passes also say which running
request is retracted first. Admission, chunks and memory stay SGLang's.

A request states its tenant, class and latency goals in `custom_params`: `sage_tenant`, `sage_class`,
`sage_ttft_s`, `sage_tpot_s`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.common import match_kv_cache

from sagellm.core.blocks import cdiv
from sagellm.core.clock import Clock
from sagellm.core.errors import SageError
from sagellm.core.plan import RequestState
from sagellm.core.protocols.scheduler_ir import StepFacts
from sagellm.core.types import SLO, Namespace, Request, RequestStatus, SamplingParams, Tokens
from sagellm.engines.guests.hosted_passes import HostedPasses, HostOrder
from sagellm.engines.guests.settings import SchedulingSettings
from sagellm.kvmgr.scheduler_ir.passes.memory_aware_preemption import VICTIMS
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass

logger = logging.getLogger("sagellm.sglang")
Scheduler = Any
"""SGLang's `Scheduler`."""
Req = Any
"""SGLang's `Req`."""
MAX_VICTIMS = 64
"""Victims that a rule names at a time: SGLang retracts a few, and each takes a pass over all others."""
MAX_PRIORITY = 1 << 31
"""Clients may send any integer; the passes compute with floats."""
MAX_IN_FLIGHT = 8
"""Planned steps without a result that are remembered; SGLang has at most two."""


class SGLangKV:
    """`HostKV` of SGLang's allocator and prefix cache. `requests`: the known ones, by id."""

    def __init__(self, scheduler: Scheduler, requests: Mapping[str, Req]) -> None:
        self._cache, self._allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        self._requests = requests
        self.block_size: int = scheduler.page_size
        self.num_blocks: int = self._allocator.size // self.block_size

    def num_free(self) -> int:
        """Free pages, and cached ones that no request uses."""
        return int(self._allocator.available_size() + self._cache.evictable_size()) // self.block_size

    def num_cached(self, request_id: str) -> int:
        """Cached leading tokens of a waiting request, by the look-up of SGLang's policy `lpm`."""
        req = self._requests[request_id]
        if self._cache.disable or req.kv.holds_kv:
            return 0
        match_kv_cache(req, self._cache)
        return max(0, min(int(req.num_matched_prefix_tokens), _num_tokens(req) - 1))

    def num_held(self, request_id: str) -> int:
        """Pages of a running request."""
        return cdiv(self._requests[request_id].kv.kv_allocated_len, self.block_size)


class RequestOrder:
    """The order of one scheduler's requests.

    Every method may raise; its caller then uses SGLang's own order (see `SchedulingHooks`). The constructor
    raises `AttributeError` for a scheduler that lacks a name.
    """

    def __init__(self, scheduler: Scheduler, settings: SchedulingSettings, clock: Clock) -> None:
        self.scheduler, self._clock = scheduler, clock
        self.requests: dict[str, Req] = {}
        self.passes = HostedPasses(
            settings.strategy,
            settings.options,
            SGLangKV(scheduler, self.requests),
            max_num_seqs=scheduler.max_running_requests,
            max_batched_tokens=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
        )
        self._prefers_low: bool = scheduler.schedule_low_priority_values_first
        self._running: list[str] = []
        self._is_admitting = False
        self._own_queue: list[Req] | None = None
        self._hidden: list[Req] = []
        self._steps: deque[tuple[float, int, int]] = deque(maxlen=MAX_IN_FLIGHT)
        self._stepped_s = 0.0

    @property
    def chooses_victims(self) -> bool:
        """Whether the strategy says which running request is retracted first."""
        by_priority = any(isinstance(each, PriorityBasedPass) for each in self.passes.passes)
        return by_priority or self.passes.victims != "last"

    # -- the waiting queue

    def begin_admission(self) -> None:
        """SGLang is about to admit requests; until `end_admission` some may be hidden from it."""
        self._is_admitting = True

    def arrange(self, queue: list[Req], running: Sequence[Req]) -> None:
        """Reorder the waiting queue in place, and remove the requests that the passes defer.

        Outside an admission, and if nothing else could run, deferred requests stay, at the end of the queue.
        """
        own = list(queue)
        order = self._ordered(own, self._with_chunked(running))
        requests = {req.rid: req for req in own}
        names = order.waiting + order.deferred
        if len(names) != len(own) or requests.keys() != set(names):
            raise ValueError(f"{len(own)} requests wait, and the passes order {len(set(names))} of them")
        if not self._is_admitting or not (order.waiting or order.running):
            queue[:] = [requests[name] for name in names]
            hidden = []
        else:
            queue[:] = [requests[name] for name in order.waiting]
            hidden = [requests[name] for name in order.deferred]
        if self._is_admitting:
            self._own_queue, self._hidden = own, hidden

    def end_admission(self) -> None:
        """Give the waiting queue SGLang's order back, without those that it has admitted."""
        own, self._own_queue = self._own_queue, None
        hidden, self._hidden, self._is_admitting = self._hidden, [], False
        if own is None:
            return
        queue = self.scheduler.waiting_queue
        waits, known = {*queue, *hidden}, set(own)
        self.scheduler.waiting_queue = [
            *(req for req in own if req in waits),
            *(req for req in queue if req not in known),
        ]

    # -- retraction

    def retraction_order(self, own: list[int], reqs: Sequence[Req]) -> list[int]:
        """Indices of a batch's requests; the last is retracted first. `own`: SGLang's order."""
        if not self.chooses_victims:
            return own
        order = self._ordered(self.scheduler.waiting_queue, self._with_chunked(reqs))
        indices = {req.rid: index for index, req in enumerate(reqs)}
        chosen = [indices[name] for name in self._victims_last(order.running) if name in indices]
        if sorted(chosen) != list(range(len(reqs))):
            raise ValueError(f"{len(reqs)} requests run, and the passes order {len(chosen)} of them")
        return chosen

    def _victims_last(self, running: list[str]) -> list[str]:
        """Running requests with the victims of the rule at the end.

        The first request is never a victim.
        """
        if self.passes.victims == "last":
            return running
        rule, states = VICTIMS[self.passes.victims], self.passes.states
        left = [states[name] for name in running]
        victims: list[RequestState] = []
        while len(left) > 1 and len(victims) < MAX_VICTIMS:
            lowest = min(state.request.priority for state in left[1:])
            rivals = [state for state in left[1:] if state.request.priority == lowest]
            victims.append(rule(rivals, self.passes.view.kv))
            left.remove(victims[-1])
        return [state.request_id for state in (*left, *reversed(victims))]

    # -- steps

    def planned(self, running: Sequence[Req], batch: Any) -> None:
        """SGLang has planned a step: `batch` (None: nothing to compute) beside the running requests."""
        num_present = len(self.scheduler.waiting_queue) + len(running)
        if batch is not None:
            self._note_step(batch)
            num_present += 0 if batch.reqs is running else len(batch.reqs)
        if num_present < len(self.requests):
            in_batch = () if batch is None else batch.reqs
            self._forget(self._present(self.scheduler.waiting_queue, self._with_chunked(running), in_batch))

    def processed(self) -> None:
        """SGLang has the result of the oldest step that it computes."""
        if not self._steps:
            return
        began_s, num_decodes, num_prefill_tokens = self._steps.popleft()
        now_s = self._clock.now()
        duration_s = now_s - max(began_s, self._stepped_s)  # with overlap, it began before the last one ended
        self._stepped_s = now_s
        self.passes.stepped(StepFacts(duration_s, num_decodes, num_prefill_tokens))

    def _note_step(self, batch: Any) -> None:
        now_s, mode = self._clock.now(), batch.forward_mode
        num_decodes, num_prefill_tokens = len(batch.reqs), 0
        if mode.is_extend():
            num_decodes = len(batch.decoding_reqs or ()) if mode.is_mixed() else 0
            num_prefill_tokens = batch.extend_num_tokens - num_decodes
            for req in batch.reqs:
                state = self.passes.states.get(req.rid)
                if state is not None and state.scheduled_s is None:
                    state.scheduled_s, state.num_cached = now_s, req.cached_tokens
        self._steps.append((now_s, num_decodes, num_prefill_tokens))

    # -- following requests

    def _ordered(self, waiting: Sequence[Req], running: Sequence[Req]) -> HostOrder:
        """The order by the passes. They get running requests in their last order, new ones at the end."""
        self._forget(self._present(waiting, running))
        for req in (*waiting, *running):
            if req.rid not in self.requests:
                self.requests[req.rid] = req
                self.passes.enter(self._our_request(req))
        for req in running:
            self._note_progress(req, req.kv.kv_committed_len)
        names = {req.rid: None for req in running}
        kept = {name: None for name in self._running if name in names}
        now_s = self._clock.now()
        order = self.passes.order(now_s, [req.rid for req in waiting], list(kept | names))
        self._running = order.running
        return order

    def _with_chunked(self, running: Sequence[Req]) -> list[Req]:
        """These and the request whose prompt is computed in parts."""
        chunked = self.scheduler.chunked_req
        return [*running, *([chunked] if chunked is not None and chunked not in running else ())]

    def _present(self, *groups: Sequence[Req]) -> dict[str, Req]:
        """Requests of these groups, and those whose last token is still being computed."""
        present = {
            req.rid: req
            for batch, _ in self.scheduler.result_queue
            for req in batch.reqs
            if not req.finished()
        }
        present.update((req.rid, req) for group in groups for req in group)
        return present

    def _forget(self, present: Mapping[str, Req]) -> None:
        """Requests that are not present have ended."""
        gone = [name for name, req in self.requests.items() if present.get(name) is not req]
        for name in gone:
            req = self.requests[name]
            whole = req.finished() and not isinstance(req.finished_reason, FINISH_ABORT)
            self._note_progress(req, _num_tokens(req))
            self.passes.ended(name, whole=whole)
            del self.requests[name]
        if gone:
            self._running = [name for name in self._running if name in self.requests]

    def _note_progress(self, req: Req, num_computed: int) -> None:
        num_tokens = _num_tokens(req)
        self.passes.progressed(req.rid, min(num_computed, num_tokens), num_tokens)

    def _our_request(self, req: Req) -> Request:
        try:
            return our_request(req, self._clock.now(), prefers_low=self._prefers_low)
        except (SageError, TypeError, ValueError, RecursionError) as error:
            logger.warning("sageLLM: the custom_params of request %s are left out: %s", req.rid, error)
            return our_request(req, self._clock.now(), prefers_low=self._prefers_low, custom={})

    def check(self) -> None:
        """Raise `AssertionError` where the states are not those of the known requests."""
        assert self.requests.keys() == self.passes.states.keys()
        assert set(self._running) <= self.requests.keys()
        running = {n for n, state in self.passes.states.items() if state.status is RequestStatus.RUNNING}
        assert running <= set(self._running)
        assert not self._hidden
        assert self._own_queue is None


def _num_tokens(req: Req) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)


def our_request(
    req: Req, now_s: float, *, prefers_low: bool, custom: Mapping[str, Any] | None = None
) -> Request:
    """A request of SGLang as one of ours.

    `prefers_low`: lower values of `priority` are served first. `custom`: in place of the request's own
    `custom_params`. Raises `SageError`, `TypeError` or `ValueError` for invalid `custom_params`.
    """
    params, times = req.sampling_params, req.time_stats
    priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, req.priority or 0))
    given = custom if custom is not None else params.custom_params or {}
    if not isinstance(given, Mapping):
        raise TypeError(f"custom_params must be an object, got {type(given).__name__}")
    ids = np.asarray(req.origin_input_ids, dtype=np.int64).astype(np.int32)  # truncates ids of images
    return Request(
        req.rid,
        Tokens.frombytes(ids.tobytes()) if len(ids) else Tokens([0]),
        SamplingParams(max_tokens=params.max_new_tokens),
        arrival_s=times.created_time or times.wait_queue_entry_time or now_s,
        priority=-priority if prefers_low else priority,
        namespace=Namespace(tenant=str(given.get("sage_tenant", "")), adapter=req.extra_key or ""),
        slo=SLO(given.get("sage_ttft_s"), given.get("sage_tpot_s")),
        service_class=str(given.get("sage_class", "")),
    )
