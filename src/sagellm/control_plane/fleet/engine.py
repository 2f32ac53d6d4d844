"""`FleetEngine`: an `EngineCore` that computes nothing. It places requests on instances and takes in tokens.

So all that stands on an engine, the server above all, stands on a fleet. One thread owns it; `wake` is for
any. A step takes in what instances have said, places what waits, and returns new tokens.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sagellm.control_plane.admission import AdmissionController, Delay, Reject
from sagellm.control_plane.fleet.facts import mismatch
from sagellm.control_plane.fleet.known_instances import KnownInstances
from sagellm.control_plane.fleet.members import Member
from sagellm.control_plane.fleet.replicas import PrefixCopies
from sagellm.control_plane.fleet.roles import RoleSwitches
from sagellm.control_plane.fleet.served import (
    FleetPolicy,
    FleetRequest,
    ServedRequests,
    failed_output,
    observe_end,
    possible,
)
from sagellm.control_plane.kv_events import Gap
from sagellm.control_plane.queues import PhaseQueue, QueuedRequest, QueuePhase
from sagellm.control_plane.quota_waits import OVERLOADED
from sagellm.control_plane.replication import Replicator
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.clock import Clock
from sagellm.core.errors import (
    BookkeepingError,
    CapacityError,
    ConfigError,
    EngineFailedError,
    RequestError,
)
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats, TenantUse
from sagellm.core.protocols.fleet import (
    CallResult,
    Connected,
    DrainChanged,
    EngineClient,
    EngineClients,
    FailurePolicy,
    HandOver,
    HandOverPart,
    HandOverReport,
    HandOverState,
    InstanceEvent,
    InstanceFacts,
    InstanceLost,
    KVChanges,
    RequestRefused,
)
from sagellm.core.protocols.router import (
    NOT_CACHED,
    CachedPrefix,
    ExecutionInstance,
    InstanceType,
    Placement,
    RequestMetadata,
    Router,
)
from sagellm.core.seeds import request_seed
from sagellm.core.types import (
    CapabilityDescriptor,
    FinishReason,
    Namespace,
    Request,
    RequestOutput,
    Tokens,
)

log = logging.getLogger("sagellm.fleet")
UNAVAILABLE = 503  # HTTP's status
TICK_S = 0.1
"""A step waits at most so long."""
MAX_WAITING = 1 << 20
"""The admission bounds what is taken; requests of lost instances always find a place."""


class FleetEngine(KnownInstances):
    """Implements `EngineCore` over instances. What it knows of them and asks them is of `KnownInstances`.

    `check` raises `RequestError` for a request that no instance can compute; it is given the capability and
    the longest context. `namespace_of`: under which namespace instances keep a request's blocks.
    `on_serving` is told the name of an instance that has connected and gets requests from then on.

    No request is lost: where an instance goes, its requests go on elsewhere behind the tokens that were
    handed out, or end with an error that says why.
    """

    def __init__(
        self,
        clients: EngineClients,
        router: Router,
        prefixes: PrefixIndex,
        check: Callable[[Request, CapabilityDescriptor, int], None],
        *,
        clock: Clock,
        admission: AdmissionController | None = None,
        policy: FleetPolicy | None = None,
        namespace_of: Callable[[Namespace], Namespace] = lambda namespace: namespace,
        replicator: Replicator | None = None,
        on_serving: Callable[[str], None] = lambda name: None,
    ) -> None:
        super().__init__(prefixes, namespace_of, clock, turn=self._turn, call_soon=self.call_soon)
        self._clients, self._router = clients, router
        self._check, self.policy = check, policy or FleetPolicy()
        self._on_serving = on_serving
        self._admission = admission or AdmissionController(clock=clock)
        self.prefill_queue = PhaseQueue(QueuePhase.PREFILL, self._order, max_waiting=MAX_WAITING, clock=clock)
        self.decode_queue = PhaseQueue(QueuePhase.DECODE, self._order, max_waiting=MAX_WAITING, clock=clock)
        self.requests = ServedRequests()
        self.roles = RoleSwitches(
            clock, self.requests, lambda served, reason: self._retry(served, reason, counts=False)
        )
        self._outputs: list[RequestOutput] = []
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._next_tick_s = self._available_s = clock.now()
        self._num_steps = 0
        self._closed, self._origin = False, secrets.token_hex(4)
        self.copies = PrefixCopies(replicator, self._origin, namespace_of)
        self.num_retries = 0
        self.num_prompt_tokens = self.num_with_slo = self.num_slo_met = 0
        """Of requests that came; of those that ended with a goal, and that met it."""
        self.placements: dict[str, int] = {}
        """How many requests each instance was given."""

    # -- requests in and out

    @property
    def clock(self) -> Clock:
        return self._clock

    def add(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in use: send another", "request_id")
        self._check(request, self.capability(), self.max_model_len)
        now_s, seed = self._clock.now(), request_seed(self.policy.seed, request.request_id)
        served = FleetRequest(request, self._origin, seed, queued_since_s=now_s)
        may_start = self._admission.enter(served.metadata(now_s), len(self.prefill_queue))
        self.requests.add(served)
        self.num_prompt_tokens += len(request.tokens)
        if may_start:
            self._wait(served)
            self._place_waiting()

    def abort(self, request_id: str) -> bool:
        served = self.requests.get(request_id)
        if served is None:
            return False
        self._end(served)
        self._outputs = [output for output in self._outputs if output.request_id != request_id]
        return True

    def step(self) -> Sequence[RequestOutput]:
        self._questions.thread_id = threading.get_ident()
        self._turn(0.0 if self._outputs else TICK_S)
        outputs, self._outputs = self._outputs, []
        self._num_steps += bool(outputs)
        return outputs

    def wake(self) -> None:
        self._clients.wake()

    def call_soon(self, task: Callable[[], None]) -> None:
        """Have the thread that steps call this before its next turn. For any thread."""
        self._tasks.put(task)
        self.wake()

    def has_work(self) -> bool:
        is_asked = self._questions.is_open or not self._tasks.empty()
        return bool(len(self.requests) or self._outputs or is_asked) or self._clock.now() >= self._next_tick_s

    def is_idle(self, tokens: Tokens, namespace: Namespace) -> bool:
        """Whether an instance that has most of a prompt has no request. Of equal ones any counts.

        Never with quotas: what no client has asked for is not to use them up.
        """
        idle = [member for name, member in self.members.items() if self._has_no_request(name, member)]
        if not idle or self.tenants():
            return False
        return any(member in idle for member in self._with_most_cached(tokens, namespace))

    def _has_no_request(self, instance_id: str, member: Member) -> bool:
        is_free = member.load is not None and not member.load.num_requests
        return is_free and self._takes_requests(member) and not self.requests.num_on(instance_id)

    def idle_s(self) -> float | None:
        return max(0.0, self._next_tick_s - self._clock.now())

    def end_ranks(self, grace_s: float) -> bool:
        """An instance ends its own ranks."""
        return False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for served in self.requests.all():
                self._end(served)
            while not self._tasks.empty():
                self._tasks.get()()
            self._questions.close()
            self._clients.close()

    # -- the fleet

    def know(self, client: EngineClient) -> None:
        """Place requests on this instance too, once it is connected. One of its name is forgotten."""
        if client.instance_id in self.members:
            self.forget(client.instance_id)
        self.members[client.instance_id] = Member(client)

    def forget(self, instance_id: str) -> None:
        """It does not belong to the fleet any more. What it computes goes on elsewhere."""
        self.move_away(instance_id)
        self._questions.forget(instance_id)
        self.roles.forget(instance_id)
        self._lost(self.members.pop(instance_id), instance_id, "it was taken out of the fleet")

    def drain(self, instance_id: str, *, draining: bool = True) -> None:
        """Give it no new requests, or again. Raises `ConfigError` for an unknown one."""
        member = self._member(instance_id)
        member.draining = draining
        member.client.drain(draining=draining)

    def switch(self, instance_id: str, kind: InstanceType, drain_timeout_s: float = 60.0) -> None:
        """Change an instance's type; `roles.is_changing` until it is done. Raises as `RoleSwitches.begin`."""
        self.roles.begin(self._member(instance_id), kind, drain_timeout_s)

    def _member(self, instance_id: str) -> Member:
        if instance_id not in self.members:
            known = ", ".join(sorted(self.members)) or "none"
            raise ConfigError(f"no instance is named {instance_id!r}: there are {known}")
        return self.members[instance_id]

    def move_away(self, instance_id: str) -> None:
        """Have what it computes go on elsewhere."""
        for served in self.requests.on(instance_id):
            self._retry(served, f"{instance_id} is drained", counts=False)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until all instances are connected and have reported.

        Raises `EngineFailedError` where they have not within this time.
        """
        until_s = self._clock.now() + timeout_s
        while missing := self.missing:
            if self._clock.now() >= until_s:
                raise EngineFailedError(f"not there within {timeout_s:g} s: {', '.join(missing)}")
            self._turn(TICK_S)

    # -- one turn

    def _turn(self, wait_s: float) -> None:
        while not self._tasks.empty():
            self._tasks.get()()
        for client in self._clients.wait(wait_s):
            member = self.members.get(client.instance_id)
            for event in client.poll():
                if member is not None and member.client is client:
                    self._take(member, client.instance_id, event)
        now_s = self._clock.now()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self._end_impatient(now_s)
            self._questions.expire()
            self.roles.poll(self.members)
            self.copies.turn(self.members)
        self._ask_for_figures(now_s)
        if self.requests.waiting:
            self._place_waiting()

    def _take(self, member: Member, instance_id: str, event: InstanceEvent) -> None:
        match event:
            case RequestOutput():
                self._on_output(instance_id, event)
            case ExecutionInstance():
                self.roles.reported(member, event)
                is_fresh = event.is_fresh and self._prefixes.is_fresh(instance_id)
                member.load = self.requests.as_seen(event, self._clock.now(), is_fresh=is_fresh)
            case KVChanges(changes, is_complete):
                for change in changes:
                    self._prefixes.apply(instance_id, change)
                if not is_complete:
                    self._prefixes.apply(instance_id, Gap(0, 0))
            case HandOverReport():
                self._on_report(member, event)
            case RequestRefused():
                self._on_refused(event)
            case Connected(facts):
                self._on_connected(member, facts)
            case InstanceLost(reason):
                self._lost(member, instance_id, reason)
            case DrainChanged(draining):
                member.draining = draining
            case CallResult():
                self._questions.take(instance_id, event)

    def _on_refused(self, event: RequestRefused) -> None:
        served = self.requests.of_attempt(event.request_id)
        if served is not None and event.again:
            self._retry(served, str(event.error))
        elif served is not None:
            self._fail(served, str(event.error), getattr(event.error, "status", 500))

    def _on_output(self, instance_id: str, output: RequestOutput) -> None:
        served = self.requests.of_attempt(output.request_id)
        if served is None:
            return
        now_s = self._clock.now()
        served.generated += output.new_token_ids
        if served.first_token_s is None and output.new_token_ids:
            served.first_token_s, served.first_instance = now_s, instance_id
            self._admission.strategy.observe(now_s - served.request.arrival_s, served.request.slo.ttft_s)
        moves = output.finish_reason is FinishReason.MOVED
        reason = None if moves else output.finish_reason
        self._outputs.append(output._replace(request_id=served.request_id, finish_reason=reason))
        if moves:
            self._hand_over(served)
        elif reason is not None:
            observe_end(self._router, instance_id, served, now_s)
            self._forget_request(served)

    def _hand_over(self, served: FleetRequest) -> None:
        """The prefill instance has drawn the first token; the decode instance goes on."""
        assert served.placement is not None
        prefill, decode = served.placement.prefill, served.placement.decode
        self.requests.leave_prefill(served)
        self._submit(decode, served, self._part(HandOverPart.DECODE, prefill))

    def _on_report(self, member: Member, report: HandOverReport) -> None:
        """Where the prefill instance cannot send, the other one need not wait for it."""
        member.last_report = report
        served = self.requests.of_attempt(report.request_id)
        has_failed = report.part is HandOverPart.PREFILL and report.state is HandOverState.FAILED
        if served is not None and served.placement is not None and has_failed:
            decode = self.members[served.placement.decode]
            decode.client.call("fail", (served.attempt_id, 0, report.reason))

    def _on_connected(self, member: Member, facts: InstanceFacts) -> None:
        member.facts, member.fault = facts, mismatch(facts, self._facts())
        if member.draining is None:  # a front before may have drained it
            member.draining = facts.draining
        elif member.draining is not facts.draining:
            member.client.drain(draining=member.draining)
        if member.fault:
            log.error("%s gets no requests: %s", facts.instance_id, member.fault)
            return
        self._on_serving(facts.instance_id)
        self._counters.begin(facts.instance_id, facts.start_id)
        self.roles.connected(member, facts)
        self._prefixes.leave(facts.instance_id)
        self._prefixes.join(facts.instance_id)
        for other in self._ready():
            if other is not member and other.facts is not None:
                other.client.add_peer(facts)
                member.client.add_peer(other.facts)

    def _lost(self, member: Member, instance_id: str, reason: str) -> None:
        member.facts = member.load = member.stats = member.diagnostics = None
        member.num_lost += 1
        self._prefixes.leave(instance_id)
        self.copies.lost(instance_id)
        for other in self._ready():
            other.client.lose_peer(instance_id)
        for served in self.requests.on(instance_id):
            self._retry(served, f"{instance_id} was lost ({reason})")

    def _retry(self, served: FleetRequest, reason: str, *, counts: bool = True) -> None:
        """Have a request begin anew elsewhere. Without `counts`, since an operator wants it."""
        if counts and served.num_retries >= self.policy.max_retries:
            last = f"{reason}; it was the attempt number {served.attempt + 1}, and the last"
            self._fail(served, last, UNAVAILABLE)
            return
        self._abort_attempt(served)
        self.num_retries += counts
        served.num_retries += counts
        self.requests.retry(served, self._clock.now(), reason)
        self._wait(served)

    def _end(self, served: FleetRequest) -> None:
        self._abort_attempt(served)
        self._forget_request(served)

    def _forget_request(self, served: FleetRequest) -> None:
        self.requests.end(served.request_id)
        num_tokens = len(served.request.tokens) + len(served.generated)
        self._admission.quotas.leave(served.request_id, num_tokens)
        for each in (self.prefill_queue, self.decode_queue):
            each.remove(served.request_id)

    def _fail(self, served: FleetRequest, reason: str, status: int) -> None:
        self._end(served)
        self._outputs.append(failed_output(served, reason, status))

    def _abort_attempt(self, served: FleetRequest) -> None:
        for instance_id in served.instances:
            if (member := self.members.get(instance_id)) is not None:
                member.client.abort(served.attempt_id)

    def _end_impatient(self, now_s: float) -> None:
        """Fail what waits too long, for its tenant's quota or for any instance. Full ones are waited for."""
        for request_id, why in self._admission.quotas.late():
            self._fail(self.requests.waiting[request_id], why, OVERLOADED)
        if self.is_available:
            self._available_s = now_s
        late = now_s - self.policy.patience_s
        for served in list(self.requests.waiting.values()) if self._available_s < late else ():
            if served.queued_since_s < late:
                why = f" ({served.reason})" if served.reason else ""
                text = f"no instance was there within {self.policy.patience_s:g} s{why}: try again"
                self._fail(served, text, UNAVAILABLE)

    # -- placement

    def _wait(self, served: FleetRequest) -> None:
        """Queue a request. One whose answer is read already does not wait behind prompts."""
        now_s = self._clock.now()
        queue = self.decode_queue if served.generated else self.prefill_queue
        queue.push(served.metadata(now_s), served.request.arrival_s)

    def _order(self, request: RequestMetadata, arrived_s: float) -> float:
        rates = [member.load.prefill_token_s for member in self._ready() if member.load is not None]
        compute_s = len(request.tokens) * min(rates, default=0.0)
        return self._admission.strategy.order(request, arrived_s, compute_s)

    @property
    def is_available(self) -> bool:
        """Whether an instance takes requests. For any thread."""
        return any(map(self._takes_requests, list(self.members.values())))

    def _takes_requests(self, member: Member) -> bool:
        return (
            member.is_here and not member.draining and not self.roles.is_changing(member.client.instance_id)
        )

    def _place_waiting(self) -> None:
        """Place what waits, as far as quotas allow it and instances have room."""
        for request_id in self._admission.quotas.released():
            self._wait(self.requests.waiting[request_id])
        takers = [member for member in self.members.values() if self._takes_requests(member)]
        loads = [member.load for member in takers if member.load is not None]
        if loads:
            names = [load.instance_id for load in loads]
            self.decode_queue.drain(lambda waiting: self._try_to_place(waiting, loads, names))
            self.prefill_queue.drain(lambda waiting: self._try_to_place(waiting, loads, names))

    def _try_to_place(
        self, waiting: QueuedRequest, loads: Sequence[ExecutionInstance], names: Sequence[str]
    ) -> bool:
        """Whether the request need not wait any longer."""
        served = self.requests.waiting[waiting.request.request_id]
        request, metadata = served.request, served.metadata(self._clock.now())
        cached: Sequence[CachedPrefix] = [NOT_CACHED] * len(names)
        if self._router.reads_cache:
            cached = self._prefixes.lookup(request.tokens, self._namespace_of(request.namespace), names)
        most = max(prefix.num_device_tokens for prefix in cached)
        match self._admission.decide(metadata, loads, 0, most):
            case Reject(reason):
                self._fail(served, reason, OVERLOADED)
                return True
            case Delay(reason):
                served.reason = reason
                return False
        try:
            placement = self._router.place(metadata, loads, cached)
        except CapacityError as error:
            served.reason = str(error)
            return False
        self._begin(served, placement)
        return True

    def _begin(self, served: FleetRequest, placement: Placement) -> None:
        if served.generated:  # the first token is drawn: there is nothing to hand over
            placement = replace(placement, prefill=placement.decode)
        exchanging = {name for name, each in self.members.items() if each.facts and each.facts.transfers}
        placement = possible(placement, exchanging)
        self.requests.place(served, placement)
        self.copies.count(served.request)
        first = self.members[placement.prefill].client
        self.placements[first.instance_id] = self.placements.get(first.instance_id, 0) + 1
        onward = self._part(HandOverPart.PREFILL, placement.decode) if placement.is_separated else None
        source = self.members.get(placement.fetch_from)
        if source is None or not source.is_ready:
            self._submit(placement.prefill, served, onward)
            return
        request = served.request
        asked = served.attempt_id, request.tokens, first.instance_id, request.namespace
        source.client.call("send_prefix", asked)
        self._submit(placement.prefill, served, self._part(HandOverPart.FETCH, placement.fetch_from), onward)

    def _submit(self, instance_id: str, served: FleetRequest, *parts: HandOver | None) -> None:
        member = self.members[instance_id]
        is_seeded = member.facts is None or member.facts.draws_by_position
        member.client.submit(served.attempt_request(is_seeded=is_seeded), *parts)

    def _part(self, part: HandOverPart, peer: str) -> HandOver:
        fetches = part is HandOverPart.FETCH
        on_failure = FailurePolicy.RECOMPUTE if fetches else self.policy.on_failure
        return HandOver(part, peer, self.policy.hand_over_lease_s, on_failure)

    def stats(self) -> EngineStats:
        """Of all instances, as they last reported; what waits here is counted as waiting."""
        present = {name for name, member in self.members.items() if member.stats is not None}
        num_queued = len(self.requests.waiting)
        num_running = len(self.requests) - num_queued
        return self._counters.stats(present, num_running, num_queued, self._num_steps, self.tier_faults())

    def tenants(self) -> Mapping[str, TenantUse]:
        """The requests of each tenant against its quota; none without quotas."""
        return self._admission.quotas.load()

    def diagnostics(self) -> EngineDiagnostics:
        """Of all instances, as they last reported, and of tenants."""
        return replace(super().diagnostics(), tenants=self.tenants())

    def check(self) -> None:
        """Raise `BookkeepingError` where requests and their places disagree."""
        self.requests.check()
        for each in (self.prefill_queue, self.decode_queue):
            each.check()
        self._admission.quotas.check()
        queued = len(self.prefill_queue) + len(self.decode_queue) + len(self._admission.quotas)
        if queued != len(self.requests.waiting):
            raise BookkeepingError("a request waits and is in no queue, or the other way round")
