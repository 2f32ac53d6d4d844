"""`cost`: the instance where a request costs least, in seconds.

Every reason is a term in seconds, so that they can be added: what waits there, what of the prompt must be
computed, loaded from a lower tier or fetched from a peer, what the answer takes, how it delays others,
which goals are missed. `Placement.terms` gives those of the instance that was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, NamedTuple

from sagellm.control_plane.router._history import (
    LearnedSpeeds,
    PlacedLoad,
    Sessions,
    TenantLoad,
)
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

    __slots__ = ("free_tokens", "instance", "is_fresh", "kind", "num_requests", "queue_s", "rate", "step_s")

    def __init__(
        self,
        instance: ExecutionInstance,
        kind: InstanceType,
        rate: float,
        step_s: float,
        placed: tuple[int, int],
    ) -> None:
        self.instance = instance
        self.kind = _BITS[kind]
        self.is_fresh = instance.is_fresh
        self.rate = rate
        self.step_s = step_s
        self.num_requests = instance.num_requests + placed[0]
        self.queue_s = (instance.num_queued_tokens + placed[1]) * rate
        blocks = instance.num_free_blocks
        self.free_tokens = blocks * instance.block_size if instance.block_size else math.inf


class _Request(NamedTuple):
    """What of a request enters its cost. `peer`: the instance with the longest cached prefix, `peer_tokens`;
    -1: nothing is fetched."""

    num_tokens: int
    num_output: int
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
    `expected_output`: tokens, where a request does not say. `decode_weight`: of the time that the answer
    takes. `delay_weight`: of the time by which a prompt delays each request that runs there. `late_weight`:
    of each second by which a goal would be missed. `tenant_weight`: of what a tenant has more on an instance
    than on average. `affinity_s`: what the instance of a session's last turn is worth, all else equal.
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
    decode_weight: float = 0.1
    delay_weight: float = 0.02
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

    def __post_init__(self) -> None:
        for name in ("temperature", "load_token_s", "transfer_token_s", "transfer_latency_s", "decode_weight",
                     "delay_weight", "late_weight", "tenant_weight", "affinity_s"):  # fmt: skip
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is a number from 0 on, got {value}")
        if not (0 < self.prefill_token_s < math.inf and 0 < self.step_s < math.inf):
            raise ConfigError(
                f"prefill_token_s and step_s are above 0, got {self.prefill_token_s} and {self.step_s}"
            )
        self._random = Random(self.seed)
        self._policy = separation_policy(self.separation)
        self._clock = clock = self.clock or MonotonicClock()
        self._placed = PlacedLoad(clock)
        self._learned = LearnedSpeeds(self.prefill_token_s, self.step_s)
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

    def _all_views(self, instances: Sequence[ExecutionInstance]) -> tuple[list[_View], int, bool]:
        """A view of each instance, their kinds, and whether all are fresh."""
        known, views, kinds, is_fresh = self._views, [], 0, True
        for instance in instances:
            view = known.get(instance.instance_id)
            if view is None or view.instance is not instance:
                rate, step_s = self._learned.of(instance)
                kind = self._parts.get(instance.instance_id, instance.kind)
                view = _View(instance, kind, rate, step_s, self._placed.of(instance))
                known[instance.instance_id] = view
            views.append(view)
            kinds |= view.kind
            is_fresh &= view.is_fresh
        if len(known) > 2 * len(views) + 64:  # instances that are gone
            self._views = {view.instance.instance_id: view for view in views}
        return views, kinds, is_fresh

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
        return _Request(
            num_tokens,
            wanted if wanted > 0 else self.expected_output,
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

        The sum of `_terms`, which says of what. One loop without calls, as it runs for each instance of a
        fleet (`sagellm bench micro router`)."""
        num_tokens, num_output, slack_s, tpot_s, tenant, last, _, peer, peer_tokens = asked
        most, needed = num_tokens - 1, num_tokens + num_output
        delay, load, late = self.delay_weight, self.load_token_s, self.late_weight
        transfer, latency_s = self.transfer_token_s, self.transfer_latency_s
        decode = num_output * self.decode_weight
        share = self._tenants.of(tenant).tokens if tenant else {}
        mean = sum(share.values()) / len(views)
        costs = []
        for i in places:
            view, (on_device, in_all) = views[i], cached[i]
            if in_all > most:
                in_all, on_device = most, min(most, on_device)
            rate, step_s, ttft_s, compute = view.rate, view.step_s, view.queue_s, num_tokens - in_all
            if peer_tokens > in_all and i != peer:
                fetch_s = latency_s + (peer_tokens - in_all) * transfer
                if fetch_s < (peer_tokens - in_all) * rate:
                    ttft_s += fetch_s
                    compute = num_tokens - peer_tokens
            prefill_s = compute * rate
            ttft_s += prefill_s
            if in_all != on_device:
                ttft_s += (in_all - on_device) * min(load, rate)
            cost = ttft_s + prefill_s * delay * view.num_requests + decode * step_s
            if needed - on_device > view.free_tokens:
                cost += (needed - on_device - view.free_tokens) * rate
            if ttft_s > slack_s:
                cost += (ttft_s - slack_s) * late
            if step_s > tpot_s:
                cost += (step_s - tpot_s) * num_output * late
            if share:
                excess = share.get(view.instance.instance_id, 0.0) - mean
                cost += max(0.0, excess) * rate * self.tenant_weight
            costs.append(cost)
        for at, i in enumerate(places) if last else ():
            if views[i].instance.instance_id == last:
                costs[at] -= self.affinity_s
        return costs

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
        name, rate = view.instance.instance_id, view.rate
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
        terms["delay"] = compute * rate * self.delay_weight * view.num_requests
        if decodes:
            terms["decode"] = asked.num_output * self.decode_weight * view.step_s
        needed = asked.num_tokens + (asked.num_output if decodes else 0) - on_device
        if needed > view.free_tokens:
            terms["memory"] = (needed - view.free_tokens) * rate
        late_s = max(0.0, ttft_s - asked.slack_s)
        if decodes:
            late_s += max(0.0, view.step_s - asked.tpot_s) * asked.num_output
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
                tokens = asked.last_tokens if view.instance.instance_id == asked.last else 0
                guessed[i] = CachedPrefix(tokens, tokens)
        stale = [i for i in places if not views[i].is_fresh]
        drawn = stale if len(stale) < 2 else self._random.sample(stale, 2)
        kept = {min(drawn, key=lambda i: (views[i].queue_s, views[i].num_requests), default=-1)}
        kept |= {i for i in stale if views[i].instance.instance_id == asked.last}
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
        names = views[prefill].instance.instance_id, views[decode].instance.instance_id
        self._count(request, asked, views[prefill], cached[prefill], stays=names[1])
        views[decode].num_requests += 1
        self._placed.add(names[1], 0)
        fetch_from = views[asked.peer].instance.instance_id if "fetch" in terms else ""
        return Placement(*names, reason, terms, fetch_from)

    def _decode_terms(self, asked: _Request, view: _View, prefix: CachedPrefix) -> dict[str, float]:
        """What the second half costs. Missing KV comes over the network."""
        num_cached = min(prefix.num_device_tokens, asked.num_tokens - 1)
        terms = {
            "transfer": self.transfer_latency_s + (asked.num_tokens - num_cached) * self.transfer_token_s,
            "decode": asked.num_output * self.decode_weight * view.step_s,
        }
        needed = asked.num_tokens + asked.num_output - num_cached
        if needed > view.free_tokens:
            terms["memory"] = (needed - view.free_tokens) * view.rate
        late_s = max(0.0, view.step_s - asked.tpot_s) * asked.num_output
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
        name = view.instance.instance_id
        terms = self._terms(asked, views, cached, chosen)
        reason = f"{cached[chosen].num_device_tokens} tokens cached, {view.queue_s:.3g} s ahead"
        self._count(request, asked, view, cached[chosen], stays=name)
        fetch_from = views[asked.peer].instance.instance_id if "fetch" in terms else ""
        return Placement(name, name, reason, terms, fetch_from)

    def _count(
        self, request: RequestMetadata, asked: _Request, view: _View, prefix: CachedPrefix, *, stays: str
    ) -> None:
        """Remember what this placement adds to the instance that computes the prompt. `stays`: where the
        request ends, and so where the next turn of its session finds its KV."""
        name = view.instance.instance_id
        compute = asked.num_tokens - min(prefix.num_tokens, asked.num_tokens - 1)
        self._learned.predict(name, view.queue_s + compute * view.rate)
        self._placed.add(name, compute)
        view.queue_s += compute * view.rate
        view.num_requests += 1
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
