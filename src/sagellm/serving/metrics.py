"""Prometheus metrics of one server, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from sagellm.core.protocols.engine import EngineStats
from sagellm.core.protocols.prefix_cache import MissCounts, PrefixReuseSnapshot
from sagellm.engines.llm import TextDelta, Usage

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SLOW_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_LABEL = "model_name"


class RequestTimes:
    """When one request arrived and when its choices were last heard of, in seconds of the server's clock."""

    __slots__ = ("arrived_s", "last_s", "usage")

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.last_s: dict[int, float] = {}
        self.usage = Usage()


class ServerMetrics:
    """Counts what requests bring; load and KV blocks are read from `stats` when scraped."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model_name, stats))
        self._model = model_name
        self._requests = self._counter("requests", "Requests that have ended, by reason", "finish_reason")
        self._prompt = self._tokens("prompt_tokens", "Prompt tokens of requests that have started")
        self._cached = self._tokens("cached_tokens", "Prompt tokens taken from the KV cache")
        self._generated = self._tokens("generation_tokens", "Tokens generated")
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
        """One step of one choice: latencies, and tokens beyond what was counted of the request."""
        self._count(delta.usage, times)
        count = len(delta.token_ids)
        if count:
            self._observe_latency(delta.index, count, times, now_s)
        if delta.is_last:
            self._e2e.observe(now_s - times.arrived_s)

    def on_end(self, reason: str) -> None:
        """A request has ended: stop, length, abort (the client left), error."""
        self._requests.labels(self._model, reason).inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def _count(self, usage: Usage, times: RequestTimes) -> None:
        before, times.usage = times.usage, usage
        self._prompt.inc(usage.prompt_tokens - before.prompt_tokens)
        self._cached.inc(max(0, usage.cached_tokens - before.cached_tokens))
        self._generated.inc(usage.completion_tokens - before.completion_tokens)

    def _observe_latency(self, index: int, count: int, times: RequestTimes, now_s: float) -> None:
        if not times.last_s:
            self._ttft.observe(now_s - times.arrived_s)
        elif index in times.last_s:
            for _ in range(count):
                self._itl.observe((now_s - times.last_s[index]) / count)
        times.last_s[index] = now_s


class _EngineCollector(Collector):
    """The engine's load at the moment of the scrape."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._model = model_name
        self._stats = stats

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        stats = self._stats()
        yield self._gauge("requests_running", "Requests in the batch", stats.num_running)
        yield self._gauge("requests_waiting", "Requests that wait for the batch", stats.num_waiting)
        blocks = GaugeMetricFamily("sagellm_kv_blocks", "KV blocks by state", labels=(_LABEL, "state"))
        blocks.add_metric((self._model, "active"), stats.blocks_active)
        blocks.add_metric((self._model, "cached"), stats.blocks_cached)
        blocks.add_metric((self._model, "free"), stats.blocks_free)
        yield blocks
        preemptions = CounterMetricFamily("sagellm_preemptions", "Preempted requests", labels=(_LABEL,))
        preemptions.add_metric((self._model,), stats.num_preemptions)
        yield preemptions
        text = "Blocks in host memory with KV of preempted requests"
        yield self._gauge("kv_host_blocks_used", text, stats.host_blocks_used)
        if stats.reuse is not None:
            yield from self._reuse(stats.reuse)
        if stats.misses is not None:
            yield self._misses(stats.misses)

    def _reuse(self, reuse: PrefixReuseSnapshot) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        for name, text, count in (
            ("prefix_cache_queries", "Tokens that admitted requests looked for", reuse.num_tokens),
            ("prefix_cache_hits", "Tokens that they found in the prefix index", reuse.num_hit_tokens),
            ("prefix_cache_hit_requests", "Requests that found any", reuse.num_hit_requests),
        ):
            family = CounterMetricFamily(f"sagellm_{name}", text, labels=(_LABEL,))
            family.add_metric((self._model,), count)
            yield family
        matches = HistogramMetricFamily("sagellm_prefix_match_seconds", "Prefix look-ups", labels=(_LABEL,))
        buckets = [("+Inf" if end == inf else repr(end), count) for end, count in reuse.match_buckets]
        matches.add_metric((self._model,), buckets, reuse.match_sum_s)
        yield matches

    def _misses(self, misses: MissCounts) -> CounterMetricFamily:
        text = "Prompt blocks that had to be computed, by cause"
        family = CounterMetricFamily("sagellm_kv_misses", text, labels=(_LABEL, "cause"))
        for cause, count in misses._asdict().items():
            family.add_metric((self._model, cause), count)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"sagellm_{name}", text, labels=(_LABEL,))
        family.add_metric((self._model,), value)
        return family
