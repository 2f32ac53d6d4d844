"""What `sagellm cache stat` and `clear` ask of a running server."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import httpx2
from pydantic import BaseModel, ValidationError

from sagellm.benchmarks.reporting import Table
from sagellm.core.config_layers import env_name
from sagellm.core.errors import ConfigError
from sagellm.core.ports import SagePorts

DEFAULT_URL = f"http://127.0.0.1:{int(SagePorts.HTTP)}"
TIMEOUT_S = 60.0
_TIERS = {
    "total": "sagellm_kv_tier_total_blocks",
    "cached": "sagellm_kv_tier_cached_blocks",
    "stored": "sagellm_kv_tier_stored_blocks_total",
    "loaded": "sagellm_kv_tier_loaded_blocks_total",
    "evicted": "sagellm_kv_tier_evicted_blocks_total",
    "dropped": "sagellm_kv_tier_dropped_blocks_total",
    "fault": "sagellm_kv_tier_fault",
}


class _Cleared(BaseModel):
    num_blocks: int


def base_url(url: str | None) -> str:
    """An address without the path that clients add."""
    return (url or DEFAULT_URL).rstrip("/").removesuffix("/v1")


def server_values(url: str | None) -> dict[str, Any]:
    """Blocks of the device and of each tier, hits, and misses by cause. Raises `ConfigError`."""
    from sagellm.diagnostics.watch.counters import fetch_metrics, metrics_url, read_samples

    address = metrics_url(base_url(url))
    samples = read_samples(fetch_metrics(address), address)
    if "sagellm_kv_blocks" not in samples:
        raise ConfigError(f"{address} has no metrics of sageLLM: name a sageLLM server with --url")

    def by_label(name: str, label: str) -> dict[str, int]:
        sums = Counter[str]()
        for labels, value in samples.get(name, ()):
            sums[labels.get(label, "")] += round(value)
        return dict(sums)

    def single(name: str) -> int:
        return round(sum(value for _, value in samples.get(name, ())))

    tiers: dict[str, dict[str, int]] = {}
    for kind, name in _TIERS.items():
        for tier, count in by_label(name, "tier").items():
            tiers.setdefault(tier, {})[kind] = count
    return {
        "device": by_label("sagellm_kv_blocks", "state"),
        "device_evicted": by_label("sagellm_kv_evicted_blocks_total", "cause"),
        "tiers": tiers,
        "queried_tokens": single("sagellm_prefix_cache_queries_total"),
        "hit_tokens": single("sagellm_prefix_cache_hits_total"),
        "misses": by_label("sagellm_kv_misses_total", "cause"),
        "tier_misses": by_label("sagellm_kv_tier_misses_total", "cause"),
    }


def server_tables(values: dict[str, Any]) -> list[Table]:
    """What `server_values` found."""
    device, num_queried = values["device"], values["queried_tokens"]
    held = device.get("active", 0) + device.get("cached", 0)
    evicted = sum(values["device_evicted"].values())
    rows = [("device", "", f"{held:,}", f"{sum(device.values()):,}", "", "", f"{evicted:,}", "")]
    kinds = ("stored", "loaded", "evicted", "dropped")
    for tier, counts in values["tiers"].items():
        state = "failed: see /health" if counts.get("fault") else ""
        numbers = [f"{counts.get(kind, 0):,}" for kind in ("cached", "total", *kinds)]
        rows.append((tier, state, *numbers))
    columns = ("where", "state", "blocks", "of", *kinds)
    tables = [Table("KV blocks", columns, rows, num_names=2)]
    hits = [("hit", f"{values['hit_tokens']:,}"), ("looked up", f"{num_queried:,}")]
    if num_queried:
        hits.append(("hit ratio", f"{values['hit_tokens'] / num_queried:.1%}"))
    tables.append(Table("Hits", ("prompt tokens, on the device or loaded", "tokens"), hits, num_names=1))
    for title, column, key in (
        ("Misses", "prompt blocks that were computed, by cause", "misses"),
        ("Tier misses", "blocks that did not verify, by cause", "tier_misses"),
    ):
        if causes := [(name.replace("_", " "), f"{n:,}") for name, n in values[key].items() if n]:
            tables.append(Table(title, (column, "blocks"), causes, num_names=1))
    return tables


def clear_server(url: str, admin_key: str | None) -> int:
    """Empty the device and all tiers; returns how many blocks. Raises `ConfigError`."""
    variable = env_name("server.admin_key")
    key = admin_key or os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"a server clears its cache for its admin key alone: give --admin-key or {variable}"
        )
    address = f"{base_url(url)}/reset_prefix_cache"
    headers, asked = {"Authorization": f"Bearer {key}"}, {"reset_external": "true"}
    try:
        answer = httpx2.post(address, params=asked, headers=headers, timeout=TIMEOUT_S)
        if answer.status_code == 200:
            return _Cleared.model_validate_json(answer.content).num_blocks
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ConfigError(f"no sageLLM server answers at {address}: {error}; name it with --url") from error
    except ValidationError as error:
        raise ConfigError(f"{address} is not of sageLLM: name a sageLLM server with --url") from error
    raise ConfigError(f"{address}: {refusal(answer)}")


def refusal(answer: httpx2.Response) -> str:
    """The message of a server that refused, in OpenAI's form, or the status."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}: is this a sageLLM server?"
