"""`HashedIndex`: a dictionary from chained block hashes to blocks, one record per block.

This is the form in which other engines name blocks (vLLM's automatic prefix caching, and the KV events that
routers read). The hash of a block covers all that is before it, so one flat dictionary holds every prefix. A
hash is only where to look: tokens are compared, so two blocks with one hash are kept apart.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from sagellm.core.blocks import cdiv
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.events import BlocksRemoved, BlocksStored, EventBus, IndexCleared
from sagellm.core.protocols.eviction import NO_USE, EvictionPolicy, Extent, Hint, Use
from sagellm.core.protocols.prefix_cache import Branch, InsertResult, MatchEnd, MatchReport, PrefixHit
from sagellm.core.types import NO_ACCOUNT, TOKEN_BYTES, Account, BlockIds, Namespace, Retention, Tokens
from sagellm.kvmgr.prefix_cache._ghosts import Ghost, Ghosts
from sagellm.kvmgr.prefix_cache._records import BlockRecord, HashBlocks, Records, Share
from sagellm.kvmgr.prefix_cache.fingerprint import chain

DEFAULT_NAMESPACE = Namespace()
MIN_SHARES_TO_PRUNE = 64


class HashedIndex:
    """Implements `PrefixReuseIndex`. Not thread-safe: one engine thread owns it.

    `evict` gives up what `policy` chooses; without one, the block that was used longest ago, deeper ones
    first. With `policy_factory` each account has a policy of its own. `max_ghosts` bounds
    how many evictions `explain` remembers. `hash_blocks` stands in for
    `fingerprint.chain` in tests.
    """

    def __init__(
        self,
        block_size: int = 16,
        policy: EvictionPolicy | None = None,
        events: EventBus | None = None,
        clock: Clock | None = None,
        policy_factory: Callable[[], EvictionPolicy] | None = None,
        max_ghosts: int = 4096,
        *,
        hash_blocks: HashBlocks = chain,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if policy is None and policy_factory is not None:
            policy = policy_factory()
        self.block_size = block_size
        self._policy_factory = policy_factory
        self._events = events or EventBus()
        self._clock = clock or MonotonicClock()
        self._step = block_size * TOKEN_BYTES
        self._records = Records(self._step, hash_blocks)
        self._shares = {NO_ACCOUNT: Share(NO_ACCOUNT, policy)}
        self._prune_at = MIN_SHARES_TO_PRUNE
        self._ghosts: Ghosts[bytes] = Ghosts(max_ghosts)
        self._tick = 0

    # -- counts

    @property
    def num_cached(self) -> int:
        return len(self._records)

    @property
    def num_evictable(self) -> int:
        return sum(share.num_evictable for share in self._shares.values())

    def evictable_by_account(self) -> Mapping[Account, int]:
        return {share.account: share.num_evictable for share in self._shares.values() if share.num_blocks}

    def all_block_ids(self) -> BlockIds:
        return array("i", self._records.by_block)

    # -- read

    def lookup(
        self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE, max_tokens: int | None = None
    ) -> PrefixHit:
        limit = len(tokens) if max_tokens is None else min(max_tokens, len(tokens))
        path = self._records.walk(tokens.tobytes(), limit // self.block_size, namespace)
        return self._hit(tokens, namespace, path)

    def branches(self, tokens: Tokens, k: int, namespace: Namespace = DEFAULT_NAMESPACE) -> list[Branch]:
        path = self._records.walk(tokens.tobytes(), len(tokens) // self.block_size, namespace)
        found: list[Branch] = []
        seen: BlockRecord | None = None
        while path and len(found) < k:
            hit = self._hit(tokens, namespace, path)
            leaves = sorted(path[-1].leaves_below(seen), key=lambda leaf: -leaf.last_use)
            found += [Branch(hit, leaf.first_position + 1, leaf.used_s) for leaf in leaves]
            seen = path.pop()
        return found[: max(0, k)]

    def block_ids(self, hit: PrefixHit) -> BlockIds:
        return array("i", [record.block_id for record in reversed(self._records_of(hit))])

    def verify(self, hit: PrefixHit) -> bool:
        limit = hit.num_blocks * self.block_size
        return self.lookup(hit.tokens, hit.namespace, limit).num_blocks == hit.num_blocks

    def num_unpinned_on_path(self, hit: PrefixHit) -> int:
        return sum(not record.pins for record in self._records_of(hit))

    def num_held_alone(self, hit: PrefixHit) -> int:
        return sum(record.pins == 1 for record in self._records_of(hit))

    def explain(self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> MatchReport:
        data, total = tokens.tobytes(), len(tokens) // self.block_size
        path = self._records.walk(data, total, namespace)
        hit = self._hit(tokens, namespace, path)
        if hit.num_blocks == total:
            return MatchReport(hit.num_tokens, total, MatchEnd.COMPLETE)
        block = data[hit.num_blocks * self._step : (hit.num_blocks + 1) * self._step]
        others = self._records.namespaces() - {namespace}
        longest = max((len(self._records.walk(data, total, other)) for other in others), default=0)
        elsewhere = longest if longest > hit.num_blocks else 0
        ghost = self._ghosts.get(self._records.hash(block, hit.node, namespace))
        at_s, cause = ghost if ghost is not None else (None, None)
        end = MatchEnd.EVICTED if ghost is not None else self._reason(block, hit, elsewhere=elsewhere > 0)
        return MatchReport(hit.num_tokens, hit.num_blocks, end, at_s, cause, elsewhere)

    # -- pins

    def pin(self, hit: PrefixHit) -> PrefixHit:
        path = self._records_of(hit)
        if path:
            num_held = sum(record.pins > 0 for record in path)
            self._hold(path)
            share = path[0].share
            if share.listener is not None:
                share.listener.found(path[0], num_held)
        return self._hit(hit.tokens, hit.namespace, path[::-1])

    def _hold(self, path: Sequence[BlockRecord]) -> None:
        """Pin a path, the last record first."""
        for record in path:
            record.num_uses += 1
            record.pins += 1
            if record.pins == 1:
                record.share.num_pinned += 1
                record.share.withdraw(record, in_use=True)
        path[0].num_ends += 1

    def unpin(self, hit: PrefixHit, use: Use = NO_USE) -> None:
        if not hit.num_blocks:
            return
        if not hit.node.num_ends:
            raise BookkeepingError(f"unpin of a prefix of {hit.num_blocks} blocks that nobody pins")
        self._tick += 1
        hit.node.last_use, hit.node.used_s = self._tick, self._clock.now()
        hit.node.use = use
        self._let_go(hit.node)
        if use is not NO_USE and hit.node.share.listener is not None:
            hit.node.share.listener.used(hit.node)

    # -- the policy

    def hint(self, hit: PrefixHit, hint: Hint) -> int:
        path = self._records_of(hit)
        if not path or ((hint.ended or hint.superseded) and path[0].children):
            return 0
        num_blocks, now_s = 0, self._clock.now()
        for record in path:
            if record is not path[0] and len(record.children) > 1:
                break
            record.take_hint(hint, now_s)
            num_blocks += 1
        return num_blocks

    def set_policy(self, factory: Callable[[], EvictionPolicy]) -> None:
        policies = {account: share.introduce(factory()) for account, share in self._shares.items()}
        self._policy_factory = factory
        for account, policy in policies.items():
            self._shares[account].policy = policy

    # -- write

    def insert(
        self,
        tokens: Tokens,
        block_ids: Sequence[int],
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        account: Account = NO_ACCOUNT,
        retention: Sequence[Retention] = (),
        pin: bool = False,
    ) -> InsertResult:
        ids = array("i", block_ids)
        if len(ids) * self.block_size > len(tokens):
            raise BookkeepingError(
                f"{len(ids)} blocks of {self.block_size} tokens for a prompt of {len(tokens)} tokens"
            )
        data = tokens.tobytes()
        path = self._records.walk(data, len(ids), namespace)
        self._records.check_new(ids, path)
        share, existing = self._share(account), len(path)
        for position in range(existing, len(ids)):
            block = data[position * self._step : (position + 1) * self._step]
            parent = path[-1] if path else None
            path.append(self._records.add(parent, block, ids[position], namespace, share))
        self._retain(path, retention)
        if existing < len(path):
            self._enter(path, existing)
        hit = self._hit(tokens, namespace, path)
        if pin and path:
            self._hold(path[::-1])
            if share.listener is not None:
                share.listener.added(path[-1], len(path) - existing, share.num_blocks)
        elif existing < len(path):
            for record in path:
                record.num_uses += 1
            share.offer(path[-1])
        return InsertResult(existing, hit)

    def retract(self, result: InsertResult) -> None:
        hit = result.hit
        if not hit.num_blocks:
            return
        last: BlockRecord = hit.node
        new = list(last.path())[: hit.num_blocks - result.num_existing]
        followers = sum(len(record.children) for record in new)
        if not last.num_ends or any(record.pins > 1 for record in new) or followers > max(0, len(new) - 1):
            raise BookkeepingError("retract of an insertion that is not pinned, or that others use by now")
        for record in last.path():
            record.num_uses -= 1
        self._let_go(last)
        for record in new:
            record.share.withdraw(record)
            above = self._remove(record)
            if above is not None:
                above.share.offer(above)
        self._tell_removed(new, "retracted")

    def evict(self, num_blocks: int, cause: str = "capacity") -> BlockIds | None:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        if num_blocks > self.num_evictable:
            return None
        gone: list[BlockRecord] = []
        stalled = False
        while len(gone) < num_blocks and not stalled:
            before = len(gone)
            for share in sorted(self._shares.values(), key=lambda one: -one.num_evictable):
                self._give_up_from(share, num_blocks - len(gone), gone)
            stalled = len(gone) == before
        freed = self._forget(gone, cause)
        if stalled:
            raise BookkeepingError(
                f"the eviction policy gave up {len(freed)} blocks of {num_blocks}; they are {freed.tolist()}"
            )
        return freed

    def evict_from(self, account: Account, num_blocks: int, cause: str = "capacity") -> BlockIds:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        gone: list[BlockRecord] = []
        share = self._shares.get(account)
        if share is not None:
            self._give_up_from(share, min(num_blocks, share.num_evictable), gone)
        return self._forget(gone, cause)

    def clear(self) -> BlockIds:
        freed = self.evict(self.num_evictable, "cleared")
        assert freed is not None
        for share in self._shares.values():
            if share.listener is not None:
                share.listener.cleared(share.num_blocks)
        if not self._records and self._events.wants(IndexCleared):
            self._events.emit(IndexCleared())
        return freed

    def remap(self, moves: Mapping[int, int]) -> None:
        self._records.remap(moves)

    # -- inside: finding

    def _hit(self, tokens: Tokens, namespace: Namespace, path: Sequence[BlockRecord]) -> PrefixHit:
        node = path[-1] if path else None
        return PrefixHit(len(path) * self.block_size, len(path), tokens, namespace, node)

    def _current(self, hit: PrefixHit) -> PrefixHit:
        """The hit itself, or what is left of it if its last block went since the look-up."""
        if not hit.num_blocks or hit.node.num_blocks:
            return hit
        return self.lookup(hit.tokens, hit.namespace, hit.num_blocks * self.block_size)

    def _records_of(self, hit: PrefixHit) -> list[BlockRecord]:
        """The records of a hit, the deepest first."""
        hit = self._current(hit)
        return list(hit.node.path()) if hit.num_blocks else []

    def _reason(self, block: bytes, hit: PrefixHit, *, elsewhere: bool) -> MatchEnd:
        """Why `block`, of which there is no ghost, is not resident behind the hit."""
        if elsewhere:
            return MatchEnd.OTHER_NAMESPACE
        followers = self._records.followers(hit.node, hit.namespace)
        if any(follower.data.startswith(block[:TOKEN_BYTES]) for follower in followers):
            return MatchEnd.NOT_ALIGNED
        return MatchEnd.NEVER_SEEN

    # -- inside: coming

    def _share(self, account: Account) -> Share:
        share = self._shares.get(account)
        if share is None:
            if self._policy_factory is None and self._shares[NO_ACCOUNT].policy is not None:
                raise BookkeepingError(
                    f"one policy cannot choose for {account} alone: give the index a policy_factory"
                )
            if len(self._shares) >= self._prune_at:
                self._prune()
            policy = self._policy_factory() if self._policy_factory is not None else None
            share = self._shares[account] = Share(account, policy)
        return share

    def _prune(self) -> None:
        """Forget accounts without blocks, and their policies: clients choose the names, without end."""
        self._shares = {
            one: share for one, share in self._shares.items() if share.num_blocks or one == NO_ACCOUNT
        }
        self._prune_at = max(MIN_SHARES_TO_PRUNE, 2 * len(self._shares))

    def _enter(self, path: Sequence[BlockRecord], existing: int) -> None:
        """Stamp what was added behind the first `existing` records, and tell whom it concerns."""
        self._tick += 1
        now = self._clock.now()
        for record in path[existing:]:
            record.last_use, record.used_s = self._tick, now
            self._ghosts.discard(record.hash)
        if existing:
            path[existing - 1].share.withdraw(path[existing - 1])
        if self._events.wants(BlocksStored):
            self._events.emit(_stored(path, existing, self.block_size))

    def _retain(self, path: Sequence[BlockRecord], retention: Sequence[Retention]) -> None:
        """Note the longest bonus of each block; what was noted before stays where it is longer."""
        for wish in retention:
            start = wish.start // self.block_size
            stop = len(path) if wish.stop is None else cdiv(wish.stop, self.block_size)
            for record in path[start:stop]:
                if record.bonus_s < wish.bonus_s:
                    record.bonus_s = wish.bonus_s
                    if record.share.withdraw(record):
                        record.share.offer(record)

    def _let_go(self, last: BlockRecord) -> None:
        last.num_ends -= 1
        for record in last.path():
            record.pins -= 1
            if not record.pins:
                record.share.num_pinned -= 1
                if record.is_evictable_leaf:
                    record.share.offer(record, returning=True)

    # -- inside: going

    def _give_up_from(self, share: Share, num_blocks: int, gone: list[BlockRecord]) -> None:
        """Add to `gone` what one account gives up: `num_blocks`, or all it can."""

        def give_up(extent: Extent, num_blocks: int) -> BlockRecord | None:
            record = share.leaves.get(extent.key)
            if record is None or num_blocks != 1:
                raise BookkeepingError(f"the policy gave up {num_blocks} blocks of extent {extent.key:x}")
            gone.append(record)
            return self._remove(record)

        share.give_up(num_blocks, give_up)

    def _remove(self, record: BlockRecord) -> BlockRecord | None:
        """Take out an evictable leaf; returns its parent if that is one now and of the same account. Another
        account's goes to its own policy."""
        record.share.leaves.pop(record.key, None)
        self._records.remove(record)
        parent = record.parent
        if parent is None or not parent.is_evictable_leaf:
            return None
        if parent.share is not record.share:
            parent.share.offer(parent)
            return None
        parent.share.leaves[parent.key] = parent
        return parent

    def _forget(self, gone: Sequence[BlockRecord], cause: str) -> BlockIds:
        """Leave ghosts, tell the listeners, and return the ids."""
        ghost = Ghost(self._clock.now(), cause)
        for record in gone:
            self._ghosts.add(record.hash, ghost)
        self._tell_removed(gone, cause)
        return array("i", [record.block_id for record in gone])

    def _tell_removed(self, gone: Sequence[BlockRecord], cause: str) -> None:
        if not self._events.wants(BlocksRemoved):
            return
        for namespace, records in groupby(gone, key=lambda record: record.namespace):
            ids, hashes = zip(*((record.block_id, record.hash) for record in records), strict=True)
            self._events.emit(BlocksRemoved(ids, cause, hashes, namespace))

    # -- check

    def check(self) -> None:
        self._records.check()
        for share in self._shares.values():
            share.check([record for record in self._records if record.share is share])


def _stored(path: Sequence[BlockRecord], existing: int, block_size: int) -> BlocksStored:
    new = path[existing:]
    return BlocksStored(
        block_ids=tuple(record.block_id for record in new),
        num_tokens_before=existing * block_size,
        hashes=tuple(record.hash for record in new),
        parent_hash=path[existing - 1].hash if existing else None,
        tokens=b"".join(record.data for record in new),
        namespace=new[0].namespace,
    )


PLUGIN = HashedIndex
