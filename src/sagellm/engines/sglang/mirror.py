"""What SGLang's tree has on the device, as paths in our prefix index.

SGLang names a prefix by its token ids (int64), an extra key and a salt. Here an int64 is two int32 "tokens",
and a page is a block. Block ids mean nothing: nodes of SGLang's tree are found by their path.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sagellm.core.clock import Clock
from sagellm.core.protocols.eviction import NO_USE, PolicyFactory, Use
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import BlockIds, Namespace, Tokens
from sagellm.engines.guests.request_hints import NO_HINTS, HintedIndex, RequestHints
from sagellm.kvmgr.prefix_cache._tree import Node
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

TOKENS_PER_ID = 2
"""An int64 token id is two int32."""
LAST_BLOCK_ID = (1 << 31) - 1


def namespace_of(key: Any) -> Namespace:
    """The namespace of a `RadixKey`."""
    extra, salt = (f"={name}" if name else "" for name in (key.extra_key, key.cache_salt))
    return Namespace(adapter=extra, tenant=salt)


def names_of(namespace: Namespace) -> tuple[str | None, str | None]:
    """The extra key and the salt of a namespace."""
    return namespace.adapter[1:] or None, namespace.tenant[1:] or None


def path_of_ids(*ids: Any) -> Tokens:
    """The path of arrays of int64 token ids, one behind the other."""
    return Tokens.frombytes(b"".join([piece.tobytes() for piece in ids]))


@dataclass(slots=True)
class Victim:
    """The last `num_pages` pages of a path. `data`: the token ids of the whole path, as bytes."""

    node: Node
    namespace: Namespace
    data: bytes
    num_pages: int


class _ChoosingIndex(RadixIndex):
    """Notes what its policy gives up."""

    victims: list[Victim]

    def _give_up(self, node: Node, num_blocks: int) -> Node | None:
        last = self.victims[-1] if self.victims else None
        if last is not None and last.node is node:
            last.num_pages += num_blocks
        else:
            data = b"".join([above.content for above in reversed(list(node.path()))])
            self.victims.append(Victim(node, node.namespace, data, num_blocks))
        return super()._give_up(node, num_blocks)


class Mirror:
    """Paths with their holders. A hold is a lock in SGLang's tree, named by the node that it is on.

    `hint_kinds`: hints of clients that are heeded.
    """

    def __init__(
        self, page_size: int, policy_factory: PolicyFactory, clock: Clock, hint_kinds: Collection[str] = ()
    ) -> None:
        self.index = _ChoosingIndex(
            TOKENS_PER_ID * page_size, clock=clock, policy_factory=policy_factory, max_ghosts=0
        )
        self.index.victims = []
        self._hinted = HintedIndex(self.index, clock, hint_kinds)
        self._holds: dict[int, list[PrefixHit]] = {}
        self._new: tuple[int, PrefixHit] | None = None
        self._released: list[tuple[int, PrefixHit]] | None = None
        self._next_id = 0

    @property
    def num_evictable(self) -> int:
        """Pages that could be chosen now."""
        return self.index.num_evictable

    def inserted(self, node_id: int, path: Tokens, namespace: Namespace) -> None:
        """SGLang has the path. New pages are held until a lock on that node takes the hold over."""
        index, num_pages = self.index, len(path) // self.index.block_size
        num_known = index.lookup(path, namespace).num_blocks
        if num_known == num_pages:
            return
        self.drop_new_hold()
        ids = self._ids(num_known, num_pages)
        self._new = node_id, index.insert(path, ids, namespace, pin=True).hit

    def drop_new_hold(self) -> None:
        """No lock has taken over what was inserted last."""
        if self._new is not None:
            self.index.unpin(self._new[1])
            self._new = None

    def locks_move(self) -> None:
        """A lock is about to move to another node.

        Releases wait for `locks_moved`, so that the policy does not see the request leave and come back.
        """
        self._released = []

    def locks_moved(self) -> None:
        """What was released meanwhile is not held any more."""
        released, self._released = self._released, None
        for _, hit in released or ():
            self.index.unpin(hit)

    def hold(self, node_id: int, path: Tokens, namespace: Namespace) -> None:
        """A lock on a node; the device has `path` of the path to it."""
        same = [item for item in self._released or () if item[0] == node_id]
        if same and self._released is not None:
            self._released.remove(same[0])
            hit = same[0][1]
        elif self._new is not None and self._new[0] == node_id:
            hit, self._new = self._new[1], None
        else:
            hit = self._pinned(path, namespace)
        self._holds.setdefault(node_id, []).append(hit)

    def _pinned(self, path: Tokens, namespace: Namespace) -> PrefixHit:
        index, num_pages = self.index, len(path) // self.index.block_size
        found = index.lookup(path, namespace)
        if (
            found.num_blocks < num_pages
        ):  # SGLang has pages that we do not know: it came by them in another way
            return index.insert(path, self._ids(found.num_blocks, num_pages), namespace, pin=True).hit
        hit = index.pin(found)
        if isinstance(hit.node, Node):
            hit.node.num_uses -= 1  # `request_began` counts uses: a request locks a path more than once
        return hit

    def request_began(self, node_id: int) -> None:
        """The request that holds this node reuses the path to it."""
        for hit in self._holds.get(node_id, ())[-1:]:
            if isinstance(hit.node, Node) and hit.num_blocks:
                hit.node.num_uses += 1

    def release(self, node_id: int, use: Use = NO_USE, said: RequestHints = NO_HINTS) -> None:
        """A lock on a node is gone. `use` and `said`: of the request that ends with it."""
        holds = self._holds.get(node_id)
        if not holds:
            return
        hit = holds.pop()
        if not holds:
            del self._holds[node_id]
        if self._released is None:
            self.index.unpin(hit, use)
            if said is not NO_HINTS:
                self._hinted.ended(said, hit.tokens, hit.namespace)
        else:
            self._released.append((node_id, hit))

    def choose(self, num_pages: int) -> list[Victim]:
        """Take out pages that the policy gives up, at most `num_pages`, in its order."""
        self.drop_new_hold()
        self.index.victims.clear()
        self.index.evict(min(num_pages, self.index.num_evictable))
        victims, self.index.victims = self.index.victims, []
        return victims

    def keep(self, victim: Victim) -> None:
        """A victim was not needed; SGLang still has it."""
        path = Tokens.frombytes(victim.data)
        num_pages = len(path) // self.index.block_size
        num_known = self.index.lookup(path, victim.namespace).num_blocks
        if num_known < num_pages:
            self.index.insert(path, self._ids(num_known, num_pages), victim.namespace)

    def _ids(self, num_known: int, num_pages: int) -> BlockIds:
        """Numbers for new pages. None is used twice, before there were 2^31 pages."""
        num_new = num_pages - num_known
        if self._next_id + num_new > LAST_BLOCK_ID:
            self._next_id = 0
        first, self._next_id = self._next_id, self._next_id + num_new
        return array("i", bytes(4 * num_known)) + array("i", range(first, first + num_new))

    def check(self) -> None:
        """Raise `BookkeepingError` where the books are wrong."""
        self.index.check()
