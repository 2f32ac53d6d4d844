"""Contract of eviction policies: which KV to give up first. Events on extents, no candidate list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol


class Use(NamedTuple):
    """A request that used an extent: tokens that it generated, leading blocks of its prompt that it found
    here, and blocks of its prompt in all (0: not known); its priority (higher is served first), and the
    seconds that it may take to its first token (None: no goal)."""

    num_output_tokens: int = 0
    num_reused_blocks: int = 0
    num_prompt_blocks: int = 0
    priority: int = 0
    ttft_slo_s: float | None = None


NO_USE = Use()


class Extent(Protocol):
    """A run of blocks that is evicted from its end on: one edge of the prefix tree, or one block.

    A live object of the index that calls the policy: the index alone changes it, and announces each change by
    an event. `key` is a deterministic content hash, unique among resident extents: an extent that was evicted
    and comes back has the same key. `parent` is the extent in front of it; above the first there may be a
    root, which has no blocks. `used_s` and `last_use` say when its last use ended, in seconds of the clock
    and as a count; `num_uses` how often it was used, also as part of a longer prefix; `bonus_s` are the
    seconds by which soft retention makes it look younger; `use` is what is known of the request that used it
    last, `hint` the last hint since then (`insert` and `unpin` must apply it). `content` are the tokens as
    int32, empty where the caller does not know them.
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
class Run:
    """The simplest extent: for flat streams of blocks, other engines and tests. Equal to itself alone."""

    key: int
    num_blocks: int = 1
    parent: Run | None = None
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
    """What became known of an extent after its last use; None leaves a field as it is.

    `priority` is 0 to 100, `duration_s` counts from the hint; `ended`: the session is over; `superseded`: an
    edited history replaced it; `wanted_by`: number of waiting requests about to use it;
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
        """How many requests are about to use it, as far as this hint says."""
        if self.wanted_by is None and self.expected is None:
            return None
        return (self.wanted_by or 0) + bool(self.expected)

    def over(self, before: Hint | None) -> Hint:
        """This hint, and what one before it said where this one leaves it."""
        if before is None:
            return self
        known = {name: value for name in Hint.__slots__ if (value := getattr(self, name)) is not None}
        return replace(before, **known)


def bonus_of(hint: Hint, age_s: float) -> float:
    """The `bonus_s` of an extent of that age after a hint with a duration: as soft retention from now on."""
    priority = 50 if hint.priority is None else hint.priority
    return max(0.0, age_s + (hint.duration_s or 0.0) * priority / 100)


GiveUp = Callable[[Any, int], "Extent | None"]
"""`give_up(extent, n)`: the owner takes the last `n` blocks out of the extent, whose `num_blocks` shrinks. If
that emptied it, the answer is its parent, where that became an evictable leaf."""


class EvictionPolicy(Protocol):
    """Is called for what happens to extents, and chooses which blocks to evict.

    It holds evictable leaves only: `insert` and `unpin` add one, `pin` and `remove` take one out.
    """

    @property
    def num_evictable(self) -> int:
        """Blocks of all extents that the policy holds."""
        ...

    def insert(self, extent: Extent) -> None:
        """A new evictable leaf, or a parent that became one when its last child was removed. Not called for
        evictions: there `give_up` returns the parent.
        """
        ...

    def pin(self, key: int) -> None:
        """The extent is in use (this is the use). Unknown keys are ignored: inner nodes are pinned too."""
        ...

    def unpin(self, extent: Extent) -> None:
        """No request uses the extent any more; it is evictable again."""
        ...

    def remove(self, key: int) -> None:
        """The extent is gone, or no longer a leaf, for another reason than this policy's choice."""
        ...

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        """Evict `num_blocks` blocks, tails before heads; returns how many were evicted: fewer only where the
        policy holds no more. Raises `BookkeepingError` for a negative number.

        Each choice is a call of `give_up` at once. The policy drops an extent that this empties, and inserts
        the parent that it returns, which may be chosen in the same call.
        """
        ...

    def split(self, old: int, head: Extent, tail: Extent) -> None:
        """The extent `old` became two; the tail keeps its place, the head is inner from now on. Called for
        every extent: one that the policy does not hold is none of its business."""
        ...

    def hint(self, key: int, hint: Hint) -> None: ...

    def check(self) -> None: ...


class UseListener:
    """A base class of policies that need to know every use of a path, also of extents that they do not hold.

    `num_cached` is the number of blocks that the policy's account has in the index then.
    """

    def found(self, extent: Extent, num_held: int) -> None:
        """A request found the path that ends with this extent, and holds it; other requests hold its first
        `num_held` blocks already."""

    def added(self, extent: Extent, num_new: int, num_cached: int) -> None:
        """A request added the last `num_new` blocks of the path that ends with this extent, and holds it."""

    def used(self, extent: Extent) -> None:
        """A request no longer holds the path that ends with this extent; `extent.use` is about it."""

    def cleared(self, num_cached: int) -> None:
        """The cache was cleared: no request took the place of what was evicted last."""


class MigrationPolicy(Protocol):
    """Keep, demote or drop a victim, from what it costs to bring its KV back (tiers are a later module)."""

    def decide(self, extent: Extent, *, tiers: Mapping[str, int]) -> str:
        """`tiers` maps a tier's name to its free blocks; returns a tier's name, or 'drop'."""
        ...


class CostBenefitModel(Protocol):
    """Seconds that it takes to get an extent's KV back, by recomputing it or from a tier."""

    def recompute_s(self, extent: Extent) -> float: ...

    def transfer_s(self, extent: Extent, tier: str) -> float: ...
