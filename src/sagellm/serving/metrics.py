"""Prometheus metrics of one server, in a registry of their own."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import sagellm
from sagellm.core.protocols.acceleration import AccelController
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats, TenantUse
from sagellm.core.protocols.kv_tiers import TierState
from sagellm.core.protocols.prefix_cache import PrefixReuseSnapshot
from sagellm.core.types import CapabilityDescriptor
from sagellm.engines.llm import TextDelta, Usage

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SLOW_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_LABEL = "model_name"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


@dataclass(slots=True)
class RequestTimes:
    """Times of one request, in seconds of the server's clock, and its tokens.

    `last_s`: the time of the last delta by choice. `queued_s`: from arrival to the first step.
    """

    arrived_s: float
    first_s: float | None = None
    last_s: dict[int, float] = field(default_factory=dict)
    queued_s: float | None = None
    usage: Usage = field(default_factory=Usage)
    finish_reason: str = ""


class ServerMetrics(Collector):
    """Counts requests and tokens, and shows the engine's load.

    Load and KV blocks are read from `stats` at a scrape. `diagnostics`: the last ones from the engine's
    thread. With `experts` it shows the rows of each. `accelerations`: of the `LLM`.
    """

    def __init__(
        self, model_name: str, capability: CapabilityDescriptor, stats: Callable[[], EngineStats], *,
        experts: bool = False, accelerations: AccelController | None = None,
    ) -> None:  # fmt: skip
        self.registry = CollectorRegistry()
        self.diagnostics = EngineDiagnostics()
        self._model = model_name
        self._stats = stats
        self._shows_experts = experts
        self._accelerations = accelerations
        self.registry.register(self)
        build = Info("sagellm_build", "Version and device", (_LABEL,), registry=self.registry)
        build.labels(model_name).info(
            {
                "version": sagellm.__version__,
                "python_version": platform.python_version(),
                "device": capability.device,
                "dtype": capability.dtype,
            }
        )
        http = "HTTP requests that have been answered, or whose client left (status 499)"
        self._http = self._counter("http_requests", http, "endpoint", "method", "status")
        self._requests = self._counter("requests", "Requests that have ended, by reason", "finish_reason")
        self._prompt = self._tokens("prompt_tokens", "Prompt tokens of requests that have started")
        self._cached = self._tokens("cached_tokens", "Prompt tokens taken from the KV cache")
        self._generated = self._tokens("generation_tokens", "Tokens generated")
        reasoning = "Tokens generated between the markers of reasoning; part of generation_tokens"
        self._reasoning = self._tokens("reasoning_tokens", reasoning)
        self._probes = self._tokens("probe_tokens", "Tokens drawn for early_exit that are in no answer")
        exits = "Choices of requests with early_exit: their reasoning was closed, or not"
        self._exits = self._counter("early_exits", exits, "outcome")
        steps = "Steps of reasoning by a small model: accepted, or rejected by the served model"
        self._steps = self._counter("reasoning_steps", steps, "outcome")
        samples = "Choices of requests with early_stop: used, or saved (aborted or never started)"
        self._samples = self._counter("early_stop_samples", samples, "outcome")
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first scheduling", _SLOW_S)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", _SLOW_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Between tokens of one sequence", _FAST_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token", _SLOW_S)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"sagellm_{name}", text, (_LABEL, *labels), registry=self.registry)

    def _tokens(self, name: str, text: str) -> Counter:
        return self._counter(name, text).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"sagellm_{name}", text, (_LABEL,), registry=self.registry, buckets=buckets)
        return family.labels(self._model)

    def on_delta(self, delta: TextDelta, times: RequestTimes, now_s: float) -> None:
        """Count one step of one choice: its latencies and new tokens."""
        usage, before = delta.usage, times.usage
        times.usage = usage
        self._prompt.inc(usage.prompt_tokens - before.prompt_tokens)
        self._cached.inc(max(0, usage.cached_tokens - before.cached_tokens))
        self._generated.inc(usage.completion_tokens - before.completion_tokens)
        self._reasoning.inc(usage.reasoning_tokens - before.reasoning_tokens)
        self._probes.inc(usage.probe_tokens - before.probe_tokens)
        if delta.exit is not None:
            self._exits.labels(self._model, "none" if delta.exit.ended_at is None else "closed").inc()
        if delta.drafted is not None:
            accepted = delta.drafted.num_accepted
            self._steps.labels(self._model, "accepted").inc(accepted)
            self._steps.labels(self._model, "rejected").inc(delta.drafted.num_steps - accepted)
        if times.queued_s is None and delta.queued_s is not None:
            times.queued_s = delta.queued_s
            self._queue.observe(delta.queued_s)
        count = len(delta.token_ids)
        if count:
            if not times.last_s:
                times.first_s = now_s
                self._ttft.observe(now_s - times.arrived_s)
            elif delta.index in times.last_s:
                for _ in range(count):
                    self._itl.observe((now_s - times.last_s[delta.index]) / count)
            times.last_s[delta.index] = now_s
        if delta.is_last:
            self._e2e.observe(now_s - times.arrived_s)
        if delta.consensus is not None:
            used, asked = delta.consensus.num_used, delta.consensus.num_samples
            self._samples.labels(self._model, "used").inc(used)
            self._samples.labels(self._model, "saved").inc(asked - used)

    def on_http(self, endpoint: str, method: str, status: int) -> None:
        """Count an HTTP request that has ended; `endpoint` is its route's path, or empty."""
        known = method if method in _METHODS else "other"
        self._http.labels(self._model, endpoint or "other", known, str(status)).inc()

    def on_end(self, reason: str) -> None:
        """Count a request that has ended: stop, length, abort (the client left) or error."""
        self._requests.labels(self._model, reason).inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's load: families of the prometheus client."""
        stats = self._stats()
        yield self._gauge("requests_running", "Requests in the batch", stats.num_running)
        yield self._gauge("requests_waiting", "Requests that wait for the batch", stats.num_waiting)
        blocks = {"active": stats.blocks_active, "cached": stats.blocks_cached, "free": stats.blocks_free}
        yield self._gauge("kv_blocks", "KV blocks by state", blocks, "state")
        total = sum(blocks.values())
        usage = "Share of the KV blocks that running requests and pins hold, 0 to 1"
        yield self._gauge("kv_cache_usage_ratio", usage, stats.blocks_active / total if total else 0.0)
        yield self._count("preemptions", "Preempted requests", stats.num_preemptions)
        found = self.diagnostics
        text = "Cached KV blocks that were given up, by cause"
        evicted = {"capacity": 0, "quota": 0, "cleared": 0, **found.evicted_blocks}
        yield self._count("kv_evicted_blocks", text, evicted, "cause")
        text = "Slots without a token in blocks of running requests; free blocks outside the longest free run"
        shares = {"internal": found.internal_fragmentation, "external": found.external_fragmentation}
        yield self._gauge("kv_fragmentation_ratio", text, shares, "kind")
        yield self._gauge("kv_pinned_prefixes", "Pinned prefixes", found.num_pinned_prefixes)
        yield self._gauge("kv_pinned_blocks", "KV blocks that pinned prefixes hold", found.num_pinned_blocks)
        text = "Time spent in each scheduling pass"
        yield self._count("scheduler_pass_seconds", text, found.pass_time_s, "pass")
        text = "Tokens that were proposed by speculative decoding, by position behind the last token"
        yield self._count("proposed_tokens", text, _by_position(found.speculation.proposed), "position")
        text = "Proposed tokens that the model has accepted, by position behind the last token"
        yield self._count("accepted_tokens", text, _by_position(found.speculation.accepted), "position")
        text = "Decoding time saved by speculative decoding, less what its steps took longer"
        yield self._gauge("speculation_saved_seconds", text, found.speculation.saved_s)
        if found.checkpoints:
            text = "Checkpoints of recurrent states in the prefix cache"
            yield self._gauge("kv_checkpoints", text, found.checkpoints["resident"])
            changes = {name: found.checkpoints[name] for name in ("made", "evicted")}
            text = "Checkpoints of recurrent states that were made and given up"
            yield self._count("kv_checkpoint_changes", text, changes, "change")
        text = "Tokens whose KV was copied from another position, for requests that allow it"
        yield self._count("kv_approximate_tokens", text, found.num_approximate_tokens)
        yield self._count("kv_dropped_tokens", "Tokens whose KV was dropped", found.num_dropped_tokens)
        yield self._count("step_seconds", "Time that the backend has computed steps", found.step_s)
        if found.communication_s is not None:
            text = "Time that the first rank has spent in communication with the others, waiting included"
            yield self._count("rank_communication_seconds", text, found.communication_s)
        yield from self._tiers(found.tiers)
        reuse = found.reuse_by_tenant
        text = "Tokens that admitted requests looked for, by configured tenant"
        queries = {tenant: tokens.num_tokens for tenant, tokens in reuse.items()}
        yield self._count("tenant_prefix_cache_queries", text, queries, "tenant")
        text = "Tokens that they found in the prefix index, by configured tenant"
        hits = {tenant: tokens.num_hit_tokens for tenant, tokens in reuse.items()}
        yield self._count("tenant_prefix_cache_hits", text, hits, "tenant")
        if found.tenants:
            yield from self._tenants(found.tenants)
        if stats.reuse is not None:
            yield from self._reuse(stats.reuse)
        if stats.misses is not None:
            text = "Prompt blocks that had to be computed, by cause"
            yield self._count("kv_misses", text, stats.misses._asdict(), "cause")
        if self._accelerations is not None:
            yield from self._acceleration(self._accelerations)
        if self._shows_experts:
            yield self._expert_rows()

    def _tenants(self, tenants: Mapping[str, TenantUse]) -> Iterator[Metric]:
        text = "Requests of a fleet that a tenant's quota counts, or that wait for it"
        family = GaugeMetricFamily("sagellm_tenant_requests", text, labels=(_LABEL, "tenant", "state"))
        for tenant, load in tenants.items():
            family.add_metric((self._model, tenant, "counted"), load.num_requests)
            family.add_metric((self._model, tenant, "waiting"), load.num_waiting)
        yield family
        text = "Requests that were refused for a tenant's quota"
        refused = {tenant: load.num_refused for tenant, load in tenants.items()}
        yield self._count("tenant_refused_requests", text, refused, "tenant")

    def _acceleration(self, accelerations: AccelController) -> Iterator[Metric]:
        for kind, text in (
            ("saved", "What each acceleration has saved, by unit"),
            ("spent", "What each acceleration has spent for that, by unit"),
        ):
            name = f"sagellm_acceleration_{kind}"
            family = GaugeMetricFamily(name, text, labels=(_LABEL, "acceleration", "unit"))
            for each in accelerations.report():
                amounts: Mapping[str, float] = getattr(each, kind)
                for unit, amount in amounts.items():
                    family.add_metric((self._model, each.name, unit), amount)
            yield family

    def _expert_rows(self) -> Metric:
        text = "Rows that each expert has computed"
        family = CounterMetricFamily("sagellm_expert_rows", text, labels=(_LABEL, "layer", "expert"))
        for layer, rows in self.diagnostics.expert_rows.items():
            for expert, count in enumerate(rows):
                family.add_metric((self._model, str(layer), str(expert)), count)
        return family

    def _tiers(self, tiers: Sequence[TierState]) -> Iterator[Metric]:
        """Memory below the device; nothing where there is none."""
        if not tiers:
            return
        for text, kind in (
            ("Slots of a tier below the device", "total"),
            ("Blocks that are in a tier below the device", "cached"),
            ("Those of them that are kept for preempted requests", "held"),
        ):
            levels = {str(tier.tier): getattr(tier, kind) for tier in tiers}
            yield self._gauge(f"kv_tier_{kind}_blocks", text, levels, "tier")
        for text, kind in (
            ("Blocks written to a tier", "stored"),
            ("Blocks that came back from a tier", "loaded"),
            ("Blocks that a tier gave up", "evicted"),
            ("Blocks that were not written to a tier, for lack of time or room", "dropped"),
            ("Blocks that were not written to a tier, for too few uses", "refused"),
        ):
            counts = {str(tier.tier): getattr(tier, kind) for tier in tiers}
            yield self._count(f"kv_tier_{kind}_blocks", text, counts, "tier")
        misses = CounterMetricFamily(
            "sagellm_kv_tier_misses", "Blocks of tiers that did not verify", labels=(_LABEL, "tier", "cause")
        )
        for tier in tiers:
            for cause, count in tier.misses.items():
                misses.add_metric((self._model, str(tier.tier), cause), count)
        yield misses
        broken = {str(tier.tier): float(bool(tier.fault)) for tier in tiers}
        yield self._gauge("kv_tier_fault", "1: the tier has failed and is not used", broken, "tier")

    def _reuse(self, reuse: PrefixReuseSnapshot) -> Iterator[Metric]:
        for name, text, count in (
            ("prefix_cache_queries", "Tokens that admitted requests looked for", reuse.num_tokens),
            ("prefix_cache_hits", "Tokens that they found in the prefix index", reuse.num_hit_tokens),
            ("prefix_cache_hit_requests", "Requests that found any", reuse.num_hit_requests),
        ):
            yield self._count(name, text, count)
        matches = HistogramMetricFamily("sagellm_prefix_match_seconds", "Prefix look-ups", labels=(_LABEL,))
        buckets = [("+Inf" if end == inf else repr(end), count) for end, count in reuse.match_buckets]
        matches.add_metric((self._model,), buckets, reuse.match_sum_s)
        yield matches

    def _count(self, name: str, text: str, counts: float | Mapping[str, float], *label: str) -> Metric:
        return self._family(CounterMetricFamily(f"sagellm_{name}", text, labels=(_LABEL, *label)), counts)

    def _gauge(self, name: str, text: str, levels: float | Mapping[str, float], *label: str) -> Metric:
        return self._family(GaugeMetricFamily(f"sagellm_{name}", text, labels=(_LABEL, *label)), levels)

    def _family(
        self, family: CounterMetricFamily | GaugeMetricFamily, values: float | Mapping[str, float]
    ) -> Metric:
        """The family with its value, or with one for each value of a label."""
        if isinstance(values, Mapping):
            for label, value in values.items():
                family.add_metric((self._model, label), value)
        else:
            family.add_metric((self._model,), values)
        return family


def _by_position(counts: Sequence[int]) -> dict[str, int]:
    """The first position has a value before anything is proposed."""
    return {str(position): count for position, count in enumerate(counts or (0,))}
