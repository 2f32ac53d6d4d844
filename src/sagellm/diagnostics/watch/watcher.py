"""`Watcher`: follows servers for a while and makes a `WatchReport` of what it saw."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Self

from sagellm.control_plane.kv_events.sequence import Gap, Item, ReceivedBatch
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import ConfigError
from sagellm.core.types import Tokens
from sagellm.diagnostics.watch.accesses import CacheAccess, KeptAccesses
from sagellm.diagnostics.watch.advice import advice
from sagellm.diagnostics.watch.cache_view import MAX_BLOCKS, CacheView
from sagellm.diagnostics.watch.counters import ServerCounters
from sagellm.diagnostics.watch.endpoints import HOW_TO_PUBLISH, CounterWatch, EventReader, ServerAddress
from sagellm.diagnostics.watch.ladder import NEEDS_HITS, Ladder, Watched
from sagellm.diagnostics.watch.replays import OnReplay
from sagellm.diagnostics.watch.report import InstanceEvents, InstanceReport, MissedTokens, WatchReport

GIVEN_BY_SERVER = None
MOST_ERROR_POINTS = 2.0
"""A larger difference between a replay and the server is said."""
MIN_REQUESTS_FOR_PROCESSES = 3000
"""To replay: with fewer, starting processes takes longer than it saves."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What the user says of every server's KV cache, where its metrics do not. `bytes_per_token` of KV."""

    num_blocks: int | None = GIVEN_BY_SERVER
    bytes_per_token: int | None = GIVEN_BY_SERVER


class Watcher:
    """Watches `endpoints` from construction to `close`; `report` may be asked for at any time.

    A thread per endpoint reads events. `update` scrapes the metrics: call it every few seconds. Each whole
    request goes to `on_access`, if given. Raises `ConfigError` for a socket or metrics that
    cannot be reached at the start; later ones may come and go.
    """

    def __init__(
        self,
        endpoints: Sequence[ServerAddress],
        *,
        sizes: CacheSizes = CacheSizes(),
        max_blocks: int = MAX_BLOCKS,
        on_access: Callable[[CacheAccess, int], None] | None = None,
        wall_clock: Clock,
        clock: Clock | None = None,
    ) -> None:
        if not endpoints:
            raise ConfigError("name at least one server")
        self._endpoints = tuple(endpoints)
        self._sizes = sizes
        self._on_access = on_access
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._kept = KeptAccesses()
        self._view = CacheView(len(endpoints), max_blocks=max_blocks, on_access=self._keep)
        self._is_live = [False] * len(endpoints)
        for each in self._endpoints:
            each.check_sockets()
        self._counters = [CounterWatch(each.metrics) if each.metrics else None for each in endpoints]
        for index, counters in enumerate(self._counters):
            if counters is not None and counters.grown().engine not in ("", "vLLM"):
                self._view.set_answers_at_once(index)
        self._began_s, self._start_s = wall_clock.now(), self._clock.now()
        self._readers = [
            EventReader(each, partial(self._take, index)) if each.events else None
            for index, each in enumerate(endpoints)
        ]

    def _keep(self, access: CacheAccess) -> None:
        if not self._is_live[access.instance] or not self._view.sees_hits:
            return
        self._kept.add(access)
        block_size = self._view.instance(access.instance).block_size
        if self._on_access is not None and block_size is not None:
            self._on_access(access, block_size)

    def _take(self, index: int, item: Item) -> None:
        with self._lock:
            if not self._is_live[index] and isinstance(item, Gap):
                return  # these batches were published before the watch
            if not self._is_live[index] and not (isinstance(item, ReceivedBatch) and item.replayed):
                self._view.begin(index)
                self._is_live[index] = True
            self._view.feed(index, item)

    @property
    def num_block_events(self) -> int:
        """Stored and evicted blocks that the events named so far."""
        with self._lock:
            views = [self._view.instance(index) for index in range(len(self._endpoints))]
        return sum(view.num_block_events for view in views)

    @property
    def seconds(self) -> float:
        """How long the watch has lasted."""
        return self._clock.now() - self._start_s

    def update(self) -> None:
        """Scrape the metrics of all servers."""
        known = [counters for counters in self._counters if counters is not None]
        if known:
            with ThreadPoolExecutor(len(known)) as threads:  # one that hangs does not delay the others
                list(threads.map(CounterWatch.update, known))

    def close(self) -> None:
        """Stop reading, scrape once more, and end all requests."""
        for reader in self._readers:
            if reader is not None:
                reader.close()
        self.update()
        with self._lock:
            self._view.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def report(
        self,
        *,
        with_replays: bool = True,
        jobs: int = 1,
        decode: Callable[[Tokens], str] | None = None,
        on_replay: OnReplay = lambda case, num_done, num_all: None,
    ) -> WatchReport:
        """What was found so far. Replays take seconds: leave them out while the watch goes on.

        `jobs`: processes for replays, if there are `MIN_REQUESTS_FOR_PROCESSES` to replay. `on_replay` is
        called after each one. A `KeyboardInterrupt` leaves out those that had not ended."""
        with self._lock:
            instances = [self._instance(index) for index in range(len(self._endpoints))]
            watched = [
                Watched(self._counters_of(index), each.num_blocks, each.block_size)
                for index, each in enumerate(instances)
            ]
            ladder = Ladder(self._view, watched, list(self._kept) if with_replays else ())
            if with_replays:
                is_long = len(self._kept) >= MIN_REQUESTS_FOR_PROCESSES
                ladder.replay_all(jobs if is_long else 1, on_replay)
            missed = self._missed(ladder, watched)
            sizes = [(each.num_blocks or 0) * (each.bytes_per_block or 0) for each in instances]
            return WatchReport(
                began_s=self._began_s,
                duration_s=self.seconds,
                instances=tuple(instances),
                ladder=tuple(ladder.rungs()),
                curves=tuple(ladder.curves()),
                missed=missed,
                gaps=self._view.gaps(),
                prefixes=self._view.prefixes(decode=decode),
                coverage=ladder.coverage,
                unknown=(*self._unknown(instances), *ladder.limits(), *_replay_errors(ladder)),
                advice=tuple(advice(ladder, missed, sum(sizes) if all(sizes) else None)),
            )

    def _missed(self, ladder: Ladder, watched: Sequence[Watched]) -> MissedTokens:
        """The causes that events tell; what the counters have beyond them is unknown."""
        missed = self._view.missed(ladder.shares_of_singles)
        told = sum(astuple(missed))
        counters = [each.counters for each in watched if each.counters is not None]
        computed = sum((each.num_queried_tokens or 0) - (each.num_hit_tokens or 0) for each in counters)
        return replace(missed, unknown=missed.unknown + max(0, computed - told))

    def _counters_of(self, index: int) -> ServerCounters | None:
        counters = self._counters[index]
        return None if counters is None else counters.grown()

    def _instance(self, index: int) -> InstanceReport:
        endpoint, events = self._endpoints[index], self._view.instance(index)
        counters = self._counters_of(index) or ServerCounters()
        block_size = events.block_size or counters.block_size
        num_blocks = self._sizes.num_blocks or _in_blocks_of(counters, block_size)
        bytes_per_block = counters.bytes_per_block
        if self._sizes.bytes_per_token is not None and block_size is not None:
            bytes_per_block = self._sizes.bytes_per_token * block_size
        return InstanceReport(
            endpoint=endpoint.name,
            metrics_url=endpoint.metrics,
            engine=counters.engine,
            model=counters.model,
            block_size=block_size,
            num_blocks=num_blocks,
            bytes_per_block=bytes_per_block,
            num_batches=events.num_batches,
            num_events=events.num_events,
            num_block_events=events.num_block_events,
            num_lost=events.num_lost,
            num_repaired=events.num_repaired,
            num_restarts=events.num_restarts,
            num_malformed=events.num_malformed,
            num_cached=events.num_cached,
            hit_ratio=counters.hit_ratio,
            num_queried_tokens=counters.num_queried_tokens,
            num_hit_tokens=counters.num_hit_tokens,
        )

    def _unknown(self, instances: Sequence[InstanceReport]) -> list[str]:
        """What could not be seen, and why."""
        texts = []
        for index, each in enumerate(instances):
            reader, events = self._readers[index], self._view.instance(index)
            texts += _unseen(self._endpoints[index], each, events, reader)
            counters = self._counters[index]
            if counters is not None and counters.num_failed:
                texts.append(
                    f"{each.endpoint}: its metrics did not answer {counters.num_failed:,} times; what it "
                    "counted between the last answer and a restart is missing."
                )
        if self._kept.num_dropped:
            texts.append(f"The first {self._kept.num_dropped:,} requests were forgotten for lack of memory.")
        if not self._view.sees_hits and any(each.num_events for each in instances):
            texts.append(
                f"Hits are not reported, so policies and less memory cannot be compared: this {NEEDS_HITS}."
            )
        return texts


def _replay_errors(ladder: Ladder) -> list[str]:
    """Says so where replays do not explain what the server hits."""
    points = 100 * (ladder.replay_error or 0.0)
    if abs(points) < MOST_ERROR_POINTS:
        return []
    text = (
        f"Replayed LRU at the same memory is {points:+.1f} points off the server's own hit rate: the server "
        "has another policy, or hits that it had cached before the watch began could not be told apart. "
        "Compare replayed rungs with each other only."
    )
    return [text]


def _in_blocks_of(counters: ServerCounters, block_size: int | None) -> int | None:
    """The server's blocks, counted in blocks of `block_size` tokens."""
    if counters.num_blocks is None or block_size is None or counters.block_size is None:
        return counters.num_blocks
    return counters.num_blocks * counters.block_size // block_size


def _why_silent(instance: InstanceReport) -> str:
    if instance.num_queried_tokens:
        return f"Is it the socket of events, and not of replays or another server? {HOW_TO_PUBLISH}."
    return "A server publishes when it stores or evicts blocks: has it had any request?"


def _unseen(
    endpoint: ServerAddress, instance: InstanceReport, events: InstanceEvents, reader: EventReader | None
) -> list[str]:
    texts = []
    if endpoint.events is None:
        texts.append(
            f"{endpoint.name}: no KV events were asked for, so only its hit rate is known. {HOW_TO_PUBLISH}."
        )
    elif not instance.num_events:
        texts.append(f"{endpoint.name}: no KV event came, but the socket is open. {_why_silent(instance)}")
    if endpoint.metrics is None:
        texts.append(f"{endpoint.name}: its hit rate is not known; name its metrics, as ,http://host:port.")
    if reader is not None and reader.error is not None:
        texts.append(f"{endpoint.name}: reading events ended with an error: {reader.error!r}.")
    if instance.num_lost or instance.num_malformed:
        texts.append(
            f"{endpoint.name}: {instance.num_lost:,} batches were lost and {instance.num_malformed:,} events "
            "could not be read; what is said of this server may be wrong from there on. A replay socket "
            "(a second tcp:// address) repairs losses."
        )
    if events.num_other_group:
        texts.append(
            f"{endpoint.name}: {events.num_other_group:,} blocks of other groups of layers, or in other "
            "memory (host, disk), are left out."
        )
    return texts
