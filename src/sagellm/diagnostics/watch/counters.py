"""`ServerCounters`: what a server's `/metrics` say of its KV cache.

The names are those of vLLM, SGLang and sageLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import ConfigError

TIMEOUT_S = 5.0
MOST = 2**63
"""No counter is larger."""
MAX_BYTES = 16 * 2**20
"""Of one answer: metrics of a server with many models and ranks take one."""

QUERIED = (
    "vllm:prefix_cache_queries_total",
    "sagellm_prefix_cache_queries_total",
    "sglang:prompt_tokens_total",
)
HIT = ("vllm:prefix_cache_hits_total", "sagellm_prefix_cache_hits_total", "sglang:cached_tokens_total")
REQUESTS = ("vllm:request_prompt_tokens_count", "sagellm_requests_total", "sglang:num_requests_total")
ENGINES = {"vllm:": "vLLM", "sagellm_": "sageLLM", "sglang:": "SGLang"}


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Figures of one scrape; None for what the server does not say.

    Tokens are prompt tokens that were looked up in the prefix cache, and those of them that were found, since
    the server started. All ranks of the server are added up. `num_blocks` are blocks of `block_size` tokens
    where that is known (SGLang tells its tokens: blocks of one).
    """

    engine: str = ""
    model: str = ""
    num_queried_tokens: int | None = None
    num_hit_tokens: int | None = None
    num_requests: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    bytes_per_block: int | None = None

    @property
    def hit_ratio(self) -> float | None:
        """Hit tokens over queried tokens, 0 to 1."""
        if not self.num_queried_tokens or self.num_hit_tokens is None:
            return None
        return self.num_hit_tokens / self.num_queried_tokens

    def since(self, first: ServerCounters) -> ServerCounters:
        """These, with what was counted before `first` taken away. Nothing is, where the server has counted
        from 0 again since."""
        if (self.num_queried_tokens or 0) < (first.num_queried_tokens or 0):
            return self
        return replace(
            self,
            num_queried_tokens=_difference(self.num_queried_tokens, first.num_queried_tokens),
            num_hit_tokens=_difference(self.num_hit_tokens, first.num_hit_tokens),
            num_requests=_difference(self.num_requests, first.num_requests),
        )


def _difference(now: int | None, before: int | None) -> int | None:
    return None if now is None else now - (before or 0)


Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]
"""Labels and values, by the name of a metric."""


def scrape(url: str, clock: Clock | None = None) -> ServerCounters:
    """Fetch and read the metrics at `url`, within seconds. Raises `ConfigError` that says what to do."""
    return read_counters(fetch_metrics(url, clock), url)


def fetch_metrics(url: str, clock: Clock | None = None) -> str:
    """The text of the metrics at `url`. Raises as `scrape`."""
    clock = clock or MonotonicClock()
    text, deadline_s = bytearray(), clock.now() + 2 * TIMEOUT_S
    try:
        with httpx2.stream("GET", url, timeout=TIMEOUT_S, follow_redirects=True) as answer:
            if answer.status_code != 200:
                raise ConfigError(
                    f"no metrics at {url}: the server answers {answer.status_code}. Name their "
                    f"whole address, as http://host:8000/metrics; SGLang serves them with --enable-metrics"
                )
            for piece in answer.iter_bytes():
                text += piece
                if len(text) > MAX_BYTES or clock.now() > deadline_s:
                    raise ConfigError(f"{url} answers without end: these are no metrics")
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise ConfigError(
            f"no metrics at {url}: {str(error) or type(error).__name__}. http://host:port is where the "
            f"server answers requests; KV events have a port of their own, tcp://host:port"
        ) from error
    return text.decode(errors="replace")


def metrics_url(address: str) -> str:
    """The address of a server's metrics: `http://host:8000` gets the path `/metrics`, another path stays.

    So does `http://host:8000/v1`, as clients write it. Raises `ConfigError` for what is no such address.
    """
    try:
        parts = urlsplit(address)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{address!r} is no address of a server: write http://host:port")
    is_bare = parts.path.rstrip("/") in ("", "/v1")
    return parts._replace(path="/metrics").geturl() if is_bare else address


def read_samples(text: str, source: str = "the answer") -> Samples:
    """Read Prometheus' text format. Raises `ConfigError` if it is none."""
    try:
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if 0 <= sample.value <= MOST:  # neither NaN nor infinite
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise ConfigError(f"{source} is not in Prometheus' text format: {error}") from error
    return samples


def read_counters(text: str, source: str = "the answer") -> ServerCounters:
    """The counters in metrics. Raises `ConfigError` for those of a server that is not known."""
    samples = read_samples(text, source)
    prefix = next((prefix for prefix in ENGINES if any(name.startswith(prefix) for name in samples)), None)
    if prefix is None:
        raise ConfigError(
            f"{source} has no metrics of vLLM, SGLang or sageLLM (vllm:*, sglang:*, sagellm_*): it knows "
            f"{', '.join(sorted(samples)[:5]) or 'nothing'}"
        )
    labels = [label for name in samples if name.startswith(prefix) for label, _ in samples[name]]
    models = sorted({label["model_name"] for label in labels if label.get("model_name")})
    cache = dict(_cache_config(samples))
    return ServerCounters(
        engine=ENGINES[prefix],
        model=", ".join(models),
        num_queried_tokens=_sum_of(samples, QUERIED),
        num_hit_tokens=_sum_of(samples, HIT),
        num_requests=_sum_of(samples, REQUESTS),
        num_blocks=cache.get("num_blocks"),
        block_size=cache.get("block_size"),
        bytes_per_block=cache.get("bytes_per_block"),
    )


def _sum_of(samples: Samples, names: Sequence[str]) -> int | None:
    """The sum over ranks and labels of the first of `names` that is there."""
    values = next((samples[name] for name in names if name in samples), None)
    return None if values is None else round(sum(value for _, value in values))


def _cache_config(samples: Samples) -> Iterator[tuple[str, int]]:
    """Blocks, tokens per block and bytes per block, as far as the server tells."""
    ours = samples.get("sagellm_kv_blocks")
    if ours is not None:
        yield "num_blocks", round(sum(value for _, value in ours))
    slots = samples.get("sglang:max_total_num_tokens")
    if slots is not None:
        yield "num_blocks", round(sum(value for _, value in slots))
        yield "block_size", 1
    ranks = [labels for labels, _ in samples.get("vllm:cache_config_info", ())]
    if not ranks:
        return
    numbers = [_number(labels.get("num_gpu_blocks")) for labels in ranks]
    num_blocks = sum(number for number in numbers if number is not None)
    if num_blocks:
        yield "num_blocks", num_blocks
    block_size, memory = _number(ranks[0].get("block_size")), _number(ranks[0].get("kv_cache_memory_bytes"))
    if block_size:
        yield "block_size", block_size
    is_overridden = ranks[0].get("num_gpu_blocks_override", "None") != "None"
    if memory and numbers[0] and not is_overridden:
        yield "bytes_per_block", memory // numbers[0]


def _number(text: str | None) -> int | None:
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) <= len(str(MOST))
    return int(text or 0) if is_number else None
