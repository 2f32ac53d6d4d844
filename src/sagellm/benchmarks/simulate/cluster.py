"""Runs a cluster: requests arrive by time, and the earliest instance steps next.

Everything is deterministic. Events of the same moment keep the order in which they were made; instances with
equal clocks keep the order of the list. Unless the end of a request may begin another, or bring it to another
instance, each instance runs by itself up to the next event.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import itemgetter

from sagellm.benchmarks.simulate.control import ControlSetting, SimulatedControlPlane, metadata
from sagellm.benchmarks.simulate.instance import Instance
from sagellm.benchmarks.simulate.network import Links, PromptTransfer, receive
from sagellm.benchmarks.simulate.workload import RequestMaker, SimulatedWorkload, output_tokens
from sagellm.control_plane.admission import Admit, Reject
from sagellm.control_plane.queues import QueuedRequest
from sagellm.control_plane.replication import PrefixCopy
from sagellm.core.errors import BookkeepingError, ConfigError, SageError
from sagellm.core.events import RequestFinished
from sagellm.core.types import FinishReason, Request, SamplingParams, Tokens

DRAIN_S = 0.05
"""Seconds after which requests that admission delays are offered again."""
FIRST_TOKEN = SamplingParams(0.0, max_tokens=1, ignore_eos=True)
"""The parameters of a request on a prefill instance."""


class RequestOutcome(Enum):
    """The state of a request at the end. `SENDING`: its KV is on the way. `NOT_SENT`: it never arrived, as
    a turn whose session did not get so far."""

    FINISHED = "finished"
    REJECTED = "rejected"
    RUNNING = "running"
    WAITING = "waiting"
    SENDING = "sending"
    NOT_SENT = "not sent"


@dataclass(slots=True)
class ServedRequest:
    """The history of one request. Times in seconds of the simulation, None if it did not get so far.
    `num_cached`: prompt tokens found when it was first scheduled. `ready_s`: when its KV reached another
    decode instance. `reason`: of a rejection."""

    number: int
    arrival_s: float | None = None
    outcome: RequestOutcome = RequestOutcome.NOT_SENT
    reason: str = ""
    prefill: str = ""
    decode: str = ""
    num_output_tokens: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    ready_s: float | None = None
    finished_s: float | None = None

    @property
    def wait_s(self) -> float | None:
        """From arrival to first schedule."""
        return _between(self.arrival_s, self.scheduled_s)

    @property
    def ttft_s(self) -> float | None:
        return _between(self.arrival_s, self.first_token_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean per token after the first; None for an answer of one token."""
        decode_s, later = _between(self.first_token_s, self.finished_s), self.num_output_tokens - 1
        return decode_s / later if decode_s is not None and later else None

    @property
    def e2e_s(self) -> float | None:
        return _between(self.arrival_s, self.finished_s)


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else end_s - begin_s


class Cluster:
    """Instances with a control plane. `run` serves a workload once, on fresh instances."""

    def __init__(
        self,
        instances: Sequence[Instance],
        control: ControlSetting | None = None,
        links: Links | None = None,
    ) -> None:
        self.instances = list(instances)
        self._by_name = {instance.name: instance for instance in self.instances}
        _check_roles(self.instances, self._by_name)
        self._links = links or Links()
        self.control = SimulatedControlPlane(
            control or ControlSetting(), self.instances, self._links.bytes_per_s
        )
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._num_events = 0
        self._delayed: dict[str, Request] = {}
        self._decode_at: dict[int, Instance] = {}
        self.served: list[ServedRequest] = []

    def run(
        self, workload: SimulatedWorkload, maker: RequestMaker, until_s: float = math.inf
    ) -> list[ServedRequest]:
        """Serves all of it, or the part before `until_s`. Returns one record per request, by number.
        Raises `BookkeepingError` if a request is lost."""
        self._workload, self._maker = workload, maker
        self.served = [ServedRequest(number) for number in range(len(workload.requests))]
        self._sessions = deque(workload.waiting)
        self.control.begin(self._num_expected)
        for time_s, number in workload.first():
            self._at(time_s, self._arrive, number)
        while True:
            event_s = self._events[0][0] if self._events else math.inf
            if not self._is_coupled():
                self._advance_all(min(event_s, until_s), event_s)
            instance, now_s, next_s = self._earliest()
            if min(now_s, event_s) >= until_s:
                break
            if instance is None or event_s <= now_s:
                time_s, _, action, given = heapq.heappop(self._events)
                self.control.clock.advance_to(time_s)
                action(time_s, *given)
            else:
                instance.advance(min(event_s, next_s, until_s), event_s)
                for event, reason in instance.take_ended() if instance.ended else ():
                    self._on_ended(instance, event, reason)
                if self._links.num_expected(instance):
                    self._start_transfers(instance, instance.clock.now())
        self._close()
        return self.served

    # -- time

    def _at(self, time_s: float, action: Callable[..., None], *given: object) -> None:
        heapq.heappush(self._events, (time_s, self._num_events, action, given))
        self._num_events += 1

    def _is_coupled(self) -> bool:
        """Whether an instance may get work from another before the next event."""
        follow = self._workload.follows or self._sessions
        return bool(follow or self._decode_at) or not self._links.is_idle

    def _advance_all(self, until_s: float, event_s: float) -> None:
        """Runs each instance by itself up to a time before which none affects another.

        So an engine can take its equal steps together, however many instances there are. Ends of requests
        are handled in the order in which the instances' steps began, as if the earliest always stepped."""
        ended: list[tuple[float, int, int, RequestFinished, str]] = []
        for place, instance in enumerate(self.instances):
            while instance.clock.now() < until_s and instance.busy:
                instance.advance(until_s, event_s)
                ended += [
                    (instance.step_began_s, place, number, event, reason)
                    for number, (event, reason) in enumerate(instance.take_ended(), len(ended))
                ]
        for _, place, _, event, reason in sorted(ended, key=itemgetter(0, 1, 2)):
            self._on_ended(self.instances[place], event, reason)

    def _earliest(self) -> tuple[Instance | None, float, float]:
        """Returns the busy instance with the earliest clock. Also its time and that of the next instance."""
        busy = [instance for instance in self.instances if instance.busy]
        if not busy:
            return None, math.inf, math.inf
        first = min(busy, key=lambda instance: instance.clock.now())
        next_s = min((instance.clock.now() for instance in busy if instance is not first), default=math.inf)
        return first, first.clock.now(), next_s

    # -- requests

    def _arrive(self, now_s: float, number: int) -> None:
        served, trace_request = self.served[number], self._workload.requests[number]
        served.arrival_s, served.outcome = now_s, RequestOutcome.WAITING
        request = self._maker.make(number, now_s, output_tokens(trace_request))
        if not self._enter(request, now_s, len(self._delayed)):
            self._delayed[request.request_id] = request
            self.control.prefill_queue.push(metadata(request, now_s), now_s)
            if len(self._delayed) == 1:
                self._at(now_s + DRAIN_S, self._drain)
        for copy in self.control.copies(now_s):
            self._copy(copy, now_s)

    def _copy(self, copy: PrefixCopy, now_s: float) -> None:
        request = Request(copy.copy_id, copy.tokens, FIRST_TOKEN, namespace=copy.namespace)
        source, target = self._by_name[copy.source], self._by_name[copy.target]
        transfer = PromptTransfer(request, len(copy.tokens), source, target, now_s)
        self._links.book(transfer, now_s)
        self._at(transfer.end_s, self._take_copy, transfer)

    def _take_copy(self, _now_s: float, transfer: PromptTransfer) -> None:
        receive(transfer.target.engine.kv, transfer.request, transfer.num_prompt_tokens)

    def _enter(self, request: Request, now_s: float, num_waiting: int) -> bool:
        """Places or rejects a request; False if it must wait."""
        decision = self.control.decide(request, now_s, num_waiting)
        if isinstance(decision, Admit):
            self._place(request, now_s)
        elif isinstance(decision, Reject):
            self._end(self.served[int(request.request_id)], RequestOutcome.REJECTED, now_s, decision.reason)
        else:
            return False
        return True

    def _drain(self, now_s: float) -> None:
        """Offers the delayed requests again."""

        def enter(waiting: QueuedRequest) -> bool:
            name = waiting.request.request_id
            if not self._enter(self._delayed[name], now_s, 0):
                return False
            del self._delayed[name]
            return True

        self.control.prefill_queue.drain(enter)
        if self._delayed:
            self._at(now_s + DRAIN_S, self._drain)

    def _place(self, request: Request, now_s: float) -> None:
        number = int(request.request_id)
        served = self.served[number]
        placement, cached = self.control.place(request, now_s)
        instance = self._by_name[placement.prefill]
        served.prefill = served.decode = instance.name
        if placement.is_separated:
            request = replace(request, params=FIRST_TOKEN, scripted_output=None)
            self._decode_at[number] = self._by_name[placement.decode]
        if placement.fetch_from:
            source = self._by_name[placement.fetch_from]
            num_tokens = cached[self.instances.index(source)].num_tokens
            served.outcome = RequestOutcome.SENDING
            self._transfer(PromptTransfer(request, num_tokens, source, instance, now_s), now_s)
        else:
            self._submit(instance, request, now_s)

    def _num_expected(self, instance: Instance) -> int:
        """Requests that will go on at an instance, and are not there yet."""
        later = sum(target is instance for target in self._decode_at.values())
        return later + self._links.num_expected(instance)

    def _submit(self, instance: Instance, request: Request, now_s: float) -> None:
        try:
            instance.submit(request, now_s)
        except SageError as error:
            served = self.served[int(request.request_id)]
            self._end(served, RequestOutcome.REJECTED, now_s, str(error))

    def _on_ended(self, instance: Instance, event: RequestFinished, reason: str) -> None:
        served = self.served[int(event.request_id)]
        if served.scheduled_s is None:
            served.scheduled_s, served.num_cached = event.scheduled_s, event.num_cached_tokens
        if served.first_token_s is None:
            served.first_token_s = event.first_token_s
        served.num_output_tokens += event.num_output_tokens
        if event.reason == FinishReason.ERROR.value:
            self._end(served, RequestOutcome.REJECTED, event.finished_s, reason)
        elif (target := self._decode_at.pop(served.number, None)) is not None and (
            served.num_output_tokens < self._wanted(served)
        ):
            self._send(instance, target, served, event.finished_s)
        else:
            served.finished_s = event.finished_s
            self._end(served, RequestOutcome.FINISHED, event.finished_s)

    def _wanted(self, served: ServedRequest) -> int:
        return output_tokens(self._workload.requests[served.number])

    def _end(self, served: ServedRequest, outcome: RequestOutcome, now_s: float, reason: str = "") -> None:
        """Ends a request. The next turn of its session comes after the user's thinking time; after its last
        turn the next session begins."""
        if served.outcome in (RequestOutcome.FINISHED, RequestOutcome.REJECTED):
            raise BookkeepingError(
                f"request {served.number} ended twice: {served.outcome.value}, then {outcome}"
            )
        served.outcome, served.reason = outcome, reason
        self._decode_at.pop(served.number, None)
        if outcome is RequestOutcome.FINISHED:
            latencies_s = {"ttft": served.ttft_s, "tpot": served.tpot_s, "e2e": served.e2e_s}
            latencies_s["decode"] = _between(served.first_token_s, served.finished_s)
            self.control.finished((served.prefill, served.decode), latencies_s)
        after = self._workload.follows.get(served.number)
        if after is None and self._sessions:
            after = self._sessions.popleft()
        if after is not None:
            self._at(now_s + self._workload.times_s[after], self._arrive, after)

    # -- from prefill to decode

    def _send(self, source: Instance, target: Instance, served: ServedRequest, now_s: float) -> None:
        name = str(served.number)
        [token] = [output.new_token_ids[-1] for output in source.outputs if output.request_id == name]
        assert served.arrival_s is not None
        prompt = self._maker.make(served.number, served.arrival_s, self._wanted(served) - 1)
        tokens = Tokens(prompt.tokens)
        tokens.append(token)
        request = replace(prompt, tokens=tokens)
        served.decode, served.outcome = target.name, RequestOutcome.SENDING
        self._transfer(PromptTransfer(request, len(prompt.tokens), source, target, now_s), now_s)

    def _transfer(self, transfer: PromptTransfer, now_s: float) -> None:
        self._links.send(transfer)
        self._start_transfers(transfer.target, now_s)

    def _start_transfers(self, target: Instance, now_s: float) -> None:
        for transfer in self._links.start(target, now_s):
            self._at(transfer.end_s, self._receive, transfer)

    def _receive(self, now_s: float, transfer: PromptTransfer) -> None:
        self._links.arrive(transfer)
        served = self.served[int(transfer.request.request_id)]
        served.outcome = RequestOutcome.WAITING
        if served.first_token_s is not None:
            served.ready_s = now_s
        self._submit(transfer.target, transfer.request, now_s)
        self._start_transfers(transfer.target, now_s)

    # -- the end

    def _close(self) -> None:
        """Sets the final state of each unfinished request; checks that none is missing."""
        for instance in self.instances:
            for name, count in instance.step_log.preemptions.items():
                self.served[int(name)].num_preemptions += count
        live = [
            served
            for served in self.served
            if served.outcome is RequestOutcome.WAITING and str(served.number) not in self._delayed
        ]
        for served in live:
            instance = self._by_name[served.decode]
            event = instance.scheduled.get(str(served.number))
            if event is not None:
                served.outcome = RequestOutcome.RUNNING
                if served.scheduled_s is None:
                    served.scheduled_s, served.num_cached = event.time_s, event.num_cached_tokens
            if instance.stalled:
                served.reason = "stalled: its instance had work and computed nothing"
        queues = [instance.engine.stats() for instance in self.instances]
        held = sum(queue.num_running + queue.num_waiting for queue in queues)
        if held != len(live):
            raise BookkeepingError(f"engines hold {held} requests, the books of the simulation {len(live)}")


def _check_roles(instances: Sequence[Instance], by_name: dict[str, Instance]) -> None:
    roles = {instance.role for instance in instances}
    if roles not in ({"both"}, {"hybrid"}, {"prefill", "decode"}) or len(by_name) != len(instances):
        raise ConfigError(
            "a cluster has instances of different names that all do both phases, or at least one for prefill "
            f"and one for decode; got {[(instance.name, instance.role) for instance in instances]}"
        )
    if "both" not in roles and not all(instance.engine.kv.prefix_caching for instance in instances):
        raise ConfigError(
            "separating prefill and decode needs kv.prefix_caching: KV arrives as a cached prefix"
        )
