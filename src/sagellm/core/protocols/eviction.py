"""Contract of eviction policies: which KV to give up first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol


class Use(NamedTuple):
    """A request that used an extent.

    `num_output_tokens`: tokens that it generated; `num_reused_blocks`: leading blocks of its prompt that were
    cached; `num_prompt_blocks`: blocks of its prompt in all (0: not known); `priority`: higher is served
    first; `ttft_slo_s`: seconds that it may take to its first token (None: no goal).
    """

    num_output_tokens: int = 0
    num_reused_blocks: int = 0
    num_prompt_blocks: int = 0
    priority: int = 0
    ttft_slo_s: float | None = None


NO_USE = Use()


class Extent(Protocol):
    """Consecutive blocks that are evicted from the tail.

    An edge of the prefix tree, or a single block.

    A live object of the index that calls the policy. Only the index changes it, and it reports each change by
    an event.

    * `key`: a deterministic content hash, unique among cached extents. An evicted extent that comes back has
      the same key.
    * `parent`: the extent in front of it. In front of the first there may be a root, which has no blocks.
    * `used_s`, `last_use`: when its last use ended, in seconds of the clock and as a count.
    * `num_uses`: how often it was used, also as part of a longer prefix.
    * `bonus_s`: seconds by which soft retention makes it look younger.
    * `use`: the request that used it last; `hint`: the last hint since then, which `insert` and `unpin`
      apply.
    * `content`: the tokens as int32, empty where the caller does not know them.
    """

    @property
    def key(self) -> int: ...

    @property
    def parent(self) -> Extent | None: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def first_position(self) -> int: ...

    @property
    def last_use(self) -> int: ...

    @property
    def num_uses(self) -> int: ...

    @property
    def used_s(self) -> float: ...

    @property
    def bonus_s(self) -> float: ...

    @property
    def use(self) -> Use: ...

    @property
    def hint(self) -> Hint | None: ...

    @property
    def tenant(self) -> str: ...

    @property
    def content(self) -> bytes: ...


@dataclass(slots=True, eq=False)
class SimpleExtent:
    """An extent without an index: for flat streams of blocks, other engines and tests. Two of them are never
    equal."""

    key: int
    num_blocks: int = 1
    parent: SimpleExtent | None = None
    first_position: int = 0
    last_use: int = 0
    num_uses: int = 1
    used_s: float = 0.0
    bonus_s: float = 0.0
    use: Use = NO_USE
    hint: Hint | None = None
    tenant: str = ""
    content: bytes = b""
    priority: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hint:
    """What became known of an extent after its last use. None leaves a field as it is.

    `priority`: 0 to 100; `duration_s`: counts from the hint; `ended`: the session is over; `superseded`: an
    edited history replaced the extent; `wanted_by`: number of waiting requests that are about to use it;
    `expected`: a client said that it is about to be used.
    """

    priority: int | None = None
    duration_s: float | None = None
    ended: bool | None = None
    superseded: bool | None = None
    wanted_by: int | None = None
    expected: bool | None = None

    @property
    def wanted(self) -> int | None:
        """How many requests are about to use the extent. None: this hint does not say."""
        if self.wanted_by is None and self.expected is None:
            return None
        return (self.wanted_by or 0) + bool(self.expected)

    def over(self, before: Hint | None) -> Hint:
        """This hint, with the fields of an earlier one where this one has None."""
        if before is None:
            return self
        known = {name: value for name in Hint.__slots__ if (value := getattr(self, name)) is not None}
        return replace(before, **known)


def bonus_of(hint: Hint, age_s: float) -> float:
    """The `bonus_s` of an extent of that age after a hint with a duration."""
    priority = 50 if hint.priority is None else hint.priority
    return max(0.0, age_s + (hint.duration_s or 0.0) * priority / 100)


GiveUp = Callable[[Any, int], "Extent | None"]
"""`give_up(extent, n)`: the index takes the last `n` blocks out of the extent, whose `num_blocks` shrinks. If
the extent is empty then and its parent became an evictable leaf, returns the parent, else None."""


class EvictionPolicy(Protocol):
    """Follows what happens to extents, and chooses which blocks to evict. It holds evictable leaves only:
    `insert` and `unpin` add one, `pin` and `remove` take one out."""

    @property
    def num_evictable(self) -> int:
        """Blocks of all extents that the policy holds."""

    def insert(self, extent: Extent) -> None:
        """A new evictable leaf. It may be a parent whose last child was removed. Not called for evictions:
        there `give_up` returns the parent."""

    def pin(self, key: int) -> None:
        """A request uses the extent now. Unknown keys are ignored: inner nodes are pinned too."""

    def unpin(self, extent: Extent) -> None:
        """No request uses the extent any more; it is evictable again."""

    def remove(self, key: int) -> None:
        """The extent is gone or has children now; this policy did not choose it."""

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        """Evict blocks, tails before heads; returns how many.

        Evicts fewer than `num_blocks` only where the policy holds no more. The policy calls `give_up` for
        each choice at once. It drops an extent that is empty then, and inserts the parent that `give_up`
        returns, which may be chosen in the same call. Raises `BookkeepingError` for a negative number.
        """

    def split(self, old: int, head: Extent, tail: Extent) -> None:
        """The extent `old` became two. The tail keeps its place, the head is an inner node. Called for every
        extent; a policy ignores those that it does not hold."""

    def hint(self, key: int, hint: Hint) -> None:
        """Something became known of the extent. Unknown keys are ignored."""

    def check(self) -> None:
        """Raises `BookkeepingError` where the policy's books are wrong."""


PolicyFactory = Callable[[], EvictionPolicy]
"""Makes a policy for one more account."""


class UseListener:
    """Base class of policies that follow every use of every path. Also of extents that they do not hold.
    `num_cached`: the blocks that the policy's account has in the index after the event. The memory of such a
    policy may grow with them, pinned ones included; the pool bounds their number."""

    def found(self, extent: Extent, num_held: int) -> None:
        """A request found the path that ends with this extent, and holds it. Other requests hold the first
        `num_held` blocks already."""

    def added(self, extent: Extent, num_new: int, num_cached: int) -> None:
        """A request added the last `num_new` blocks of this extent's path and holds it."""

    def used(self, extent: Extent) -> None:
        """A request no longer holds this extent's path. `extent.use` is that request."""

    def cleared(self, num_cached: int) -> None:
        """The cache was cleared: the blocks were not evicted for a request."""


class CostBenefitModel(Protocol):
    """Seconds that it takes to get an extent's KV back."""

    def recompute_s(self, extent: Extent) -> float: ...

    def transfer_s(self, extent: Extent, tier: str) -> float: ...
