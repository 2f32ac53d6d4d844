"""Contract of eviction policies: which KV to give up first. Events on extents, no candidate list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of blocks that lives and dies as a unit from its tail: one edge of the prefix tree, or one block.

    `key` is a deterministic content hash, so that an extent that comes back meets its ghost. `last_use` is
    the index's logical time of the last unpin.
    """

    key: int
    parent: int | None
    num_blocks: int
    first_position: int = 0
    last_use: int = 0
    tenant: str = ""
    priority: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Victim:
    """Give up the last `num_blocks` blocks of the extent `key`."""

    key: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Hint:
    """What somebody knows after the fact; None leaves a field as it is.

    `duration_s` counts from the hint; `ended`: the session is over; `superseded`: an edited history replaced
    it; `wanted_by`: number of waiting requests about to use it.
    """

    priority: int | None = None
    duration_s: float | None = None
    ended: bool = False
    superseded: bool = False
    wanted_by: int = 0


OnEmptied = Callable[[int], "Extent | None"]


class EvictionPolicy(Protocol):
    """Hears what happens to extents and, when asked, chooses.

    Only evictable leaves are in its hands: `insert` and `unpin` bring one in, `pin` and `remove` take it out.
    """

    @property
    def num_evictable(self) -> int:
        """Blocks of all extents in the policy's hands."""
        ...

    def insert(self, extent: Extent) -> None:
        """A new evictable leaf; also said of a parent whose last child went."""
        ...

    def pin(self, key: int) -> None:
        """The extent is in use (this is the use). Unknown keys are ignored: inner nodes are pinned too."""
        ...

    def unpin(self, extent: Extent) -> None:
        """The last user went; the extent is evictable again."""
        ...

    def remove(self, key: int) -> None:
        """The extent is gone, or is no longer a leaf, for another reason than this policy's choice."""
        ...

    def evict(self, num_blocks: int, on_emptied: OnEmptied | None = None) -> list[Victim] | None:
        """Choose exactly `num_blocks` blocks, tails before heads, or None and no change.

        When an extent is emptied, `on_emptied(key)` is asked for its parent, which, if it became a leaf, may
        be chosen in the same call. The caller guarantees that leaves and parents together hold `num_blocks`.
        """
        ...

    def split(self, old: int, head: Extent, tail: Extent) -> None:
        """The extent `old` became two; the tail keeps its place, the head is inner from now on."""
        ...

    def hint(self, key: int, hint: Hint) -> None: ...

    def check(self) -> None: ...


class MigrationPolicy(Protocol):
    """Keep, demote or drop a victim, from what it costs to bring its KV back (tiers are a later module)."""

    def decide(self, extent: Extent, *, tiers: Mapping[str, int]) -> str:
        """`tiers` maps a tier's name to its free blocks; returns a tier's name, or 'drop'."""
        ...


class CostBenefitModel(Protocol):
    """Seconds that it takes to get an extent's KV back, by recomputing it or from a tier."""

    def recompute_s(self, extent: Extent) -> float: ...

    def transfer_s(self, extent: Extent, tier: str) -> float: ...
