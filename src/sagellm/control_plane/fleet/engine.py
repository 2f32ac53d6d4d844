"""`FleetEngine`: an `EngineCore` that computes nothing. It places requests on instances and takes in tokens.

So all that stands on an engine, the server above all, stands on a fleet. One thread owns it; `wake` is for
any. A step takes in what instances have said, places what waits, and returns new tokens.
"""

from __future__ import annotations

import logging
import queue
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sagellm.control_plane.admission import AdmissionController, Delay, Reject
from sagellm.control_plane.fleet.questions import Member, Questions
from sagellm.control_plane.fleet.served import FleetPolicy, FleetRequest, ServedRequests, possible
from sagellm.control_plane.fleet.sums import summed_diagnostics, summed_outcomes, summed_stats
from sagellm.control_plane.kv_events import Gap
from sagellm.control_plane.queues import PhaseQueue, QueuedRequest, QueuePhase
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.clock import Clock
from sagellm.core.errors import (
    BookkeepingError,
    CapacityError,
    ConfigError,
    EngineFailedError,
    RequestError,
)
from sagellm.core.kv_hints import HintOutcome, KVHintsEnvelope
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats, PinnedPrefix, PromptExplanation
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.core.protocols.fleet import (
    CallResult,
    Connected,
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
    Placement,
    RequestMetadata,
    Router,
)
from sagellm.core.protocols.scheduler_ir import SchedulerPass
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
OVERLOADED, UNAVAILABLE = 429, 503  # HTTP's statuses
TICK_S = 0.1
"""A step waits at most so long."""
STATS_S = 1.0
"""Each instance is asked for its statistics so often."""
MAX_WAITING = 1 << 20
"""The admission bounds what is taken; requests of lost instances always find a place."""


class FleetEngine:
    """Implements `EngineCore` over instances.

    `check` raises `RequestError` for a request that no instance can compute; it is given the capability and
    the longest context. `namespace_of`: under which namespace instances keep a request's blocks.

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
    ) -> None:
        self._clients, self._router, self._prefixes = clients, router, prefixes
        self._check, self._clock, self.policy = check, clock, policy or FleetPolicy()
        self._namespace_of = namespace_of
        self._admission = admission or AdmissionController(clock=clock)
        self.prefill_queue = PhaseQueue(QueuePhase.PREFILL, self._order, max_waiting=MAX_WAITING, clock=clock)
        self.decode_queue = PhaseQueue(QueuePhase.DECODE, self._order, max_waiting=MAX_WAITING, clock=clock)
        self.members: dict[str, Member] = {}
        self.requests = ServedRequests()
        self._outputs: list[RequestOutput] = []
        self._questions = Questions(self._turn, clock)
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._next_tick_s = self._next_stats_s = self._available_s = clock.now()
        self._num_steps = 0
        self._closed, self._origin = False, secrets.token_hex(4)
        self._capability: CapabilityDescriptor | None = None
        self._max_model_len = 0
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
        seed = request_seed(self.policy.seed, request.request_id)
        served = FleetRequest(request, self._origin, seed, queued_since_s=self._clock.now())
        if len(self.prefill_queue) >= self._admission.max_waiting:
            waiting = f"{len(self.prefill_queue)} requests wait already: try again later"
            error = RequestError(waiting, code="rate_limit_exceeded")
            error.status = OVERLOADED
            raise error
        self.requests.add(served)
        self.num_prompt_tokens += len(request.tokens)
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
        return bool(len(self.requests) or self._outputs) or self._clock.now() >= self._next_tick_s

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
            self._clients.close()

    # -- the fleet

    def know(self, client: EngineClient) -> None:
        """Place requests on this instance too, once it is connected."""
        self.members[client.instance_id] = Member(client)

    def forget(self, instance_id: str) -> None:
        """It does not belong to the fleet any more. What it computes goes on elsewhere."""
        self.move_away(instance_id)
        self._lost(self.members.pop(instance_id), instance_id, "it was taken out of the fleet")

    def drain(self, instance_id: str, *, draining: bool = True) -> None:
        """Give it no new requests, or again. Raises `ConfigError` for an unknown one."""
        if instance_id not in self.members:
            known = ", ".join(sorted(self.members)) or "none"
            raise ConfigError(f"no instance is named {instance_id!r}: there are {known}")
        self.members[instance_id].draining = draining

    def move_away(self, instance_id: str) -> None:
        """Have what it computes go on elsewhere."""
        for served in self.requests.on(instance_id):
            self._retry(served, f"{instance_id} is drained", counts=False)

    def wait_until_ready(self, timeout_s: float, *, all_of_them: bool = True) -> None:
        """Wait until the instances are connected and have reported, or until one has.

        Raises `EngineFailedError` where they have not within this time.
        """
        until_s = self._clock.now() + timeout_s
        while waiting := [name for name, each in self.members.items() if not each.is_ready or not each.load]:
            if not all_of_them and self.is_available:
                return
            if self._clock.now() >= until_s:
                raise EngineFailedError(f"not there within {timeout_s:g} s: {', '.join(waiting)}")
            self._turn(TICK_S)

    @property
    def max_model_len(self) -> int:
        """The longest context that every instance has, or had when there was one."""
        known = [member.facts.max_model_len for member in self._ready() if member.facts]
        self._max_model_len = min(known, default=self._max_model_len)
        return self._max_model_len

    def capability(self) -> CapabilityDescriptor:
        """Of all instances together. Raises `EngineFailedError` while none is connected."""
        known = [member.facts.capability for member in self._ready() if member.facts]
        if not known:
            if self._capability is None:
                raise EngineFailedError("no instance of this fleet is connected")
            return self._capability
        first = next((each for each in known if each.dtype), known[0])
        self._capability = replace(
            first,
            max_num_seqs=sum(each.max_num_seqs for each in known),
            num_blocks=sum(each.num_blocks * each.block_size for each in known) // first.block_size,
            features=frozenset.intersection(*(each.features for each in known)),
        )
        return self._capability

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
        if now_s >= self._next_stats_s:
            self._next_stats_s = now_s + STATS_S
            self._questions.ask_for_stats(self._ready())
        if self.requests.waiting:
            self._place_waiting()

    def _take(self, member: Member, instance_id: str, event: InstanceEvent) -> None:
        match event:
            case RequestOutput():
                self._on_output(instance_id, event)
            case ExecutionInstance():
                member.load = self._as_seen_here(event)
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
            case CallResult():
                self._questions.take(instance_id, event)

    def _on_refused(self, event: RequestRefused) -> None:
        served = self.requests.of_attempt(event.request_id)
        if served is not None and event.again:
            self._retry(served, str(event.error))
        elif served is not None:
            self._fail(served, str(event.error), getattr(event.error, "status", 500))

    def _as_seen_here(self, load: ExecutionInstance) -> ExecutionInstance:
        """With this clock's time, and with the requests whose prompt another instance still computes."""
        instance_id = load.instance_id
        coming = sum(
            served.placement is not None and served.placement.prefill != instance_id
            for served in self.requests.on(instance_id)
        )
        return replace(
            load,
            num_waiting=load.num_waiting + coming,
            is_fresh=load.is_fresh and self._prefixes.is_fresh(instance_id),
            reported_s=self._clock.now(),
        )

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
            self._observe_end(instance_id, served, now_s)
            self._forget_request(served)

    def _observe_end(self, instance_id: str, served: FleetRequest, now_s: float) -> None:
        """Teach the router how long the instances of an answer took."""
        arrival_s, first_s = served.request.arrival_s, served.first_token_s
        begin, seen = {}, {"e2e": now_s - arrival_s}
        if first_s is not None:
            begin["ttft"] = first_s - arrival_s
            if len(served.generated) > 1:
                seen |= {"decode": now_s - first_s, "tpot": (now_s - first_s) / (len(served.generated) - 1)}
        if served.first_instance in ("", instance_id):
            self._router.observe(instance_id, {**begin, **seen})
        else:
            self._router.observe(served.first_instance, begin)
            self._router.observe(instance_id, seen)

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
        member.facts, member.fault = facts, self._mismatch(facts)
        if member.fault:
            log.error("%s gets no requests: %s", facts.instance_id, member.fault)
            return
        self._prefixes.leave(facts.instance_id)
        self._prefixes.join(facts.instance_id)
        for other in self._ready():
            if other is not member and other.facts is not None:
                other.client.add_peer(facts)
                member.client.add_peer(other.facts)

    def _mismatch(self, facts: InstanceFacts) -> str:
        """Why requests cannot move between this instance and the others; empty if they can."""
        for other in self._ready():
            if other.facts is None or other.facts.instance_id == facts.instance_id:
                continue
            ours, theirs = other.facts.capability, facts.capability
            for name in ("vocab_size", "dtype"):
                told = getattr(ours, name), getattr(theirs, name)
                if all(told) and told[0] != told[1]:
                    return (
                        f"its {name} is {getattr(theirs, name)}, that of {other.facts.instance_id} "
                        f"{getattr(ours, name)}: a fleet serves one model"
                    )
            schemas = ours.kv_schema, theirs.kv_schema
            if all(schemas) and len({each.model_fingerprint for each in schemas if each}) > 1:
                return f"its model is another one than that of {other.facts.instance_id}"
        return ""

    def _lost(self, member: Member, instance_id: str, reason: str) -> None:
        member.facts, member.load, member.stats = None, None, None
        member.num_lost += 1
        self._prefixes.leave(instance_id)
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
        self._admission.finished(served.request_id)
        self.requests.retry(served, self._clock.now(), reason)
        self._wait(served)

    def _end(self, served: FleetRequest) -> None:
        self._abort_attempt(served)
        self._forget_request(served)

    def _forget_request(self, served: FleetRequest) -> None:
        self.requests.end(served.request_id)
        self._admission.finished(served.request_id)
        for each in (self.prefill_queue, self.decode_queue):
            each.remove(served.request_id)

    def _fail(self, served: FleetRequest, reason: str, status: int) -> None:
        self._end(served)
        request, num_tokens = served.request, len(served.generated)
        self._outputs.append(
            RequestOutput(
                request.request_id, (), len(request.tokens), 0, num_tokens,
                finish_reason=FinishReason.ERROR, error=reason, error_status=status,
            )
        )  # fmt: skip

    def _abort_attempt(self, served: FleetRequest) -> None:
        for instance_id in served.instances:
            if (member := self.members.get(instance_id)) is not None:
                member.client.abort(served.attempt_id)

    def _end_impatient(self, now_s: float) -> None:
        """Fail what waits while no instance has served for too long. Full ones are waited for."""
        if self.is_available:
            self._available_s = now_s
        late = now_s - self.policy.patience_s
        for served in list(self.requests.waiting.values()) if self._available_s < late else ():
            if served.queued_since_s < late:
                why = f" ({served.reason})" if served.reason else ""
                text = f"no instance was there within {self.policy.patience_s:g} s{why}: try again"
                self._fail(served, text, UNAVAILABLE)

    # -- placement

    def _ready(self) -> list[Member]:
        return [member for member in self.members.values() if member.is_ready]

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
        return any(each.is_ready and each.load and not each.draining for each in list(self.members.values()))

    def _place_waiting(self) -> None:
        """Place what waits, as far as instances have room."""
        loads = [member.load for member in self._ready() if member.load is not None and not member.draining]
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
            self._admission.finished(served.request_id)
            return False
        self._begin(served, placement)
        return True

    def _begin(self, served: FleetRequest, placement: Placement) -> None:
        if served.generated:  # the first token is drawn: there is nothing to hand over
            placement = replace(placement, prefill=placement.decode)
        exchanging = {name for name, each in self.members.items() if each.facts and each.facts.transfers}
        placement = possible(placement, exchanging)
        self.requests.place(served, placement)
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

    # -- questions

    def stats(self) -> EngineStats:
        """Of all instances, as they last reported; what waits here is counted as waiting."""
        known = [member.stats for member in self._ready() if member.stats is not None]
        num_queued = len(self.requests.waiting)
        return summed_stats(
            known, len(self.requests) - num_queued, num_queued, self._num_steps, self._faults()
        )

    def tier_faults(self) -> Sequence[str]:
        return self._faults()

    def _faults(self) -> tuple[str, ...]:
        return tuple(
            f"{name}: {fault}"
            for name, member in list(self.members.items())
            for fault in (member.stats.tier_faults if member.stats is not None else ())
        )

    def diagnostics(self) -> EngineDiagnostics:
        return summed_diagnostics(self._questions.ask_each(self._ready(), "diagnostics"))

    def pin_prefix(self, tokens: Tokens, namespace: Namespace) -> PinnedPrefix:
        member = self._with_most_cached(tokens, namespace)
        facts, pinned = member.facts, self._questions.ask(member, "pin", (tokens, namespace))

        def release() -> None:
            if member.facts is facts:  # else the session is over, and the pin with it
                member.client.call("unpin", (pinned.pin_id,))

        return PinnedPrefix(pinned.num_tokens, pinned.num_blocks, release)

    def clear_cache(self, *, tiers: bool = False) -> int:
        return sum(self._questions.ask_each(self._ready(), "clear_cache", (tiers,)))

    def hint(self, envelope: KVHintsEnvelope, namespace: Namespace) -> Sequence[HintOutcome]:
        return summed_outcomes(self._questions.ask_each(self._ready(), "hint", (envelope, namespace)))

    def explain(
        self, tokens: Tokens, namespace: Namespace, session_id: str | None = None
    ) -> PromptExplanation:
        member = self._with_most_cached(tokens, namespace)
        explained: PromptExplanation = self._questions.ask(member, "explain", (tokens, namespace, session_id))
        return explained

    def set_policy(self, factory: Callable[[], EvictionPolicy]) -> None:
        raise RequestError("instances of a fleet are processes: give the name to replace_policy")

    def set_passes(self, passes: Sequence[SchedulerPass]) -> None:
        raise RequestError("instances of a fleet are processes: give the name to replace_strategy")

    def replace_policy(self, name: str, options: dict[str, Any]) -> None:
        """Have every instance evict by this policy from now on."""
        self._questions.ask_each(self._ready(), "set_policy", (name, options))

    def replace_strategy(self, name: str, options: dict[str, dict[str, Any]]) -> None:
        """Have every instance schedule by this strategy from now on."""
        self._questions.ask_each(self._ready(), "set_strategy", (name, options))

    def _with_most_cached(self, tokens: Tokens, namespace: Namespace) -> Member:
        ready = [member for member in self._ready() if member.facts is not None]
        if not ready:
            raise CapacityError("no instance of this fleet is connected")
        names = [member.facts.instance_id for member in ready if member.facts is not None]
        cached = self._prefixes.lookup(tokens, self._namespace_of(namespace), names)
        most = max(range(len(ready)), key=lambda number: cached[number].num_tokens)
        return ready[most]

    def check(self) -> None:
        """Raise `BookkeepingError` where requests and their places disagree."""
        self.requests.check()
        for each in (self.prefill_queue, self.decode_queue):
            each.check()
        if len(self.prefill_queue) + len(self.decode_queue) != len(self.requests.waiting):
            raise BookkeepingError("a request waits and is in no queue, or the other way round")
