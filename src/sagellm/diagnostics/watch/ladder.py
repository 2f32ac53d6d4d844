"""The hit-rate ladder: what a server hits, and what it could hit.

Three sources, and each rung names its own. The server's counters say what it hits now. KV events say what LRU
hits with more memory (`ghosts.py`), and what another instance held. Where whole requests are known, they are
replayed through the real prefix index and the real policies, as `sagellm replay` does; the offline optimum is
that of `benchmarks/replay/optimum.py`. A replay knows no running requests and stores an answer together with
its prompt; the rung "LRU, same memory" beside "now" shows how much that matters.

**A watch that begins in the middle.** Most servers have full caches when a watch begins. Replays start with
the blocks of them that were hit (`WatchedRequests`). What the server had evicted before is not known: for LRU
with more memory it is estimated (`tokens_within`), for `adaptive` and the optimum it is missing, and so is
what `adaptive` would have learned. `limits` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from sagellm.core.types import Tokens
from sagellm.diagnostics.watch.accesses import CacheAccess
from sagellm.diagnostics.watch.cache_view import CacheView
from sagellm.diagnostics.watch.counters import ServerCounters
from sagellm.diagnostics.watch.ghosts import DepthCurve
from sagellm.diagnostics.watch.replays import OnReplay, WatchReplay, run_cases
from sagellm.diagnostics.watch.report import UNLIMITED, Basis, Curve, Rung

REPLAYED = ("lru", "adaptive", "optimum")
REPLAY_FACTORS = (1.0, 2.0, 0.5, 4.0, 1.5, 0.75, 3.0, 0.25)
"""The first ones are replayed first: the rungs need them."""
EVENT_FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
LEAST_COVERAGE = 0.9
"""Share of the queried tokens that known requests must explain before they are replayed."""
MOST_FREE_AT_FIRST = 0.1
"""Share of a server's blocks that may be free when the watch begins, if its cache counts as full."""
NEEDS_HITS = (
    "needs whole requests: run with --proxy, or let clients send vllm_xargs: {kv_cache_report_mode: full}"
)
NEEDS_COUNTERS = "needs the server's counters: name its metrics behind a comma, as ,http://host:8000"
NEEDS_SIZE = "needs the number of KV blocks: name the server's metrics behind a comma, or give --blocks"
ESTIMATED = (
    "The server's cache was full when the watch began. What it had evicted before is not known, so LRU with "
    "more memory is estimated from the reuse that was seen."
)
TOO_SHORT = (
    "The server's cache was full when the watch began, and since then it evicted too little to say what LRU "
    "with double memory would hit: that figure is rough, and mostly too low. Watch until it has evicted "
    "twice its size."
)
LOWER_BOUNDS = (
    "Replays begin with the blocks that the server had at the start and hit later. `adaptive` and the "
    "optimum would have kept others, and learned, before: their figures are lower bounds, and rise with a "
    "longer watch."
)
LEFT_OUT = "left out: the replays were ended before"
NEEDS_REQUESTS = "needs requests: no prompt was looked up in the watched time"


@dataclass(frozen=True, slots=True)
class Watched:
    """What is known of one instance at the end.

    `counters`: of the watched time. `num_blocks`: of the KV cache, in blocks of the events."""

    counters: ServerCounters | None
    num_blocks: int | None
    block_size: int | None


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums over all instances, in prompt tokens. None: the counters of an instance are missing."""

    queried: int | None
    hit: int | None

    @classmethod
    def of(cls, watched: Sequence[Watched]) -> TokenSums:
        counters = [each.counters or ServerCounters() for each in watched]
        return cls(
            _all_or_none([each.num_queried_tokens for each in counters]),
            _all_or_none([each.num_hit_tokens for each in counters]),
        )

    @property
    def ratio(self) -> float | None:
        return self.hit / self.queried if self.queried and self.hit is not None else None


def _all_or_none(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def share_of_singles(view: CacheView, instance: int, counters: ServerCounters | None) -> float:
    """Which part of the blocks that were stored alone belongs to prompts.

    It is 0 to 1; `cache_view.py` says why it is needed.
    The counters say how many prompt tokens were computed. Prompts that surely were stored explain some of
    them, and so do their ends, which fill no block: half a block each. Singles explain the rest. Without
    counters it is 0.
    """
    block_size = view.instance(instance).block_size
    sure, single = view.stored_tokens(instance)
    if counters is None or not single or block_size is None:
        return 0.0
    if counters.num_queried_tokens is None or counters.num_hit_tokens is None:
        return 0.0
    ends = (counters.num_requests or 0) * block_size / 2
    computed = counters.num_queried_tokens - counters.num_hit_tokens
    return min(1.0, max(0.0, (computed - ends - sure) / single))


def with_repeated(accesses: Sequence[CacheAccess], watched: Sequence[Watched]) -> list[CacheAccess]:
    """Requests, and the repeated look-ups that must have been requests too.

    A request that waits for memory is looked up in each step, as others with the same prompt would be. The
    events do not tell which, but the counters say how many requests there were.
    """
    missing = [(each.counters.num_requests or 0) if each.counters else 0 for each in watched]
    for access in accesses:
        missing[access.instance] -= 1
    requests = []
    for access in accesses:
        num_more = max(0, min(access.num_repeated, missing[access.instance]))
        missing[access.instance] -= num_more
        hit = Tokens(access.blocks.slice(0, access.num_hit))
        requests += [replace(access, blocks=hit, num_queried=access.num_hit)] * num_more
        requests.append(access)
    return requests


def coverage(accesses: Sequence[CacheAccess], watched: Sequence[Watched]) -> float | None:
    """The share of the queried tokens that known requests explain; None without counters."""
    queried = TokenSums.of(watched).queried
    return min(1.0, _queried_tokens(accesses, watched) / queried) if queried else None


def _queried_tokens(accesses: Sequence[CacheAccess], watched: Sequence[Watched]) -> float:
    """Prompt tokens of the requests; the end of each counts as half a block."""
    return sum((access.num_queried + 0.5) * (watched[access.instance].block_size or 0) for access in accesses)


class Ladder:
    """The rungs and curves of one watch. `accesses` are whole requests, if any are known."""

    def __init__(
        self, view: CacheView, watched: Sequence[Watched], accesses: Sequence[CacheAccess] = ()
    ) -> None:
        self._view = view
        self._watched = watched
        self._sums = TokenSums.of(watched)
        self._shares = [share_of_singles(view, i, each.counters) for i, each in enumerate(watched)]
        self._num_blocks = _all_or_none([each.num_blocks for each in watched])
        accesses = with_repeated(accesses, watched)
        self.coverage = coverage(accesses, watched) if view.sees_hits else None
        is_whole = view.sees_hits and (self.coverage is None or self.coverage >= LEAST_COVERAGE)
        self._accesses = list(accesses) if is_whole else []
        self._hits: dict[WatchReplay, int] = {}
        self._is_ended = False

    @property
    def now(self) -> float | None:
        """What the server hits."""
        return self._sums.ratio

    @property
    def num_queried_tokens(self) -> int | None:
        return self._sums.queried

    @property
    def is_fleet(self) -> bool:
        return len(self._watched) > 1

    @property
    def shares_of_singles(self) -> Sequence[float]:
        """By instance; see `share_of_singles`."""
        return self._shares

    def lru_from_events(self, factor: float) -> float | None:
        """The hit ratio of LRU with `factor` times the memory, from 1 on."""
        if self._sums.queried is None or self._sums.hit is None or not self._sums.queried:
            return None
        if factor != UNLIMITED and self._num_blocks is None:
            return None
        gained = sum(
            curve.within((factor - 1) * (each.num_blocks or 0) if factor != UNLIMITED else UNLIMITED)
            for curve, each in zip(self._depth_curves, self._watched, strict=True)
        )
        return min(1.0, (self._sums.hit + gained) / self._sums.queried)

    @cached_property
    def _depth_curves(self) -> list[DepthCurve]:
        return [
            self._view.depth_curve(index, share, had_past=self._was_full(index))
            for index, share in enumerate(self._shares)
        ]

    def _was_full(self, index: int) -> bool:
        """Whether an instance's cache was full when the watch began."""
        free, num_blocks = self._view.num_free_at_first(index), self._watched[index].num_blocks
        return free is not None and num_blocks is not None and free <= MOST_FREE_AT_FIRST * num_blocks

    @property
    def _had_past(self) -> bool:
        return any(map(self._was_full, range(len(self._watched))))

    def limits(self) -> Iterator[str]:
        """What the figures lack since the server had a past."""
        if not self._had_past:
            return
        double = zip(self._depth_curves, self._watched, strict=True)
        is_enough = all(curve.known_until >= (each.num_blocks or 0) for curve, each in double)
        yield ESTIMATED if is_enough else TOO_SHORT
        if self._accesses:
            yield LOWER_BOUNDS

    def routed(self) -> float | None:
        """The hit ratio if prompt blocks that another instance held had been hits."""
        if self._sums.queried is None or self._sums.hit is None or not self._sums.queried:
            return None
        shares = enumerate(self._shares)
        gained = sum(self._view.held_elsewhere(instance, share) for instance, share in shares)
        return min(1.0, (self._sums.hit + gained) / self._sums.queried)

    def replay_all(self, jobs: int = 1, on_replay: OnReplay = lambda case, num_done, num_all: None) -> None:
        """Make the replays of all rungs and curves now, in that many processes.

        Without it each is made when it is asked for. A `KeyboardInterrupt` ends it; what is missing then
        stays unknown."""
        if not self._accesses or self._num_blocks is None:
            return
        quick_first = ("lru", "optimum", "adaptive")
        cases = [
            case
            for policy in quick_first
            for factor in REPLAY_FACTORS
            for case in self._cases(policy, factor)
        ]
        if self._pooled_case is not None:
            cases.insert(0, self._pooled_case)
        self._hits |= run_cases(self._accesses, cases, jobs, on_replay)
        self._is_ended = len(self._hits) < len(set(cases))

    def replayed(self, policy: str, factor: float) -> float | None:
        """The hit ratio of a policy with `factor` times the memory."""
        if not self._accesses or self._num_blocks is None:
            return None
        cases = self._cases(policy, factor)
        hits = [self._hit_blocks(case) for case in cases]
        sizes = [self._watched[case.instance or 0].block_size or 0 for case in cases]
        if None in hits:
            return None
        hit_tokens = sum((hit or 0) * size for hit, size in zip(hits, sizes, strict=True))
        return hit_tokens / _queried_tokens(self._accesses, self._watched)

    @property
    def replay_error(self) -> float | None:
        """Replayed LRU at the same memory minus what the server hits.

        It is large where the server does not evict as LRU does, or the watch began with a full cache."""
        lru = self.replayed("lru", 1.0)
        return None if lru is None or self.now is None else lru - self.now

    def pooled(self) -> float | None:
        """The hit ratio of one LRU cache for the whole fleet, with its memory.

        None where requests are not known, or the instances have other block sizes."""
        hits = self._hit_blocks(self._pooled_case) if self._pooled_case is not None else None
        if hits is None:
            return None
        return hits * (self._watched[0].block_size or 0) / _queried_tokens(self._accesses, self._watched)

    @property
    def _pooled_case(self) -> WatchReplay | None:
        block_size = self._watched[0].block_size
        is_alike = all(each.block_size == block_size for each in self._watched)
        if not self.is_fleet or not self._accesses or not self._num_blocks or not block_size or not is_alike:
            return None
        return WatchReplay(None, "lru", self._num_blocks)

    def _cases(self, policy: str, factor: float) -> list[WatchReplay]:
        return [
            WatchReplay(
                index, policy, max(1, round(factor * each.num_blocks)), self._num_initial(index, factor)
            )
            for index, each in enumerate(self._watched)
            if each.num_blocks and each.block_size
        ]

    def _num_initial(self, index: int, factor: float) -> int:
        """Blocks that a smaller cache than the server's held a part of; see `WatchedRequests`."""
        free, num_blocks = self._view.num_free_at_first(index), self._watched[index].num_blocks
        return 0 if factor >= 1 or free is None or num_blocks is None else max(0, num_blocks - free)

    def _hit_blocks(self, case: WatchReplay) -> int | None:
        if case not in self._hits and not self._is_ended:
            self._hits |= run_cases(self._accesses, [case])
        return self._hits.get(case)

    def rungs(self) -> Iterator[Rung]:
        """All rungs: the same memory first, then less and more, then the fleet."""
        ratio = self._sums.ratio
        uncounted = NEEDS_COUNTERS if self._sums.queried is None else NEEDS_REQUESTS
        yield Rung("server", 1.0, ratio, Basis.COUNTERS, "" if ratio is not None else uncounted)
        for policy, factor in (*((policy, 1.0) for policy in REPLAYED), ("lru", 0.5), ("adaptive", 2.0)):
            ratio = self.replayed(policy, factor)
            yield Rung(policy, factor, ratio, Basis.REQUESTS, "" if ratio is not None else self._missing())
        for factor in (2.0, UNLIMITED):
            ratio = self.lru_from_events(factor)
            missing = NEEDS_SIZE if self._sums.queried else uncounted
            yield Rung("lru", factor, ratio, Basis.EVENTS, "" if ratio is not None else missing)
        if self.is_fleet:
            ratio = self.routed()
            yield Rung("routing", 1.0, ratio, Basis.EVENTS, "" if ratio is not None else uncounted)
            ratio = self.pooled()
            if ratio is not None:
                yield Rung("routing", 1.0, ratio, Basis.REQUESTS)

    def _missing(self) -> str:
        """Why requests cannot be replayed, or were not."""
        if self._is_ended:
            return LEFT_OUT
        if self._num_blocks is None:
            return NEEDS_SIZE
        if self._view.sees_hits and self.coverage is not None and self.coverage < LEAST_COVERAGE:
            return (
                f"only {100 * self.coverage:.0f} % of the prompt tokens are of whole requests; {NEEDS_HITS}"
            )
        return NEEDS_HITS

    def curves(self) -> Iterator[Curve]:
        """Hit ratio by capacity: by replays where requests are known, else by events."""
        if self._num_blocks is None:
            return
        for policy in REPLAYED if self._accesses else ():
            points = self._points(partial(self._replayed_or_known, policy), sorted(REPLAY_FACTORS))
            if points:
                yield Curve(policy, Basis.REQUESTS, points)
        if not self._accesses and self._sums.ratio is not None:
            yield Curve("lru", Basis.EVENTS, self._points(self.lru_from_events, EVENT_FACTORS))

    def _replayed_or_known(self, policy: str, factor: float) -> float | None:
        """The hit ratio by replay, or by events where they know more.

        That is LRU with more memory than a server with a past has."""
        if policy == "lru" and factor > 1 and self._had_past:
            return self.lru_from_events(factor)
        return self.replayed(policy, factor)

    def _points(
        self, ratio_at: Callable[[float], float | None], factors: Sequence[float]
    ) -> tuple[tuple[int, float], ...]:
        total = self._num_blocks or 0
        ratios = [(round(factor * total), ratio_at(factor)) for factor in factors]
        return tuple((num_blocks, ratio) for num_blocks, ratio in ratios if ratio is not None)
