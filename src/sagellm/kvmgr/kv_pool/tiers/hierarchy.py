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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sagellm.core.blocks import Tier
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import CostBenefitModel, Hint, SimpleExtent, Use
from sagellm.core.protocols.kv_tiers import Arrival, Tail, TierLookup, TierState
from sagellm.core.protocols.prefix_cache import EvictedPath, PrefixHit, PrefixReuseIndex, SharedPrefix
from sagellm.core.types import NO_ACCOUNT, TOKEN_BYTES, Account, Namespace, Tokens
from sagellm.kvmgr.kv_pool.tiers.arrivals import PrefixArrivals
from sagellm.kvmgr.kv_pool.tiers.migrator import MigrationPlan, MigrationReport, Migrator, MoveTarget
from sagellm.kvmgr.kv_pool.tiers.remote_tier import RemoteTier
from sagellm.kvmgr.kv_pool.tiers.saves import BlocksByTier, EvictedBlocks, SavedPath, TierSaves
from sagellm.kvmgr.kv_pool.tiers.speeds import LATENCY_S, REGAINED, TransferSpeeds
from sagellm.kvmgr.kv_pool.tiers.split_load import first_of_tail
from sagellm.kvmgr.kv_pool.tiers.tier import KVTier

log = logging.getLogger("sagellm.tiers")
MAX_CALL_S = 10.0
"""A tier whose storage does not return for so long is not used any more."""
MOST_POLLED_BLOCKS = 2048
"""Blocks of 32K tokens. To take them in costs the engine's thread 0.3 ms."""
MAX_HELD_SHARE = 0.5
"""Share of a tier that preempted requests may hold together."""


@dataclass(slots=True)
class _Hold:
    """A path of a preempted request. `prefix` pins what its tier has of it."""

    tier: KVTier
    prefix: PrefixHit


@dataclass(slots=True)
class _Load:
    """Blocks on their way up for requests, until `until_s` at most. `source` pins them in their tier.

    `is_tail`: its request computes those before them meanwhile.
    """

    request_ids: list[str]
    tier: KVTier
    source: PrefixHit
    arrival: Arrival
    is_tail: bool = False
    until_s: float = math.inf


class HierarchyManager:
    """Implements `KVTiers`: owns the tiers below one device, and the moves under way.

    `tiers` from the nearest to the furthest. `index` and `arrivals` are the device's. `costs` says how long
    computing blocks again takes; they are loaded if that is faster. A `RemoteTier` is asked for each request
    before anything is loaded from it. `speeds`: how fast loads from each tier are taken to be.
    `most_polled_blocks`: of the moves that one `poll` takes in; a larger move is taken in alone. The others
    wait for the next `poll`.
    """

    def __init__(
        self,
        index: PrefixReuseIndex,
        arrivals: PrefixArrivals,
        tiers: Sequence[KVTier],
        migrator: Migrator,
        costs: CostBenefitModel,
        bytes_per_block: int,
        *,
        load_hot: bool = False,
    ) -> None:
        self._index, self.arrivals, self.tiers, self.load_hot = index, arrivals, tuple(tiers), load_hot
        self._migrator, self._costs = migrator, costs
        self._saves = TierSaves(index, self.tiers, migrator, bytes_per_block)
        self.speeds = TransferSpeeds([tier.tier for tier in tiers], bytes_per_block)
        self._loads: dict[int, _Load] = {}
        self._holds: dict[str, _Hold] = {}
        self._waiting: set[str] = set()
        """Requests that wait for a load, or for an answer of the shared store."""
        self._tails: dict[str, Tail] = {}
        self._unstarted: list[tuple[MigrationPlan, _Load]] = []
        self._came: list[str] = []
        self.most_polled_blocks: float = MOST_POLLED_BLOCKS
        self._remote = next((tier for tier in self.tiers if isinstance(tier, RemoteTier)), None)

    # -- down

    def offer(self, hit: PrefixHit, account: Account = NO_ACCOUNT, use: Use | None = None) -> None:
        if not hit.num_blocks:
            return
        self._saves.offer(self.tiers, SavedPath(hit, hit), account, use)

    @property
    def num_acceptable(self) -> int:
        return self._saves.num_acceptable

    def save_evicted(self, paths: Iterable[EvictedPath], give_back: Callable[[], None]) -> None:
        evicted, refused = EvictedBlocks(give_back), set[Tier]()
        try:
            for tokens, namespace, block_ids, account, use in paths:
                num_blocks, cached = len(block_ids), self._index.lookup(tokens, namespace)
                slow = {
                    tier.tier
                    for tier in self.tiers
                    if self.speeds.is_measured(tier.tier) and not self._is_worth(tier, 0, num_blocks)
                }
                refused |= slow
                worth = [tier for tier in self.tiers if tier.tier not in slow]
                whole = PrefixHit(num_blocks * self._index.block_size, num_blocks, tokens, namespace)
                path = SavedPath(whole, cached, block_ids[cached.num_blocks :], evicted)
                self._saves.offer(worth, path, account, use)
        finally:
            evicted.let_go()
        for name in refused:
            self.speeds.refused(name)

    # -- preempted requests

    def hold(self, request_id: str, hit: PrefixHit, account: Account, use: Use) -> None:
        self.let_go(request_id)
        tier = next(self._own_tiers(), None)
        if tier is None or not hit.num_blocks or not self._may_hold(tier, hit):
            return
        self._saves.is_awaited = True
        self._saves.offer((tier,), SavedPath(hit, hit), account, use)
        while self._saves.move_ids:
            self._migrator.wait(1.0)
            self._came = self.poll()
        self._saves.is_awaited = False
        saved = tier.lookup(hit.tokens, hit.namespace, hit.num_tokens)
        self._holds[request_id] = _Hold(tier, tier.index.pin(saved, is_use=False))

    def _may_hold(self, tier: KVTier, hit: PrefixHit) -> bool:
        if self._num_held(tier) + hit.num_blocks > MAX_HELD_SHARE * tier.pool.total_blocks:
            return False
        missing = hit.num_blocks - tier.lookup(hit.tokens, hit.namespace, hit.num_tokens).num_blocks
        copies_s = self.speeds.load_s(tier.tier, missing) + self.speeds.load_s(tier.tier, hit.num_blocks)
        return copies_s < self._costs.recompute_s(_extent(0, hit.num_blocks))

    def _num_held(self, tier: KVTier) -> int:
        return sum(held.prefix.num_blocks for held in self._holds.values() if held.tier is tier)

    def let_go(self, request_id: str) -> None:
        held = self._holds.pop(request_id, None)
        if held is not None:
            held.tier.index.unpin(held.prefix, is_use=False)

    def load_s(self, num_blocks: int) -> float:
        tier = next(self._own_tiers(), None)
        return math.inf if tier is None else self.speeds.load_s(tier.tier, num_blocks)

    def slowest_load_s(self, tokens: Tokens, namespace: Namespace) -> float:
        held = [(tier.tier, tier.lookup(tokens, namespace).num_blocks) for tier in self._own_tiers()]
        return max(
            [self.speeds.load_s(tier, num_blocks) for tier, num_blocks in held if num_blocks], default=0.0
        )

    def _own_tiers(self) -> Iterator[KVTier]:
        """Tiers that work, but not the shared store."""
        return (tier for tier in self.tiers if not tier.fault and tier is not self._remote)

    def hint(self, tokens: Tokens, namespace: Namespace, hint: Hint) -> int:
        hits = [(tier, tier.lookup(tokens, namespace)) for tier in self.tiers]
        return max([tier.index.hint(hit, hint) for tier, hit in hits if hit.num_blocks], default=0)

    # -- up

    def shared_prefixes(self, count: int) -> Iterator[SharedPrefix | None]:
        for tier in self._own_tiers():
            yield from tier.index.shared_prefixes(count)

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
        if request_id in self._waiting:
            return TierLookup.HIT_PENDING
        cached = self._index.lookup(tokens, namespace, max_tokens).num_blocks
        if 0 < min(max_tokens, len(tokens)) // self._index.block_size <= cached:
            self._forget(request_id)
            return TierLookup.HIT
        found, tier = self._best(request_id, tokens, namespace, max_tokens, cached, tail_blocks)
        if asks and self._ask(
            request_id, tokens, namespace, max_tokens, account, found.num_blocks, tail_blocks
        ):
            return TierLookup.HIT_PENDING
        if tier is None:
            self._forget(request_id)
            return TierLookup.MISS
        if self._first_of_tail(tier, cached, found.num_blocks, tail_blocks) is not None:
            return TierLookup.SPLIT
        if self._joins(request_id, tokens, namespace, cached):
            return TierLookup.HIT_PENDING
        arrival = None
        if has_room:
            arrival = self.arrivals.begin_receive(tokens, namespace, found.num_blocks, account)
        if arrival is None:
            return TierLookup.RETRY
        self._begin_load(request_id, tier, found, arrival, is_tail=False)
        if start:
            self.start_loads()
        return TierLookup.HIT_PENDING

    def _joins(self, request_id: str, tokens: Tokens, namespace: Namespace, cached: int) -> bool:
        """Whether the first missing block comes for another request; then this one waits, too."""
        path = self._path(tokens, cached + 1)
        for load in self._all_loads():
            source = load.source
            is_other = load.arrival.first != cached or source.namespace != namespace
            if load.is_tail or is_other or not load.request_ids:  # without any it was cancelled
                continue
            if self._path(source.tokens, cached + 1) == path:
                load.request_ids.append(request_id)
                self._waiting.add(request_id)
                return True
        return False

    def _all_loads(self) -> Iterator[_Load]:
        yield from self._loads.values()
        yield from (load for _, load in self._unstarted)

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
        if tier is None or request_id in self._waiting or request_id in self._tails:
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
        return None if request_id in self._waiting else self._tails.pop(request_id, Tail())

    def _begin_load(
        self, request_id: str, tier: KVTier, found: PrefixHit, arrival: Arrival, *, is_tail: bool
    ) -> None:
        load = _Load([request_id], tier, tier.begin_load(found), arrival, is_tail)
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
        self._waiting.add(request_id)
        self._unstarted.append((plan, load))

    def is_loading(self, request_id: str) -> bool:
        return request_id in self._waiting

    def start_loads(self) -> None:
        for plan, load in self._unstarted:
            self._loads[self._migrator.migrate(plan)] = load
        self._unstarted.clear()

    def drop_unstarted(self) -> bool:
        has_any = bool(self._unstarted)
        for _, load in self._unstarted:
            self._drop(load)
            self._came += self._names_of(load)
        self._unstarted.clear()
        return has_any

    def _drop(self, load: _Load) -> None:
        """Give back the blocks of a load that no thread has seen."""
        load.tier.index.unpin(load.source, is_use=False)
        self.arrivals.abort(load.arrival)

    def cancel(self, request_id: str) -> None:
        """See `KVTiers`. Blocks that have come already are cached, those of a tail are free again."""
        self._forget(request_id)
        self._drop_tail(request_id)
        if request_id not in self._waiting:
            return
        self._waiting.remove(request_id)
        for move_id, load in self._loads.items():
            if request_id in load.request_ids:
                load.request_ids.remove(request_id)
                if not load.request_ids:
                    self._migrator.cancel(move_id)
                return
        for plan, load in self._unstarted:
            if request_id in load.request_ids:
                load.request_ids.remove(request_id)
                if not load.request_ids:
                    self._unstarted.remove((plan, load))
                    self._drop(load)
                return

    def _names_of(self, load: _Load) -> list[str]:
        """The requests of a load, which wait no more."""
        names, load.request_ids = load.request_ids, []
        self._waiting.difference_update(names)
        return names

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
            return self._refuse(remote)
        limit_s = self._costs.recompute_s(_extent(found, num_blocks))
        if not remote.ask(request_id, tokens, namespace, num_blocks, account, limit_s):
            return False
        self._waiting.add(request_id)
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
        """The longest prefix worth loading, or its tail; of equals, the nearest tier's."""
        best, of_tier = PrefixHit(0, cached, tokens, namespace), None
        for tier in self.tiers:
            if isinstance(tier, RemoteTier) and request_id not in tier.answered:
                continue
            hit = tier.lookup(tokens, namespace, max_tokens)
            if hit.num_blocks > best.num_blocks and (
                self._first_of_tail(tier, cached, hit.num_blocks, tail_blocks) is not None
                or self._is_worth(tier, cached, hit.num_blocks)
                or self._refuse(tier)
            ):
                best, of_tier = hit, tier
        return best, of_tier

    def _first_of_tail(
        self, tier: KVTier, first: int, stop: int, tail_blocks: int, latency_s: float = LATENCY_S
    ) -> int | None:
        """Where to split blocks [first, stop), behind the loads of this tier."""
        if not tail_blocks:
            return None
        ahead = sum(len(load.arrival.block_ids) for load in self._all_loads() if load.tier is tier)
        return first_of_tail(
            first, stop, tail_blocks,
            lambda end: self._costs.recompute_s(_extent(first, end)),
            lambda count: self.speeds.load_s(tier.tier, ahead + count, latency_s),
        )  # fmt: skip

    def _is_worth(self, tier: KVTier, first: int, stop: int, latency_s: float = LATENCY_S) -> bool:
        load_s = self.speeds.load_s(tier.tier, stop - first, latency_s)
        return load_s < self._costs.recompute_s(_extent(first, stop))

    def _refuse(self, tier: KVTier) -> bool:
        """A load takes too long. The tier is tried again after some of these; returns False."""
        self.speeds.refused(tier.tier)
        if isinstance(tier, RemoteTier):
            tier.ask_s /= REGAINED
        return False

    # -- what has ended

    def poll(self) -> list[str]:
        arrived, self._came = self._came, []
        stuck, is_late = self._migrator.stuck(MAX_CALL_S), self._has_late_load()
        most_blocks = math.inf if stuck or is_late else self.most_polled_blocks  # what has ended is not late
        reports, written = self._migrator.poll(most_blocks), list[BlocksByTier]()
        for source, name in stuck.items():
            if name is not Tier.REMOTE:  # that has time limits of its own
                reports += self._give_up(source, name, {report.move_id for report in reports})
        if self._remote is not None:
            arrived += self._poll_remote(self._remote, reports)
        for report in reports:
            blocks = self._saves.end(report)
            if blocks is not None:
                written.append(blocks)
                for target in report.plan.targets:
                    num_written = report.num_written.get(target.tier, 0)
                    if target.tier is not Tier.REMOTE:  # that has a queue
                        self.speeds.wrote(target.tier, num_written, report.spent_s)
                continue
            load = self._loads.pop(report.move_id)
            self._loaded(load, report)
            arrived += self._names_of(load)
        if reports:
            self._saves.offer_again(written)
        return arrived

    def _has_late_load(self) -> bool:
        if self._remote is None:
            return False
        now_s = self._remote.now()
        return any(load.until_s <= now_s for load in self._loads.values())

    def _give_up(self, source: Tier, name: Tier, ended: set[int]) -> list[MigrationReport]:
        """Do without a tier whose storage does not return.

        Returns reports of the moves behind that call; those that have `ended` have theirs.
        """
        [tier] = [tier for tier in self.tiers if tier.tier is name]
        tier.give_up(f"it has not answered for {MAX_CALL_S:g} s")
        log.warning("the tier %s is not used any more: %s", name, tier.fault)
        behind = [number for number, load in self._loads.items() if load.tier.tier is source]
        if source is Tier.HBM:
            behind = self._saves.move_ids
        reports = [self._migrator.abandon(move_id) for move_id in behind if move_id not in ended]
        self._migrator.replace_thread(source)
        return reports

    def _poll_remote(self, remote: RemoteTier, reports: list[MigrationReport]) -> list[str]:
        """Returns requests whose question has ended; adds reports of loads that are given up."""
        answered = remote.poll()
        self._waiting.difference_update(answered)
        ended, now_s = {report.move_id for report in reports}, remote.now()
        for move_id, load in self._loads.items():
            if load.until_s <= now_s and move_id not in ended:
                reports.append(self._migrator.abandon(move_id))
                if load.until_s > -math.inf:  # it was slow
                    self.speeds.gave_up(Tier.REMOTE)
        return answered

    def _loaded(self, load: _Load, report: MigrationReport) -> None:
        load.tier.end_load(load.source, load.arrival.first, report.num_read, report.outcome)
        num_written = report.num_written.get(Tier.HBM, 0)
        if not load.is_tail:
            self.arrivals.publish(load.arrival, num_written)
        elif load.request_ids:
            self._tails[load.request_ids[0]] = Tail(load.arrival, num_written)
        else:  # the request has left, or memory was wanted
            self.arrivals.abort(load.arrival)
        self.speeds.loaded(load.tier.tier, report.num_read, report.spent_s)

    def give_way(self) -> bool:
        has_dropped = self.drop_unstarted()
        self._saves.drop_offers()
        had_tails = bool(self._tails)
        for request_id in list(self._tails):
            self._drop_tail(request_id)
        for load in self._loads.values():
            if load.is_tail:
                self._names_of(load)  # so that what has come is freed
        if not self._saves.move_ids and not self._loads:
            return had_tails or has_dropped
        for move_id in (*self._saves.move_ids, *self._loads):
            self._migrator.cancel(move_id)
        for load in self._loads.values():
            if load.tier is self._remote:  # its thread may wait for the network
                load.until_s = -math.inf
        if self._remote is not None:
            self._remote.answered.clear()
        self._came = self.poll()
        while self._saves.move_ids or self._loads:
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

    def wake(self) -> None:
        self._migrator.wake()

    def states(self) -> list[TierState]:
        return [tier.state(self._num_held(tier)) for tier in self.tiers]

    def faults(self) -> list[str]:
        return [f"{tier.tier}: {fault}" for tier in self.tiers if (fault := tier.fault)]

    def clear(self) -> int:
        self.give_way()
        return sum(tier.clear() for tier in self.tiers)

    def close(self) -> None:
        """Cancel what is under way, take in its ends, and close the storages."""
        self.drop_unstarted()
        self._saves.drop_offers()
        if self._remote is not None:
            self._remote.close()
        self._migrator.close()
        while not self._migrator.is_idle:
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
        names = [name for load in self._all_loads() for name in load.request_ids]
        if len(set(names)) < len(names) or not self._waiting.issuperset(names):
            raise BookkeepingError(f"{names} have loads, {self._waiting} wait")
        if not self._waiting.isdisjoint(self._tails):
            raise BookkeepingError(f"tails of {[*self._tails]} have come, and are on their way")

    def _path(self, tokens: Tokens, num_blocks: int) -> bytes:
        return tokens.tobytes()[: num_blocks * self._index.block_size * TOKEN_BYTES]


def _extent(first: int, stop: int) -> SimpleExtent:
    return SimpleExtent(0, stop - first, first_position=first)
