"""`CacheView`: what the KV events of one or more servers tell about their caches.

A server publishes which blocks it stores and which it evicts. It does not publish its hits, unless requests
ask for it (`kv_cache_report_mode: full`, vLLM 0.32 and later, and sageLLM). From stores and evictions alone
follow: how many misses LRU with more memory would have avoided (`ghosts.py`), why blocks had to be computed,
and which of them another instance held. Where hits are reported, whole requests follow too.

Only the blocks of one group and one memory are followed for each instance: those that the first event names
(a server with several groups of layers stores each block once in each).

**Prompt or answer.** A server stores the blocks of answers too, and no event says so. vLLM stores them one by
one. So a block that is stored alone, below a block of an earlier batch, is *single*: it may be part of an
answer, or the one block by which a prompt is longer than its hit. SGLang and sageLLM store an answer when it
ends; there all blocks that go on from the end of a request, in a later batch, are counted as singles
(`answers_at_once`). All others are prompt blocks. Sums are kept apart, and `share_of_singles`, which follows
from the server's counters, says how many of the singles count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import isfinite
from typing import TypeAlias

from sagellm.control_plane.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Gap,
    Malformed,
    ReceivedBatch,
    Restart,
)
from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.types import TOKEN_BYTES, Tokens
from sagellm.diagnostics.watch.accesses import CacheAccess
from sagellm.diagnostics.watch.block_contents import (
    BlockContent,
    BlockContents,
    most_equal_tokens,
    path_to,
    token_bytes,
)
from sagellm.diagnostics.watch.ghosts import DepthCurve, GhostStack
from sagellm.diagnostics.watch.report import (
    UNLIMITED,
    EvictedPrefix,
    InstanceEvents,
    MissedTokens,
    ReuseGaps,
)

Hash: TypeAlias = bytes | int
Item: TypeAlias = ReceivedBatch | Gap | Malformed | Restart

MAX_BLOCKS = 1_000_000
"""Different blocks that are remembered, of all instances together: about 0.6 GB."""
MAX_REQUESTS, MAX_REQUEST_BLOCKS = 4096, 1 << 18
"""Open requests of one instance; the oldest one counts as ended. Longer requests are not replayed."""
IDLE_S, IDLE_AT_ONCE_S = 60.0, 600.0
"""A request that stored nothing for so long has ended; the second where an answer is stored at its end."""
MAX_PREFIXES = 65_536
"""Evicted prefixes that are counted; the least computed ones are forgotten."""
GAP_ENDS_S = (1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, UNLIMITED)
NEVER, NOT_KNOWN_S = -1, -UNLIMITED
"""`NEVER` is the depth of a block that was never evicted: no memory would have kept it."""


class _Resident:
    """A block in one instance's cache. `depth`: how deep it was in the ghost stack when it was last stored,
    at least that of the blocks of the same request before it. `stored_in`: number of that batch."""

    __slots__ = ("content", "depth", "is_single", "stored_in", "used_s")

    def __init__(
        self, content: BlockContent, depth: int, stored_in: int, used_s: float, *, is_single: bool
    ) -> None:
        self.content = content
        self.depth = depth
        self.is_single = is_single
        self.stored_in = stored_in
        self.used_s = used_s


@dataclass(slots=True)
class _Request:
    """A request in reconstruction. `num_prompt` leading blocks are its prompt; `is_prompt_over`: what comes
    now is its answer. `last_batch`: the batch of its last event. `begins_known`: it began with a prompt's
    first block, stored or reported as a hit. `num_hit`: blocks that were reported as a hit, `num_repeated`:
    how often they were again. `num_stored`: blocks that it stored, `num_restored` those of them that had been
    evicted. `evictions_before`: evictions of the instance before it was looked up."""

    began_s: float
    last_s: float
    last_batch: int
    contents: list[BlockContent]
    num_prompt: int
    begins_known: bool
    evictions_before: int
    num_hit: int = 0
    num_repeated: int = 0
    num_stored: int = 0
    num_restored: int = 0
    is_prompt_over: bool = False


@dataclass(slots=True)
class _Tally:
    """Sums over stored blocks, in tokens. `depths`: by depth in the ghost stack, of those that were
    evicted. `beyond`: of the others, by the ghosts that there were: if an eviction before the watch took
    them, they are deeper than that."""

    num_tokens: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    depths: Counter[int] = field(default_factory=Counter)
    beyond: Counter[int] = field(default_factory=Counter)
    elsewhere: int = 0


@dataclass(slots=True)
class _Instance:
    """What is known of one server.

    `group`: group and medium of the blocks that are followed. `evictions_before`: evictions up to the last
    store or hit, or to the last batch: those behind it make room for the next request that stores.
    `num_stored_at_first`: blocks stored behind known ones before the first eviction, `num_begun_at_first`:
    others. None: the cache was emptied, or evicted blocks of the watch first: it had no older ones.
    `is_full`: it has evicted since it was emptied, or does so in this batch.
    """

    max_ghosts: int
    answers_at_once: bool = False
    group: tuple[int | None, str | None] | None = None
    block_size: int | None = None
    resident: dict[Hash, _Resident] = field(default_factory=dict)
    ghosts: GhostStack[Hash] = field(init=False)
    evicted: dict[Hash, _Resident] = field(default_factory=dict)
    requests: dict[Hash, _Request] = field(default_factory=dict)
    sure: _Tally = field(default_factory=_Tally)
    single: _Tally = field(default_factory=_Tally)
    num_evictions: int = 0
    evictions_before: int = 0
    num_stored_at_first: int | None = 0
    num_begun_at_first: int = 0
    is_full: bool = False
    num_batches: int = 0
    num_events: int = 0
    num_block_events: int = 0
    num_other_group: int = 0
    num_lost: int = 0
    num_repaired: int = 0
    num_restarts: int = 0
    num_malformed: int = 0

    def __post_init__(self) -> None:
        self.ghosts = GhostStack(self.max_ghosts)

    @property
    def tallies(self) -> tuple[_Tally, _Tally]:
        return self.sure, self.single


class CacheView:
    """Follows the events of `num_instances` servers. Feed it the items of a `KVEventSubscriber` for each.

    `on_access` gets each request whose hits were reported, once it is known to have ended (`finish` ends
    all). Remembers `max_blocks` different blocks and as many evicted ones; older ones are forgotten, and
    count as never seen. Times are the events' own."""

    def __init__(
        self,
        num_instances: int = 1,
        *,
        max_blocks: int = MAX_BLOCKS,
        on_access: Callable[[CacheAccess], None] | None = None,
    ) -> None:
        if num_instances < 1 or max_blocks < 1:
            raise ConfigError(
                f"num_instances and max_blocks must be at least 1: {num_instances}, {max_blocks}"
            )
        self._instances = [_Instance(max_blocks) for _ in range(num_instances)]
        self._on_access = on_access
        self._contents = BlockContents(max_blocks)
        self._gaps: Counter[int] = Counter()
        self._prefixes: dict[BlockContent, list[int]] = {}
        self._num_hits_reported = self._num_old_hits = 0

    # ------------------------------------------------------------------------------------------- feeding

    def feed(self, instance: int, item: Item) -> None:
        """Take the next item of an instance."""
        view = self._instances[instance]
        match item:
            case ReceivedBatch():
                view.num_batches += 1
                view.num_repaired += item.replayed
                view.evictions_before = view.num_evictions
                view.is_full |= any(isinstance(event, BlockRemoved) for event in item.batch.events)
                for event in item.batch.events:
                    view.num_events += 1
                    match event:
                        case BlockStored():
                            now_s = item.ts if isfinite(item.ts) else 0.0
                            self._stored(instance, view, event, now_s)
                        case BlockRemoved():
                            self._removed(instance, view, event)
                        case AllBlocksCleared():
                            self._cleared(instance, view)
                self._end_idle(instance, view, item.ts)
            case Gap():
                view.num_lost += item.num_batches
            case Malformed():
                view.num_malformed += 1
            case Restart():
                view.num_restarts += 1
                self._cleared(instance, view)

    def set_answers_at_once(self, instance: int) -> None:
        """The server stores an answer at its end, as SGLang and sageLLM do."""
        self._instances[instance].answers_at_once = True

    def begin(self, instance: int) -> None:
        """Count from now on. What was fed before, a replay of the past, is state only."""
        view = self._instances[instance]
        view.requests.clear()
        view.sure, view.single = _Tally(), _Tally()
        view.num_block_events = view.num_repaired = 0
        if instance == 0:
            self._gaps.clear()
            self._prefixes.clear()

    def finish(self) -> None:
        """All requests have ended; those whose hits were reported go to `on_access`."""
        for number, view in enumerate(self._instances):
            self._end_requests(number, view)

    def _cleared(self, instance: int, view: _Instance) -> None:
        self._end_requests(instance, view)
        for block in view.resident.values():
            block.content.holders &= ~(1 << instance)
        view.resident.clear()
        view.evicted.clear()
        view.ghosts.clear()
        view.num_stored_at_first, view.is_full = None, False

    def _end_idle(self, instance: int, view: _Instance, now_s: float) -> None:
        """End the requests that stored nothing for long, so that a recording has them."""
        idle_s = IDLE_AT_ONCE_S if view.answers_at_once else IDLE_S
        while view.requests:
            end, oldest = next(iter(view.requests.items()))
            if now_s - oldest.last_s < idle_s:
                return
            del view.requests[end]
            self._end(instance, oldest)

    def _end_requests(self, instance: int, view: _Instance) -> None:
        for request in view.requests.values():
            self._end(instance, request)
        view.requests.clear()

    def _removed(self, instance: int, view: _Instance, event: BlockRemoved) -> None:
        if view.group is not None and (event.group_idx, event.medium) != view.group:
            view.num_other_group += len(event.block_hashes)
            return
        view.num_block_events += len(event.block_hashes)
        if not view.num_evictions and event.block_hashes and event.block_hashes[0] in view.resident:
            view.num_stored_at_first = None
        view.num_evictions += len(event.block_hashes)
        for block_hash in event.block_hashes:
            block = view.resident.pop(block_hash, None)
            if block is not None:
                block.content.holders &= ~(1 << instance)
                view.evicted[block_hash] = block
            view.ghosts.pop(block_hash)
            forgotten = view.ghosts.push(block_hash)
            if forgotten is not None:
                view.evicted.pop(forgotten, None)

    def _stored(self, instance: int, view: _Instance, event: BlockStored, now_s: float) -> None:
        if view.group is None:
            view.group = (event.group_idx, event.medium)
        if (event.group_idx, event.medium) != view.group:
            view.num_other_group += len(event.block_hashes)
            return
        view.num_block_events += len(event.block_hashes)
        if not event.block_hashes:
            return
        data = token_bytes(event)
        if data is None:
            view.num_malformed += 1
            return
        view.block_size = event.block_size
        parent = None
        if event.parent_block_hash is not None:
            parent = view.resident.get(event.parent_block_hash)
        elif self._is_hit_of_before(view, event):
            self._enter_old(instance, view, event, data)
        is_single = self._is_single(view, event, parent)
        request = self._request_of(instance, view, event, now_s)
        if request is None:
            return
        request.is_prompt_over |= is_single
        tally = view.single if is_single else view.sure
        self._store(instance, view, event, data, request, now_s, parent, tally)
        if not view.is_full and parent is None:
            view.num_begun_at_first += len(event.block_hashes)
        elif not view.is_full and view.num_stored_at_first is not None:
            view.num_stored_at_first += len(event.block_hashes)
        request.last_s, request.last_batch = now_s, view.num_batches
        if not request.is_prompt_over:
            request.num_prompt = len(request.contents)
        self._keep(instance, view, event.block_hashes[-1], request)

    def _is_hit_of_before(self, view: _Instance, event: BlockStored) -> bool:
        """Whether an event reports a hit of blocks from before the watch.

        Before a full cache stores new blocks it evicts nearly as many; before a hit it evicts none, or a few
        for running requests. One block alone may take the place of a partial one, which nothing reports.
        """
        is_known = all(block_hash in view.resident for block_hash in event.block_hashes)
        was_evicted = any(block_hash in view.ghosts for block_hash in event.block_hashes)
        if is_known or was_evicted or not view.is_full:
            return False
        num_blocks = len(event.block_hashes)
        num_evicted = view.num_evictions - view.evictions_before
        most_evicted = num_blocks // 4 if view.evictions_before else 0  # the first evictions fill a gap
        is_hit = num_blocks >= (2 if self._num_old_hits >= 3 else 4) and num_evicted <= most_evicted
        self._num_old_hits += is_hit
        return is_hit

    def _enter_old(self, instance: int, view: _Instance, event: BlockStored, data: bytes) -> None:
        """Note blocks that were in the cache before the watch began."""
        contents = self._contents.below(self._contents.begin(event), event, data)
        for block_hash, content in zip(event.block_hashes, contents, strict=True):
            if block_hash not in view.resident:
                content.holders |= 1 << instance
                old = _Resident(content, 0, view.num_batches, NOT_KNOWN_S, is_single=False)
                view.resident[block_hash] = old

    @staticmethod
    def _is_single(view: _Instance, event: BlockStored, parent: _Resident | None) -> bool:
        """Whether the blocks may be an answer's; see the head of this file."""
        if parent is None:
            return False
        if parent.stored_in == view.num_batches:
            return parent.is_single
        if view.answers_at_once:
            return event.parent_block_hash in view.requests
        return len(event.block_hashes) == 1

    def _request_of(
        self, instance: int, view: _Instance, event: BlockStored, now_s: float
    ) -> _Request | None:
        """The request that stores these blocks. None: the event only reports a hit."""
        if event.parent_block_hash is not None:
            request = view.requests.pop(event.parent_block_hash, None)
            is_seen = self.sees_hits or (request is not None and request.num_hit > 0)
            if not is_seen and len(event.block_hashes) > 1:  # most likely another one, that hit these
                request = None
            return request or _Request(
                now_s, now_s, view.num_batches, [], 0, False, view.evictions_before
            )  # the blocks before were a hit that is not reported
        hit = [block for block in map(view.resident.get, event.block_hashes) if block is not None]
        former = view.requests.pop(event.block_hashes[-1], None)
        is_hit = len(hit) == len(event.block_hashes)
        # A request that waits for memory is looked up in every step.
        is_repeated = (
            former is not None and not former.num_stored and former.last_batch == view.num_batches - 1
        )
        if former is not None and not (is_hit and is_repeated):
            self._end(instance, former)
            former = None
        request = former or _Request(now_s, now_s, view.num_batches, [], 0, True, view.evictions_before)
        if not is_hit:
            return request
        request.last_s, request.last_batch = now_s, view.num_batches
        request.num_repeated += former is not None
        if former is None:
            self._num_hits_reported += all(block.used_s != NOT_KNOWN_S for block in hit)
            request.contents = [block.content for block in hit]
            request.num_hit = request.num_prompt = len(hit)
        for block in hit:
            if former is None:
                self._note_use(block, now_s)
            block.depth, block.stored_in, block.is_single = 0, view.num_batches, False
        request.evictions_before = view.evictions_before = view.num_evictions
        self._keep(instance, view, event.block_hashes[-1], request)
        return None

    def _keep(self, instance: int, view: _Instance, end: Hash, request: _Request) -> None:
        former = view.requests.pop(end, None)
        if former is not None:  # both computed the blocks at once, or they were evicted since
            self._end(instance, former)
        view.requests[end] = request
        if len(request.contents) > MAX_REQUEST_BLOCKS:
            request.begins_known = False
            del request.contents[:-1]
        if len(view.requests) > MAX_REQUESTS:
            self._end(instance, view.requests.pop(next(iter(view.requests))))

    def _store(
        self,
        instance: int,
        view: _Instance,
        event: BlockStored,
        data: bytes,
        request: _Request,
        now_s: float,
        parent: _Resident | None,
        tally: _Tally,
    ) -> None:
        """Enter the blocks of an event into the books of their instance. `data`: its tokens as bytes."""
        size = event.block_size
        above = parent.content if parent is not None else self._contents.begin(event)
        is_single = tally is view.single  # if it was looked up, then now
        depth = parent.depth if parent is not None and request.contents and not is_single else 0
        is_first = is_single or not request.num_stored
        num_evicted, last_evicted = 0, above
        # Depths are those at the look-up, before anything was evicted or restored for this request.
        since = view.num_evictions - view.evictions_before
        if not is_single:
            since = view.num_evictions - request.evictions_before - request.num_restored
        depths = [view.ghosts.depth(block_hash) for block_hash in event.block_hashes]
        num_ghosts = max(0, len(view.ghosts) - since)
        contents = self._contents.below(above, event, data)
        for block_hash, ghost_depth, content in zip(event.block_hashes, depths, contents, strict=True):
            request.num_restored += view.ghosts.pop(block_hash)
            before = view.evicted.pop(block_hash, None) or view.resident.get(block_hash)
            if before is not None:
                self._note_use(before, now_s)
            if ghost_depth is None and before is None:
                depth = NEVER
            elif ghost_depth is not None and depth != NEVER:
                depth = max(depth, ghost_depth - since + 1, 1)
            tally.num_tokens += size
            if depth > 0:
                tally.depths[depth] += size
                tally.causes["evicted"] += size
                num_evicted, last_evicted = num_evicted + 1, content
            elif before is not None or ghost_depth is not None:
                tally.causes["unknown"] += size  # two requests computed it at once
            else:
                self._count_new(tally, content, size, is_first=is_first)
                tally.beyond[num_ghosts] += size
                is_first = False
            if content.holders & ~(1 << instance):
                tally.elsewhere += size
            content.holders |= 1 << instance
            view.resident[block_hash] = _Resident(
                content, depth, view.num_batches, now_s, is_single=is_single
            )
            request.contents.append(content)
        request.num_stored += len(event.block_hashes)
        view.evictions_before = view.num_evictions
        if num_evicted:
            self._note_prefix(last_evicted, num_evicted * size)

    def _count_new(self, tally: _Tally, content: BlockContent, size: int, *, is_first: bool) -> None:
        """Count a block that this instance never had. `is_first`: the request hit what is before it."""
        if self._contents.is_in_other_namespace(content):
            tally.causes["other_namespace"] += size
            return
        equal = most_equal_tokens(content) if is_first else 0
        tally.causes["not_aligned"] += equal
        tally.causes["never_seen"] += size - equal

    # ------------------------------------------------------------------------------------------- figures

    def _note_use(self, block: _Resident, now_s: float) -> None:
        if block.used_s != NOT_KNOWN_S:
            gap_s = now_s - block.used_s
            self._gaps[next(i for i, end_s in enumerate(GAP_ENDS_S) if gap_s <= end_s)] += 1
        block.used_s = now_s

    def _note_prefix(self, end: BlockContent, num_tokens: int) -> None:
        counts = self._prefixes.setdefault(end, [0, 0])
        counts[0] += 1
        counts[1] += num_tokens
        if len(self._prefixes) > MAX_PREFIXES:
            kept = sorted(self._prefixes.items(), key=lambda item: -item[1][1])[: MAX_PREFIXES // 2]
            self._prefixes = dict(kept)

    def _end(self, instance: int, request: _Request) -> None:
        is_whole = request.begins_known and bool(request.contents) and request.contents[0].is_whole
        if self._on_access is None or not is_whole:
            return
        numbers = Tokens([content.number for content in request.contents])
        counts = request.num_prompt, request.num_hit, request.num_repeated
        self._on_access(CacheAccess(request.began_s, instance, numbers, *counts))

    @property
    def sees_hits(self) -> bool:
        """Whether hits were reported, so that requests can be replayed."""
        return self._num_hits_reported > 0

    def instance(self, number: int) -> InstanceEvents:
        """What came from one instance so far."""
        view = self._instances[number]
        return InstanceEvents(
            block_size=view.block_size,
            num_cached=len(view.resident),
            num_batches=view.num_batches,
            num_events=view.num_events,
            num_block_events=view.num_block_events,
            num_other_group=view.num_other_group,
            num_lost=view.num_lost,
            num_repaired=view.num_repaired,
            num_restarts=view.num_restarts,
            num_malformed=view.num_malformed,
        )

    def stored_tokens(self, instance: int) -> tuple[int, int]:
        """Tokens of prompt blocks that were stored, and of single blocks."""
        view = self._instances[instance]
        return view.sure.num_tokens, view.single.num_tokens

    def depth_curve(self, instance: int, share_of_singles: float = 0.0, *, had_past: bool) -> DepthCurve:
        """Computed prompt tokens by the further blocks that LRU would need for them.

        `had_past`: the server evicted before the watch, so a block that was not seen may have been evicted.
        """
        depths, beyond = dict[int, float](), dict[int, float]()
        for tally, weight in zip(self._instances[instance].tallies, (1.0, share_of_singles), strict=True):
            for sums, counted in ((depths, tally.depths), (beyond, tally.beyond if had_past else {})):
                for depth, tokens in counted.items():
                    sums[depth] = sums.get(depth, 0.0) + weight * tokens
        return DepthCurve(depths, beyond)

    def num_free_at_first(self, instance: int) -> int | None:
        """Blocks that were free when the watch began: stored before the first eviction.

        Some that began a request may have been hits. None: there was no eviction, or no block is older."""
        view = self._instances[instance]
        if view.num_stored_at_first is None or not view.num_evictions:
            return None
        return view.num_stored_at_first + (0 if self.sees_hits else view.num_begun_at_first)

    def held_elsewhere(self, instance: int, share_of_singles: float = 0.0) -> float:
        """Prompt tokens that this instance computed while another one had them in its cache."""
        view = self._instances[instance]
        return view.sure.elsewhere + share_of_singles * view.single.elsewhere

    def missed(self, shares_of_singles: Sequence[float]) -> MissedTokens:
        """Why tokens of stored prompt blocks had to be computed, over all instances."""
        total: Counter[str] = Counter()
        for view, share in zip(self._instances, shares_of_singles, strict=True):
            for tally, weight in zip(view.tallies, (1.0, share), strict=True):
                for cause, tokens in tally.causes.items():
                    total[cause] += round(weight * tokens)
        return MissedTokens(**total)

    def gaps(self) -> ReuseGaps:
        """How long blocks waited for their next use, as far as uses are seen."""
        of = "From the time when a block was stored to the time when it was stored again, after its eviction."
        if self.sees_hits:
            of = "From one use of a block to the next; hits count where the server reports them."
        return ReuseGaps(GAP_ENDS_S, tuple(self._gaps[i] for i in range(len(GAP_ENDS_S))), of)

    def prefixes(
        self, most: int = 20, decode: Callable[[Tokens], str] | None = None, text_tokens: int = 64
    ) -> tuple[EvictedPrefix, ...]:
        """The evicted prefixes that cost most tokens when they were asked for again.

        `decode` makes text of their first `text_tokens` tokens."""
        ranked = sorted(self._prefixes.items(), key=lambda item: (-item[1][1], item[0].number))[:most]
        return tuple(self._as_prefix(end, counts, decode, text_tokens) for end, counts in ranked)

    def _as_prefix(
        self,
        end: BlockContent,
        counts: Sequence[int],
        decode: Callable[[Tokens], str] | None,
        text_tokens: int,
    ) -> EvictedPrefix:
        path = path_to(end)
        digest = blake2b(b"".join(content.tokens for content in path), digest_size=8).hexdigest()
        text = None
        if decode is not None:
            data = b"".join(content.tokens for content in path)[: text_tokens * TOKEN_BYTES]
            text = decode(Tokens.frombytes(data))
        num_tokens = sum(len(content.tokens) for content in path) // TOKEN_BYTES
        return EvictedPrefix(digest, num_tokens, counts[0], counts[1], text)

    def check(self) -> None:
        """Raise `BookkeepingError` where the books of an instance do not agree."""
        for number, view in enumerate(self._instances):
            view.ghosts.check()
            if any(block_hash in view.ghosts for block_hash in view.resident):
                raise BookkeepingError(f"instance {number}: a resident block is a ghost")
            if any(block_hash not in view.ghosts for block_hash in view.evicted):
                raise BookkeepingError(f"instance {number}: an evicted block is no ghost")
            if not all(block.content.holders >> number & 1 for block in view.resident.values()):
                raise BookkeepingError(f"instance {number}: a resident block does not name its holder")
            for tally in view.tallies:
                if tally.causes.total() != tally.num_tokens or tally.depths.total() > tally.causes["evicted"]:
                    raise BookkeepingError(f"instance {number}: causes do not add up to the stored tokens")
        self._contents.check()
