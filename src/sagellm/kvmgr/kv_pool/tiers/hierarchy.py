"""`HierarchyManager`: which KV goes down to which tier, and comes up again.

    offer(hit)        a path has been computed or used on the device: what a tier lacks of it is written there
    request(...)      blocks of a waiting request that a tier has and the device lacks begin to come up
    load_tail(...)    the last of them begin to come up, while the request computes those before them
    poll()            what has arrived is in the device's index, what was written in its tier's; never blocks

Device blocks are pinned while they are read, so a step cannot evict or overwrite them. Blocks that come up
belong to an arrival until all of them are there. A tier whose write fails is not written any more, with one
line in the log; what it cannot read is a miss, and the engine goes on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sagellm.core.blocks import Tier
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import CostBenefitModel, Hint, SimpleExtent, Use
from sagellm.core.protocols.kv_tiers import Arrival, Tail, TierLookup, TierState
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex
from sagellm.core.types import NO_ACCOUNT, Account, Namespace, Tokens
from sagellm.kvmgr.kv_pool.tiers.arrivals import PrefixArrivals
from sagellm.kvmgr.kv_pool.tiers.migrator import MigrationPlan, MigrationReport, Migrator, MoveTarget
from sagellm.kvmgr.kv_pool.tiers.remote_tier import RemoteTier
from sagellm.kvmgr.kv_pool.tiers.split_load import first_of_tail
from sagellm.kvmgr.kv_pool.tiers.tier import KVTier, TierStore

log = logging.getLogger("sagellm.tiers")
MAX_PENDING_BYTES = 1 << 30
"""Bytes of all moves under way, beyond which nothing more is saved."""
FIRST_BYTES_PER_S = 1e9
"""Assumed bandwidth of a tier from which nothing has been read yet, unless writing to it was faster."""
LATENCY_S = 1e-3
"""Assumed time of a load before its first byte."""
FEWEST_MEASURED_BYTES = 1 << 20
"""Loads of fewer bytes say nothing about bandwidth."""
MAX_HELD_SHARE = 0.5
"""Share of a tier that preempted requests may hold together."""
REGAINED = 1.05
"""Each load that is refused raises the assumed bandwidth of its tier by this factor, if it is below
`FIRST_BYTES_PER_S`, so that a tier that was slow once is tried again."""


@dataclass(slots=True)
class _Store:
    """A path on its way down. `hit` pins its device blocks; `blocks`: those that are written, by tier."""

    hit: PrefixHit
    stores: dict[Tier, TierStore]
    blocks: set[tuple[Tier, int]]


@dataclass(slots=True)
class _Offer:
    """A path that waits to be offered to `tiers`; `hit` pins it."""

    hit: PrefixHit
    tiers: Sequence[KVTier]
    account: Account
    use: Use | None


@dataclass(slots=True)
class _Hold:
    """A path of a preempted request. `prefix` pins what its tier has of it."""

    tier: KVTier
    prefix: PrefixHit


@dataclass(slots=True)
class _Load:
    """Blocks on their way up for a request, until `until_s` at most. `source` pins them in their tier.

    `is_tail`: the request computes those before them meanwhile.
    """

    request_id: str
    tier: KVTier
    source: PrefixHit
    arrival: Arrival
    is_tail: bool = False
    until_s: float = math.inf


class HierarchyManager:
    """Implements `KVTiers`: owns the tiers below one device, and the moves under way.

    `tiers` from the nearest to the furthest. `index` and `arrivals` are the device's. `costs` says how long
    computing blocks again takes; they are loaded if that is faster. A `RemoteTier` is asked for each request
    before anything is loaded from it.
    """

    def __init__(
        self,
        index: PrefixReuseIndex,
        arrivals: PrefixArrivals,
        tiers: Sequence[KVTier],
        migrator: Migrator,
        costs: CostBenefitModel,
        bytes_per_block: int,
    ) -> None:
        self._index, self.arrivals, self.tiers = index, arrivals, tuple(tiers)
        self._migrator, self._costs, self._block_bytes = migrator, costs, bytes_per_block
        self._stores: dict[int, _Store] = {}
        self._storing: set[tuple[Tier, int]] = set()
        self._later: list[_Offer] = []
        self._loads: dict[int, _Load] = {}
        self._holds: dict[str, _Hold] = {}
        self._move_of: dict[str, int] = {}
        self._tails: dict[str, Tail] = {}
        self._unstarted: list[tuple[MigrationPlan, _Load]] = []
        self._bytes_per_s = {tier.tier: FIRST_BYTES_PER_S for tier in tiers}
        self._measured: set[Tier] = set()
        self._came: list[str] = []
        self._remote = next((tier for tier in self.tiers if isinstance(tier, RemoteTier)), None)

    # -- down

    def offer(self, hit: PrefixHit, account: Account = NO_ACCOUNT, use: Use | None = None) -> None:
        if not hit.num_blocks:
            return
        self._offer_to(self.tiers, hit, account, use)

    def _offer_to(self, tiers: Sequence[KVTier], hit: PrefixHit, account: Account, use: Use | None) -> None:
        """Write what tiers lack of a path.

        A tier into which the first of these blocks is being written is offered the path again behind that.
        """
        stores: dict[Tier, TierStore] = {}
        later: list[KVTier] = []
        ids = self._index.block_ids(hit) if self._storing else ()
        for tier in tiers:
            known = tier.lookup(hit.tokens, hit.namespace, hit.num_tokens).num_blocks
            missing = hit.num_blocks - known
            if missing and ids and (tier.tier, ids[known]) in self._storing:
                later.append(tier)
                continue
            num_bytes = self._migrator.num_pending_bytes + missing * self._block_bytes
            has_time = num_bytes <= MAX_PENDING_BYTES
            tier.num_dropped += 0 if has_time else missing
            store = tier.begin_store(
                hit.tokens, hit.namespace, hit.num_blocks, account, use, has_time=has_time
            )
            if store is not None:
                stores[tier.tier] = store
        if later:
            self._later.append(_Offer(self._index.pin(hit, is_use=False), later, account, use))
        if stores:
            self._send_down(hit, stores, ends=use is not None)

    def _send_down(self, hit: PrefixHit, stores: dict[Tier, TierStore], *, ends: bool) -> None:
        pinned = self._index.pin(hit, is_use=False)
        positions = sorted({position for store in stores.values() for position in store.positions})
        offset_of = {position: offset for offset, position in enumerate(positions)}
        ids = self._index.block_ids(pinned)
        targets = tuple(
            MoveTarget(name, [offset_of[position] for position in store.positions], store.slots)
            for name, store in stores.items()
        )
        plan = MigrationPlan(
            self._path(hit.tokens, positions[-1] + 1), hit.namespace, positions, Tier.HBM,
            [ids[position] for position in positions], targets, ends,
        )  # fmt: skip
        move_id = self._migrator.migrate(plan)
        blocks = {(name, ids[position]) for name, store in stores.items() for position in store.positions}
        self._storing |= blocks
        self._stores[move_id] = _Store(pinned, stores, blocks)

    # -- preempted requests

    def hold(self, request_id: str, hit: PrefixHit, account: Account, use: Use) -> None:
        self.let_go(request_id)
        tier = next(self._own_tiers(), None)
        if tier is None or not hit.num_blocks or not self._may_hold(tier, hit):
            return
        self._offer_to((tier,), hit, account, use)
        while self._stores:
            self._migrator.wait(1.0)
            self._came = self.poll()
        saved = tier.lookup(hit.tokens, hit.namespace, hit.num_tokens)
        self._holds[request_id] = _Hold(tier, tier.index.pin(saved, is_use=False))

    def _may_hold(self, tier: KVTier, hit: PrefixHit) -> bool:
        if self._num_held(tier) + hit.num_blocks > MAX_HELD_SHARE * tier.pool.total_blocks:
            return False
        missing = hit.num_blocks - tier.lookup(hit.tokens, hit.namespace, hit.num_tokens).num_blocks
        copies_s = self._load_s(tier.tier, missing) + self._load_s(tier.tier, hit.num_blocks)
        return copies_s < self._costs.recompute_s(_extent(0, hit.num_blocks))

    def _num_held(self, tier: KVTier) -> int:
        return sum(held.prefix.num_blocks for held in self._holds.values() if held.tier is tier)

    def let_go(self, request_id: str) -> None:
        held = self._holds.pop(request_id, None)
        if held is not None:
            held.tier.index.unpin(held.prefix, is_use=False)

    def load_s(self, num_blocks: int) -> float:
        tier = next(self._own_tiers(), None)
        return math.inf if tier is None else self._load_s(tier.tier, num_blocks)

    def _own_tiers(self) -> Iterator[KVTier]:
        """Tiers that work, but not the shared store."""
        return (tier for tier in self.tiers if not tier.fault and tier is not self._remote)

    def hint(self, tokens: Tokens, namespace: Namespace, hint: Hint) -> int:
        hits = [(tier, tier.lookup(tokens, namespace)) for tier in self.tiers]
        return max([tier.index.hint(hit, hint) for tier, hit in hits if hit.num_blocks], default=0)

    # -- up

    def request(
        self,
        request_id: str,
        tokens: Tokens,
        namespace: Namespace,
        max_tokens: int,
        account: Account = NO_ACCOUNT,
        *,
        start: bool = True,
        has_room: bool = True,
        asks: bool = True,
        tail_blocks: int = 0,
    ) -> TierLookup:
        if request_id in self._move_of:
            return TierLookup.HIT_PENDING
        cached = self._index.lookup(tokens, namespace, max_tokens).num_blocks
        found, tier = self._best(request_id, tokens, namespace, max_tokens, cached, tail_blocks)
        if asks and self._ask(
            request_id, tokens, namespace, max_tokens, account, found.num_blocks, tail_blocks
        ):
            return TierLookup.HIT_PENDING
        if tier is None:
            self._forget(request_id)
            return TierLookup.MISS
        if self._first_of_tail(tier, cached, found.num_blocks, tail_blocks) is not None:
            return TierLookup.HIT
        arrival = None
        if has_room:
            arrival = self.arrivals.begin_receive(tokens, namespace, found.num_blocks, account)
        if arrival is None:
            return TierLookup.RETRY
        self._begin_load(request_id, tier, found, arrival, is_tail=False)
        if start:
            self.start_loads()
        return TierLookup.HIT_PENDING

    def load_tail(
        self,
        request_id: str,
        tokens: Tokens,
        namespace: Namespace,
        max_tokens: int,
        account: Account,
        tail_blocks: int,
    ) -> int | None:
        cached = self._index.lookup(tokens, namespace, max_tokens).num_blocks
        found, tier = self._best(request_id, tokens, namespace, max_tokens, cached, tail_blocks)
        if tier is None or request_id in self._move_of or request_id in self._tails:
            return None
        first = self._first_of_tail(tier, cached, found.num_blocks, tail_blocks)
        if first is None:
            return None
        arrival = self.arrivals.begin_receive(tokens, namespace, found.num_blocks, account, first)
        if arrival is None:
            return None
        self._begin_load(request_id, tier, found, arrival, is_tail=True)
        self.start_loads()
        return first

    def take_tail(self, request_id: str) -> Tail | None:
        return None if request_id in self._move_of else self._tails.pop(request_id, Tail())

    def _begin_load(
        self, request_id: str, tier: KVTier, found: PrefixHit, arrival: Arrival, *, is_tail: bool
    ) -> None:
        load = _Load(request_id, tier, tier.begin_load(found), arrival, is_tail)
        if isinstance(tier, RemoteTier):
            compute_s = self._costs.recompute_s(_extent(arrival.first, found.num_blocks))
            load.until_s = tier.now() + max(compute_s, tier.max_ask_s)
        positions = range(arrival.first, found.num_blocks)
        slots = tier.index.block_ids(load.source)[arrival.first :]
        target = MoveTarget(Tier.HBM, range(len(positions)), arrival.block_ids)
        plan = MigrationPlan(
            self._path(found.tokens, found.num_blocks),
            found.namespace,
            positions,
            tier.tier,
            slots,
            (target,),
        )
        self._move_of[request_id] = 0  # until `start_loads`; ids of moves begin at 1
        self._unstarted.append((plan, load))

    def start_loads(self) -> None:
        for plan, load in self._unstarted:
            move_id = self._migrator.migrate(plan)
            self._loads[move_id] = load
            self._move_of[load.request_id] = move_id
        self._unstarted.clear()

    def cancel(self, request_id: str) -> None:
        """See `KVTiers`. Blocks that have come already are cached, those of a tail are free again."""
        self._forget(request_id)
        self._drop_tail(request_id)
        move_id = self._move_of.pop(request_id, None)
        if move_id:
            self._migrator.cancel(move_id)
        for plan, load in self._unstarted:
            if load.request_id == request_id:
                self._unstarted.remove((plan, load))
                load.tier.index.unpin(load.source, is_use=False)
                self.arrivals.abort(load.arrival)
                return

    def _drop_tail(self, request_id: str) -> None:
        arrival = self._tails.pop(request_id, Tail()).arrival
        if arrival is not None:
            self.arrivals.abort(arrival)

    def _ask(
        self,
        request_id: str,
        tokens: Tokens,
        namespace: Namespace,
        max_tokens: int,
        account: Account,
        found: int,
        tail_blocks: int,
    ) -> bool:
        """Ask the shared store once for blocks behind the first `found`.

        False if that would not be worth it, or the store is not used now.
        """
        remote, num_blocks = self._remote, min(max_tokens, len(tokens)) // self._index.block_size
        if remote is None or request_id in remote.answered or num_blocks <= found:
            return False
        latency_s = LATENCY_S + remote.ask_s
        is_worth = self._first_of_tail(remote, found, num_blocks, tail_blocks, latency_s) is not None
        if not is_worth and not self._is_worth(remote, found, num_blocks, latency_s):
            return False
        limit_s = self._costs.recompute_s(_extent(found, num_blocks))
        if not remote.ask(request_id, tokens, namespace, num_blocks, account, limit_s):
            return False
        self._move_of[request_id] = 0  # until it has answered
        return True

    def _forget(self, request_id: str) -> None:
        if self._remote is not None:
            self._remote.forget(request_id)

    def _best(
        self,
        request_id: str,
        tokens: Tokens,
        namespace: Namespace,
        max_tokens: int,
        cached: int,
        tail_blocks: int,
    ) -> tuple[PrefixHit, KVTier | None]:
        """The longest prefix that is worth loading, or its tail, of the nearest tier."""
        best, of_tier = PrefixHit(0, cached, tokens, namespace), None
        for tier in self.tiers:
            if isinstance(tier, RemoteTier) and request_id not in tier.answered:
                continue
            hit = tier.lookup(tokens, namespace, max_tokens)
            if hit.num_blocks > best.num_blocks and (
                self._first_of_tail(tier, cached, hit.num_blocks, tail_blocks) is not None
                or self._is_worth(tier, cached, hit.num_blocks)
            ):
                best, of_tier = hit, tier
        return best, of_tier

    def _first_of_tail(
        self, tier: KVTier, first: int, stop: int, tail_blocks: int, latency_s: float = LATENCY_S
    ) -> int | None:
        """Where to split blocks [first, stop), behind the loads of this tier."""
        if not tail_blocks:
            return None
        loads = [*self._loads.values(), *(load for _, load in self._unstarted)]
        ahead = sum(len(load.arrival.block_ids) for load in loads if load.tier is tier)
        return first_of_tail(
            first, stop, tail_blocks,
            lambda end: self._costs.recompute_s(_extent(first, end)),
            lambda count: self._load_s(tier.tier, ahead + count, latency_s),
        )  # fmt: skip

    def _is_worth(self, tier: KVTier, first: int, stop: int, latency_s: float = LATENCY_S) -> bool:
        load_s = self._load_s(tier.tier, stop - first, latency_s)
        is_worth = load_s < self._costs.recompute_s(_extent(first, stop))
        if not is_worth:
            before = self._bytes_per_s[tier.tier]
            self._bytes_per_s[tier.tier] = max(before, min(REGAINED * before, FIRST_BYTES_PER_S))
            if isinstance(tier, RemoteTier):
                tier.ask_s /= REGAINED
        return is_worth

    def _load_s(self, tier: Tier, num_blocks: int, latency_s: float = LATENCY_S) -> float:
        """Seconds that copying so many blocks takes, by the bandwidth that recent loads reached."""
        return latency_s + num_blocks * self._block_bytes / self._bytes_per_s[tier]

    # -- what has ended

    def poll(self) -> list[str]:
        arrived, self._came = self._came, []
        reports = self._migrator.poll()
        if self._remote is not None:
            arrived += self._poll_remote(self._remote, reports)
        for report in reports:
            store = self._stores.pop(report.move_id, None)
            if store is not None:
                self._stored(store, report)
                continue
            load = self._loads.pop(report.move_id)
            self._loaded(load, report)
            if self._move_of.get(load.request_id) == report.move_id:
                del self._move_of[load.request_id]
                arrived.append(load.request_id)
        return arrived

    def _poll_remote(self, remote: RemoteTier, reports: list[MigrationReport]) -> list[str]:
        """Returns requests whose question has ended; adds reports of loads that are given up."""
        answered = remote.poll()
        for request_id in answered:
            del self._move_of[request_id]
        ended, now_s = {report.move_id for report in reports}, remote.now()
        for move_id, load in self._loads.items():
            if load.until_s <= now_s and move_id not in ended:
                reports.append(self._migrator.abandon(move_id))
                if load.until_s > -math.inf:  # it was slow
                    self._bytes_per_s[Tier.REMOTE] *= 0.8
        return answered

    def _stored(self, store: _Store, report: MigrationReport) -> None:
        for tier in self.tiers:
            if tier.tier in store.stores:
                error = report.errors.get(tier.tier, "")
                if tier.tier in report.num_admitted:
                    num_wanted = len(store.stores[tier.tier].slots)
                    tier.num_refused += num_wanted - report.num_admitted[tier.tier]
                if error and not tier.fault:
                    log.warning("the tier %s is not used any more: %s", tier.tier, error)
                num_written, name = report.num_written.get(tier.tier, 0), tier.tier
                tier.end_store(store.stores[name], num_written, error)
                if tier is not self._remote and name not in self._measured:  # a shared store has a queue
                    reached = _bytes_per_s(num_written * self._block_bytes, report.spent_s)
                    self._bytes_per_s[name] = max(self._bytes_per_s[name], reached)
        self._storing -= store.blocks
        self._index.unpin(store.hit, is_use=False)
        waiting, self._later = self._later, []
        for offer in waiting:
            self._offer_to(offer.tiers, offer.hit, offer.account, offer.use)
            self._index.unpin(offer.hit, is_use=False)

    def _drop_offers(self) -> None:
        for offer in self._later:
            self._index.unpin(offer.hit, is_use=False)
        self._later.clear()

    def _loaded(self, load: _Load, report: MigrationReport) -> None:
        load.tier.end_load(load.source, load.arrival.first, report.num_read, report.outcome)
        num_written = report.num_written.get(Tier.HBM, 0)
        if not load.is_tail:
            self.arrivals.publish(load.arrival, num_written)
        elif self._move_of.get(load.request_id) == report.move_id:
            self._tails[load.request_id] = Tail(load.arrival, num_written)
        else:  # the request has left, or memory was wanted
            self.arrivals.abort(load.arrival)
        if reached := _bytes_per_s(report.num_bytes, report.spent_s):
            before = self._bytes_per_s[load.tier.tier]
            self._bytes_per_s[load.tier.tier] = 0.8 * before + 0.2 * reached
            self._measured.add(load.tier.tier)

    def give_way(self) -> bool:
        self.start_loads()  # so that these end by a report, too
        self._drop_offers()
        had_tails = bool(self._tails)
        for request_id in list(self._tails):
            self._drop_tail(request_id)
        for move_id, load in self._loads.items():
            if load.is_tail and self._move_of.get(load.request_id) == move_id:
                del self._move_of[load.request_id]  # so that what has come is freed
        if not self._stores and not self._loads:
            return had_tails
        for move_id in (*self._stores, *self._loads):
            self._migrator.cancel(move_id)
        for load in self._loads.values():
            if load.tier is self._remote:  # its thread may wait for the network
                load.until_s = -math.inf
        if self._remote is not None:
            self._remote.answered.clear()
        self._came = self.poll()
        while self._stores or self._loads:
            self._migrator.wait(1.0)
            self._came = self.poll()
        return True

    # -- all of it

    @property
    def is_idle(self) -> bool:
        is_asking = self._remote is not None and self._remote.is_asking
        return self._migrator.is_idle and not self._unstarted and not is_asking

    def wait(self, timeout_s: float) -> bool:
        return self.is_idle or self._migrator.wait(timeout_s)

    def states(self) -> list[TierState]:
        return [tier.state(self._num_held(tier)) for tier in self.tiers]

    def faults(self) -> list[str]:
        return [f"{tier.tier}: {tier.fault}" for tier in self.tiers if tier.fault]

    def bandwidths(self) -> Mapping[Tier, float]:
        """Bytes per second that loads from each tier are taken to reach."""
        return dict(self._bytes_per_s)

    def clear(self) -> int:
        self.give_way()
        return sum(tier.clear() for tier in self.tiers)

    def close(self) -> None:
        """Cancel what is under way, take in its ends, and close the storages."""
        self.start_loads()
        self._drop_offers()
        if self._remote is not None:
            self._remote.close()
        self._migrator.close()
        self.poll()
        for request_id in list(self._tails):
            self._drop_tail(request_id)
        for tier in self.tiers:
            tier.storage.close()

    def check(self) -> None:
        """Raise `BookkeepingError` where the books of tiers and moves disagree."""
        for tier in self.tiers:
            tier.check()
            num_held = self._num_held(tier)
            if num_held > MAX_HELD_SHARE * tier.pool.total_blocks:
                raise BookkeepingError(f"preempted requests hold {num_held} blocks of the tier {tier.tier}")
        unknown = set(self._move_of.values()) - self._loads.keys() - {0}
        if unknown:
            raise BookkeepingError(f"requests wait for moves {unknown}, which are not under way")
        if self._tails.keys() & self._move_of.keys():
            raise BookkeepingError(f"tails of {[*self._tails]} have come, and are on their way")

    def _path(self, tokens: Tokens, num_blocks: int) -> bytes:
        return bytes(tokens.slice(0, num_blocks * self._index.block_size))


def _bytes_per_s(num_bytes: int, spent_s: float) -> float:
    """The bandwidth that a move reached; 0 if it was too small to say.

    At most twice what its whole time gives, since `LATENCY_S` is only assumed.
    """
    if num_bytes < FEWEST_MEASURED_BYTES:
        return 0.0
    return num_bytes / max(spent_s - LATENCY_S, spent_s / 2, 1e-9)


def _extent(first: int, stop: int) -> SimpleExtent:
    return SimpleExtent(0, stop - first, first_position=first)
