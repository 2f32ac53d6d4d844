"""`cost`: the instance where a request costs least, in seconds.

Every reason is a term in seconds, so that they can be added: what waits there, what of the prompt must be
computed, loaded from a lower tier or fetched from a peer, what the answer takes, how it delays others,
which goals are missed. `Placement.terms` gives those of the instance that was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import compress, count
from operator import is_not, or_
from random import Random
from typing import Any, ClassVar, NamedTuple

from sagellm.control_plane.router._history import (
    LearnedSpeeds,
    Placed,
    PlacedLoad,
    Sessions,
    TenantLoad,
)
from sagellm.control_plane.router._step_fit import StepLine
from sagellm.control_plane.router.separation import SeparationCase, SeparationPolicy, separation_policy
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import CapacityError, ConfigError
from sagellm.core.protocols.router import (
    CachedPrefix,
    ExecutionInstance,
    InstanceType,
    Placement,
    RequestMetadata,
)

_BITS = {kind: 1 << number for number, kind in enumerate(InstanceType)}
_WHOLE = (
    _BITS[InstanceType.GENERAL]
    | _BITS[InstanceType.HYBRID]
    | _BITS[InstanceType.LLM_EMBEDDING]
    | _BITS[InstanceType.DECODING]
)
"""Kinds that serve whole requests; PREFILLING does where there is none of them."""
_PREFILL = _BITS[InstanceType.PREFILLING] | _BITS[InstanceType.HYBRID]
_DECODE = _BITS[InstanceType.DECODING] | _BITS[InstanceType.HYBRID]


class _View:
    """An instance's load in seconds, with what was placed on it since its report."""

    __slots__ = (
        "context_token_s", "free_tokens", "instance", "is_fresh", "kind", "name", "num_requests", "place",
        "queue_s", "rate", "row_s", "step_s", "token_s",
    )  # fmt: skip

    def __init__(
        self,
        instance: ExecutionInstance,
        kind: InstanceType,
        rate: float,
        step_s: float,
        line: StepLine,
        placed: Placed,
    ) -> None:
        self.instance = instance
        self.name = instance.instance_id
        self.place = 0
        self.kind = _BITS[kind]
        self.is_fresh = instance.is_fresh
        self.rate = rate
        self.token_s = instance.prefill_token_s or rate
        """As `rate`, but not corrected by first tokens: times all that run there, its noise would decide."""
        self.row_s, self.context_token_s = line.row_s, line.context_token_s
        self.num_requests = instance.num_requests + placed.num_requests
        if line.row_s or line.context_token_s:
            context = instance.num_used_tokens + instance.num_queued_tokens + placed.context
            step_s = line.of(self.num_requests, context)
        self.step_s = step_s
        self.queue_s = (instance.num_queued_tokens + placed.num_tokens) * rate
        blocks = instance.num_free_blocks
        self.free_tokens = blocks * instance.block_size if instance.block_size else math.inf

    def longer_s(self, context: float) -> float:
        """Seconds by which one more row, of that context, lengthens a step."""
        return self.row_s + context * self.context_token_s

    def add_row(self, context: float) -> None:
        """One more request will decode here."""
        self.num_requests += 1
        self.step_s += self.longer_s(context)


class _Request(NamedTuple):
    """What of a request enters its cost.

    `context`: tokens of KV that its row reads, on average. `shared`: steps that it shares with a request that
    runs already, if lengths of answers are exponential: half of them where both are as long. `peer`: the
    instance with the longest cached prefix, `peer_tokens`; -1: nothing is fetched."""

    num_tokens: int
    num_output: float
    context: float
    shared: float
    slack_s: float
    tpot_s: float
    tenant: str
    last: str
    last_tokens: int
    peer: int
    peer_tokens: int


@dataclass(slots=True)
class CostRouter:
    """Options in seconds, or as weights of seconds.

    `temperature`: 0.0 takes the least cost; above, instances are drawn by softmax of cost over temperature.
    `separation`: a policy of `separation.py`, by name or with options. `prefill_token_s`, `step_s`: assumed
    where no instance has measured them. `load_token_s`: from a lower tier of the same instance.
    `transfer_token_s`, `transfer_latency_s`: from another instance; `fetch` allows `Placement.fetch_from`.
    `expected_output`: tokens, where a request does not say and no answer was seen yet. `decode_weight`: of
    the time that the answer takes. `delay_weight`: of the time by which a prompt delays each request that
    runs there. `slowdown_weight`: of that by which each of their steps, and so their answers, are longer for
    one more row. The three are 1: seconds of all requests count alike. `late_weight`: of each second by which
    a goal would be missed. `tenant_weight`: of what a tenant has more on an instance than on average.
    `affinity_s`: what the instance of a session's last turn is worth, all else equal.
    """

    reads_cache: ClassVar[bool] = True

    temperature: float = 0.0
    seed: int = 0
    separation: Any = "threshold"
    prefill_token_s: float = 1e-4
    step_s: float = 0.02
    load_token_s: float = 5e-6
    transfer_token_s: float = 5e-6
    transfer_latency_s: float = 2e-3
    fetch: bool = False
    expected_output: int = 256
    decode_weight: float = 1.0
    delay_weight: float = 1.0
    slowdown_weight: float = 1.0
    late_weight: float = 4.0
    tenant_weight: float = 1.0
    affinity_s: float = 0.01
    clock: Clock | None = None
    _random: Random = field(init=False)
    _policy: SeparationPolicy = field(init=False)
    _placed: PlacedLoad = field(init=False)
    _learned: LearnedSpeeds = field(init=False)
    _sessions: Sessions = field(init=False)
    _tenants: TenantLoad = field(init=False)
    _clock: Clock = field(init=False)
    _parts: Mapping[str, InstanceType] = field(init=False, default_factory=dict)
    _views: dict[str, _View] = field(init=False, default_factory=dict)
    _seen: list[ExecutionInstance | None] = field(init=False, default_factory=list)
    _listed: list[_View] = field(init=False, default_factory=list)
    _kinds: int = field(init=False, default=0)
    _all_fresh: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        for name in ("temperature", "load_token_s", "transfer_token_s", "transfer_latency_s", "decode_weight",
                     "delay_weight", "slowdown_weight", "late_weight", "tenant_weight",
                     "affinity_s"):  # fmt: skip
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is a number from 0 on, got {value}")
        for name in ("prefill_token_s", "step_s", "expected_output"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is a number above 0, got {getattr(self, name)}")
        self._random = Random(self.seed)
        self._policy = separation_policy(self.separation)
        self._clock = clock = self.clock or MonotonicClock()
        self._placed = PlacedLoad(clock)
        self._learned = LearnedSpeeds(self.prefill_token_s, self.step_s, self.expected_output)
        self._sessions = Sessions()
        self._tenants = TenantLoad(clock)

    # -- the contract

    def place(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> Placement:
        most = max((prefix.num_tokens for prefix in cached), default=0)
        uncached, now_s = max(1, len(request.tokens) - most), self._clock.now()
        self._take_parts(self._policy.parts(request, uncached, instances, now_s))
        views, kinds, is_fresh = self._all_views(instances)
        whole = _of_kind(views, kinds, _WHOLE) or _of_kind(views, kinds, _PREFILL)
        if not whole:
            got = f"{len(instances)} that only embed" if instances else "none at all"
            raise CapacityError(
                f"there is no instance to place a request on, but {got}: start one that serves"
            )
        asked = self._asked(request, views, cached)
        if not is_fresh:
            cached, whole = self._guess(asked, views, cached, whole)
        costs = self._costs(asked, views, cached, whole)
        chosen = self._choose(whole, costs)
        if kinds & _PREFILL and kinds & _DECODE:
            whole_s = costs[whole.index(chosen)]
            apart = self._separated(request, asked, views, cached, kinds, chosen, whole_s)
            if apart is not None:
                return apart
        return self._placement(request, asked, views, cached, chosen)

    def observe(self, instance_id: str, latencies_s: Mapping[str, float]) -> None:
        view = self._views.pop(instance_id, None)
        if view is not None and view.place < len(self._seen):
            self._seen[view.place] = None  # made anew when next asked
        reports = view is not None and view.instance.reported_s > 0
        self._placed.finished(instance_id, reports=reports)
        self._learned.observe(instance_id, latencies_s)
        self._policy.observe(latencies_s)

    def check(self) -> None:
        """Raise `BookkeepingError` where what was counted does not add up."""
        self._placed.check()
        self._tenants.check()

    # -- costs

    def _take_parts(self, parts: Mapping[str, InstanceType]) -> None:
        """Hybrid instances are for this from now on."""
        if parts is not self._parts:
            self._parts = parts
            for name, view in self._views.items():
                view.kind = _BITS[parts.get(name, view.instance.kind)]
            self._kinds = reduce(or_, (view.kind for view in self._listed), 0)

    def _all_views(self, instances: Sequence[ExecutionInstance]) -> tuple[list[_View], int, bool]:
        """A view of each instance, their kinds, and whether all are fresh.

        Only those whose report is another than at the last call are made anew."""
        listed = self._listed
        if len(instances) != len(self._seen):
            self._seen = [None] * len(instances)
            del listed[len(instances) :]
        seen = self._seen
        changed = list(compress(count(), map(is_not, instances, seen)))
        if not changed:
            return listed, self._kinds, self._all_fresh
        known = self._views
        for place in changed:
            instance = seen[place] = instances[place]
            view = known.get(instance.instance_id)
            if view is None or view.instance is not instance:
                rate, step_s = self._learned.of(instance)
                kind = self._parts.get(instance.instance_id, instance.kind)
                line = self._learned.lengthening(instance)
                view = _View(instance, kind, rate, step_s, line, self._placed.of(instance))
                known[instance.instance_id] = view
            view.place = place
            listed[place : place + 1] = [view]
        self._kinds = reduce(or_, (view.kind for view in listed), 0)
        self._all_fresh = all(view.is_fresh for view in listed)
        if len(known) > 2 * len(listed) + 64:  # instances that are gone
            self._views = {view.name: view for view in listed}
        return listed, self._kinds, self._all_fresh

    def _asked(
        self,
        request: RequestMetadata,
        views: Sequence[_View],
        cached: Sequence[CachedPrefix],
    ) -> _Request:
        num_tokens = len(request.tokens)
        wanted = request.kv_cache_size_tokens - num_tokens
        peer = -1
        if self.fetch:
            peer = max(range(len(cached)), key=lambda i: cached[i].num_tokens if views[i].is_fresh else 0)
        last, last_tokens = self._sessions.of(request.session_id)
        slack_s, tpot_s = request.slo_slack_s, request.slo.tpot_s
        tenant = request.namespace.tenant if self.tenant_weight else ""
        mean = self._learned.num_output
        num_output = wanted if wanted > 0 else mean
        return _Request(
            num_tokens,
            num_output,
            num_tokens + num_output / 2,
            num_output * mean / (num_output + mean),
            math.inf if slack_s is None else slack_s,
            math.inf if tpot_s is None else tpot_s,
            tenant,
            last,
            last_tokens,
            peer,
            min(cached[peer].num_tokens, num_tokens - 1) if peer >= 0 else 0,
        )

    def _costs(
        self, asked: _Request, views: Sequence[_View], cached: Sequence[CachedPrefix], places: Sequence[int]
    ) -> list[float]:
        """What a request costs in all at each of `places`.

        The sum of `_terms`, which says of what. One loop without calls for what most instances need, as it
        runs for each instance of a fleet (`sagellm bench micro router`)."""
        num_tokens, num_output, context, shared, slack_s, tpot_s, tenant, last, _, peer, peer_tokens = asked
        needed, delay, late = num_tokens + num_output, self.delay_weight, self.late_weight
        decode, slowdown = num_output * self.decode_weight, shared * self.slowdown_weight
        costs, num_views = list[float](), len(views)
        add = costs.append
        if len(places) != num_views:
            views, cached = [views[i] for i in places], [cached[i] for i in places]
            peer = places.index(peer) if peer in places else -1
        has_goal = min(slack_s, tpot_s) < math.inf
        before, uncached, delayed, missing, is_plain = None, 0, 0.0, 0.0, False
        for view, prefix in zip(views, cached, strict=True):
            if prefix is not before:  # most instances share one
                before, (on_device, in_all) = prefix, prefix
                uncached, missing = num_tokens - in_all, needed - on_device
                delayed = uncached * delay
                is_plain = on_device == in_all and peer_tokens <= in_all < num_tokens
            if not is_plain or missing > view.free_tokens:
                add(self._cost(asked, view, prefix, is_peer=len(costs) == peer))
                continue
            longer_s = view.row_s + context * view.context_token_s
            step_s, ttft_s = view.step_s + longer_s, view.queue_s + uncached * view.rate
            cost = (
                ttft_s + decode * step_s + view.num_requests * (delayed * view.token_s + slowdown * longer_s)
            )
            if has_goal:
                if ttft_s > slack_s:
                    cost += (ttft_s - slack_s) * late
                if step_s > tpot_s:
                    cost += (step_s - tpot_s) * num_output * late
            add(cost)
        if tenant or last:
            self._prefer(asked, views, num_views, costs)
        return costs

    def _prefer(self, asked: _Request, views: Sequence[_View], num_views: int, costs: list[float]) -> None:
        """Adds the terms of tenant and session. `num_views`: of all instances, of which some are weighed."""
        share = self._tenants.of(asked.tenant).tokens if asked.tenant else None
        if share:
            mean = sum(share.values()) / num_views
            for at, view in enumerate(views):
                excess = share.get(view.name, 0.0) - mean
                if excess > 0:
                    costs[at] += excess * view.rate * self.tenant_weight
        for at, view in enumerate(views) if asked.last else ():
            if view.name == asked.last:
                costs[at] -= self.affinity_s

    def _cost(self, asked: _Request, view: _View, prefix: CachedPrefix, *, is_peer: bool) -> float:
        """The same of one instance, with lower tiers, fetching and a full memory."""
        in_all = min(prefix.num_tokens, asked.num_tokens - 1)
        on_device = min(prefix.num_device_tokens, in_all)
        rate, ttft_s, compute = view.rate, view.queue_s, asked.num_tokens - in_all
        gain = asked.peer_tokens - in_all
        if gain > 0 and not is_peer:
            fetch_s = self.transfer_latency_s + gain * self.transfer_token_s
            if fetch_s < gain * rate:
                ttft_s += fetch_s
                compute -= gain
        prefill_s = compute * rate
        ttft_s += prefill_s
        ttft_s += (in_all - on_device) * min(self.load_token_s, rate)
        longer_s = view.longer_s(asked.context)
        step_s = view.step_s + longer_s
        cost = ttft_s + compute * view.token_s * self.delay_weight * view.num_requests
        cost += asked.num_output * self.decode_weight * step_s
        cost += asked.shared * self.slowdown_weight * longer_s * view.num_requests
        missing = asked.num_tokens + asked.num_output - on_device - view.free_tokens
        cost += max(0.0, missing) * rate
        cost += max(0.0, ttft_s - asked.slack_s) * self.late_weight
        cost += max(0.0, step_s - asked.tpot_s) * asked.num_output * self.late_weight
        return cost

    def _terms(
        self,
        asked: _Request,
        views: Sequence[_View],
        cached: Sequence[CachedPrefix],
        place: int,
        *,
        decodes: bool = True,
    ) -> dict[str, float]:
        """The terms of a request's cost on an instance, by name. `decodes`: it stays there for its answer."""
        view, prefix = views[place], cached[place]
        name, rate = view.name, view.rate
        in_all = min(prefix.num_tokens, asked.num_tokens - 1)
        on_device = min(prefix.num_device_tokens, in_all)
        compute = asked.num_tokens - in_all
        terms = {"queue": view.queue_s}
        gain = asked.peer_tokens - in_all
        fetch_s = self.transfer_latency_s + gain * self.transfer_token_s
        if asked.peer not in (-1, place) and gain > 0 and fetch_s < gain * rate:
            terms["fetch"] = fetch_s
            compute -= gain
        terms["prefill"] = compute * rate
        if in_all > on_device:
            terms["load"] = (in_all - on_device) * min(self.load_token_s, rate)
        ttft_s = math.fsum(terms.values())
        # Requests that leave with their first token are ahead of this one.
        num_rows = view.num_requests if decodes or view.kind != _BITS[InstanceType.PREFILLING] else 0
        terms["delay"] = compute * view.token_s * self.delay_weight * num_rows
        if decodes:
            longer_s = view.longer_s(asked.context)
            step_s = view.step_s + longer_s
            terms["decode"] = asked.num_output * self.decode_weight * step_s
            terms["slowdown"] = asked.shared * self.slowdown_weight * longer_s * view.num_requests
        needed = asked.num_tokens + (asked.num_output if decodes else 0) - on_device
        if needed > view.free_tokens:
            terms["memory"] = (needed - view.free_tokens) * rate
        late_s = max(0.0, ttft_s - asked.slack_s)
        if decodes:
            late_s += max(0.0, step_s - asked.tpot_s) * asked.num_output
        if late_s:
            terms["late"] = late_s * self.late_weight
        if asked.tenant:
            share = self._tenants.of(asked.tenant).tokens
            excess = share.get(name, 0.0) - sum(share.values()) / len(views)
            terms["tenant"] = max(0.0, excess) * rate * self.tenant_weight
        if asked.last == name:
            terms["affinity"] = -self.affinity_s
        return terms

    def _guess(
        self,
        asked: _Request,
        views: Sequence[_View],
        cached: Sequence[CachedPrefix],
        places: Sequence[int],
    ) -> tuple[list[CachedPrefix], list[int]]:
        """Where events are incomplete, only a session's last turn counts as cached. Of those instances two
        are drawn, and the less loaded one stays (Mitzenmacher 2001: the power of two choices)."""
        guessed = list(cached)
        for i, view in enumerate(views):
            if not view.is_fresh:
                tokens = asked.last_tokens if view.name == asked.last else 0
                guessed[i] = CachedPrefix(tokens, tokens)
        stale = [i for i in places if not views[i].is_fresh]
        drawn = stale if len(stale) < 2 else self._random.sample(stale, 2)
        kept = {min(drawn, key=lambda i: (views[i].queue_s, views[i].num_requests), default=-1)}
        kept |= {i for i in stale if views[i].name == asked.last}
        return guessed, [i for i in places if views[i].is_fresh or i in kept]

    def _choose(self, places: Sequence[int], costs: Sequence[float]) -> int:
        least = min(costs)
        if not self.temperature:
            return places[costs.index(least)]
        weights = [math.exp((least - cost) / self.temperature) for cost in costs]
        return self._random.choices(places, weights)[0]

    # -- placements

    def _separated(
        self,
        request: RequestMetadata,
        asked: _Request,
        views: Sequence[_View],
        cached: Sequence[CachedPrefix],
        kinds: int,
        at: int,
        whole_s: float,
    ) -> Placement | None:
        """The best pair of instances, if the policy prefers it to instance `at`."""
        first = {
            i: math.fsum(self._terms(asked, views, cached, i, decodes=False).values())
            for i in _of_kind(views, kinds, _PREFILL)
        }
        prefill = self._choose(list(first), list(first.values()))
        second = {
            i: math.fsum(self._decode_terms(asked, views[i], cached[i]).values())
            for i in _of_kind(views, kinds, _DECODE)
            if i != prefill
        }
        if not second:
            return None
        decode = self._choose(list(second), list(second.values()))
        terms = self._terms(asked, views, cached, prefill, decodes=False)
        whole_ttft_s = _ttft_s(self._terms(asked, views, cached, at))
        uncached = asked.num_tokens - min(cached[at].num_tokens, asked.num_tokens - 1)
        apart_s = first[prefill] + second[decode]
        case = SeparationCase(request, uncached, whole_s, apart_s, whole_ttft_s, _ttft_s(terms))
        reason = self._policy.separate(case)
        if not reason:
            return None
        late = self._decode_terms(asked, views[decode], cached[decode])
        terms |= {f"decode_{name}" if name in terms else name: value for name, value in late.items()}
        names = views[prefill].name, views[decode].name
        self._count(request, asked, views[prefill], cached[prefill], stays=names[1])
        views[decode].add_row(asked.context)
        self._placed.add(names[1], 0, round(asked.context))
        fetch_from = views[asked.peer].name if "fetch" in terms else ""
        return Placement(*names, reason, terms, fetch_from)

    def _decode_terms(self, asked: _Request, view: _View, prefix: CachedPrefix) -> dict[str, float]:
        """What the second half costs. Missing KV comes over the network."""
        num_cached = min(prefix.num_device_tokens, asked.num_tokens - 1)
        longer_s = view.longer_s(asked.context)
        step_s = view.step_s + longer_s
        terms = {
            "transfer": self.transfer_latency_s + (asked.num_tokens - num_cached) * self.transfer_token_s,
            "decode": asked.num_output * self.decode_weight * step_s,
            "slowdown": asked.shared * self.slowdown_weight * longer_s * view.num_requests,
        }
        needed = asked.num_tokens + asked.num_output - num_cached
        if needed > view.free_tokens:
            terms["memory"] = (needed - view.free_tokens) * view.rate
        late_s = max(0.0, step_s - asked.tpot_s) * asked.num_output
        if late_s:
            terms["late"] = late_s * self.late_weight
        return terms

    def _placement(
        self,
        request: RequestMetadata,
        asked: _Request,
        views: Sequence[_View],
        cached: Sequence[CachedPrefix],
        chosen: int,
    ) -> Placement:
        view = views[chosen]
        name = view.name
        terms = self._terms(asked, views, cached, chosen)
        reason = f"{cached[chosen].num_device_tokens} tokens cached, {view.queue_s:.3g} s ahead"
        self._count(request, asked, view, cached[chosen], stays=name)
        fetch_from = views[asked.peer].name if "fetch" in terms else ""
        return Placement(name, name, reason, terms, fetch_from)

    def _count(
        self, request: RequestMetadata, asked: _Request, view: _View, prefix: CachedPrefix, *, stays: str
    ) -> None:
        """Remember what this placement adds to the instance that computes the prompt. `stays`: where the
        request ends, and so where the next turn of its session finds its KV."""
        name = view.name
        compute = asked.num_tokens - min(prefix.num_tokens, asked.num_tokens - 1)
        self._learned.predict(name, view.queue_s + compute * view.rate)
        if stays == name:
            self._placed.add(name, compute, round(asked.context))
            view.add_row(asked.context)
        else:
            self._placed.add(name, compute)
            view.num_requests += 1
        view.queue_s += compute * view.rate
        if asked.tenant:
            self._tenants.add(asked.tenant, name, compute + asked.num_output)
        if request.session_id is not None:
            self._sessions.place(request.session_id, stays, asked.num_tokens)


def _ttft_s(terms: Mapping[str, float]) -> float:
    """Those terms that pass before the first token."""
    return math.fsum(terms.get(name, 0.0) for name in ("queue", "fetch", "prefill", "load"))


def _of_kind(views: Sequence[_View], kinds: int, wanted: int) -> Sequence[int]:
    """The places of instances of a wanted kind; `kinds` are those that there are."""
    if not kinds & ~wanted:
        return range(len(views))
    return [i for i, view in enumerate(views) if view.kind & wanted]


PLUGIN = CostRouter
