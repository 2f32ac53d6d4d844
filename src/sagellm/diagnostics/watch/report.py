"""`WatchReport`: what `sagellm watch` found, as data. The page, the terminal view and the JSON file show it.

Every hit ratio is hit tokens over queried prompt tokens, 0 to 1. A value that could not be measured is None,
and the text beside it says what would make it known.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

VERSION = 1
UNLIMITED = float("inf")


class Basis(Enum):
    """What a figure was computed from."""

    COUNTERS = "the server's own counters"
    EVENTS = "KV events"
    REQUESTS = "replayed requests"


@dataclass(frozen=True, slots=True)
class Rung:
    """One line of the hit-rate ladder. `policy` is `server` (what runs now), `lru`, `adaptive`, `optimum`
    (offline: it knows the future) or `routing` (the fleet's requests each go to the instance that has the
    most of their prefix). `capacity` is the factor on the server's KV memory, `UNLIMITED` for a cache that
    never evicts. `missing`: what would make the ratio known."""

    policy: str
    capacity: float
    hit_ratio: float | None
    basis: Basis
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Hit ratio by capacity: points `(num_blocks, hit_ratio)` in order of capacity."""

    policy: str
    basis: Basis
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class MissedTokens:
    """Prompt tokens that had to be computed, by cause; each has one. `not_aligned`: they equal cached tokens
    up to a place inside a block, and only whole blocks are shared. `unknown`: the events do not tell."""

    never_seen: int = 0
    evicted: int = 0
    not_aligned: int = 0
    other_namespace: int = 0
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class ReuseGaps:
    """How long blocks wait for their next use.

    `counts[i]` uses came at most `ends_s[i]` seconds after the
    one before, the last end is infinite. `of`: which uses are seen, as text."""

    ends_s: tuple[float, ...]
    counts: tuple[int, ...]
    of: str


@dataclass(frozen=True, slots=True)
class EvictedPrefix:
    """A prefix that was evicted and asked for again. `digest` names it without showing it; `text` is there
    only if a tokenizer was given."""

    digest: str
    num_tokens: int
    num_evictions: int
    num_recomputed_tokens: int
    text: str | None = None


@dataclass(frozen=True, slots=True)
class InstanceEvents:
    """What came from one instance. `num_cached`: blocks stored and not evicted since the watch began."""

    block_size: int | None
    num_cached: int
    num_batches: int
    num_events: int
    num_block_events: int
    num_other_group: int
    num_lost: int
    num_repaired: int
    num_restarts: int
    num_malformed: int


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """One endpoint. `num_lost` batches never arrived, `num_repaired` came by the replay socket. `hit_ratio`
    is from the counters of the watched time. `bytes_per_block` and `num_blocks` are None if unknown."""

    endpoint: str
    metrics_url: str | None
    engine: str
    model: str
    block_size: int | None
    num_blocks: int | None
    bytes_per_block: int | None
    num_batches: int
    num_events: int
    num_block_events: int
    num_lost: int
    num_repaired: int
    num_restarts: int
    num_malformed: int
    num_cached: int
    hit_ratio: float | None
    num_queried_tokens: int | None
    num_hit_tokens: int | None


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change. `gain_points`: expected points of hit ratio, 0 to 100."""

    text: str
    gain_points: float


@dataclass(frozen=True, slots=True)
class WatchReport:
    """All that was found from `began_s` (seconds since the epoch) on, for `duration_s` seconds. `coverage`:
    the share of the queried tokens that the reconstructed requests explain; None without them. `unknown`:
    what the events of this server cannot show, and how to see it. `advice`: best first; the first is the
    sentence shown on top."""

    began_s: float
    duration_s: float
    instances: tuple[InstanceReport, ...]
    ladder: tuple[Rung, ...]
    curves: tuple[Curve, ...]
    missed: MissedTokens
    gaps: ReuseGaps
    prefixes: tuple[EvictedPrefix, ...]
    coverage: float | None
    unknown: tuple[str, ...]
    advice: tuple[Advice, ...]
    version: int = VERSION
