"""Contract of checkpoint retention: which recurrent states are kept, and which goes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from sagellm.core.protocols.eviction import Hint
from sagellm.core.types import Namespace, Tokens

BlockKeys = Callable[[Tokens, int, Namespace], list[int]]
"""Content keys of the prefixes that end with each of the first so many blocks."""


class Marginal(NamedTuple):
    """What dropping a checkpoint changes, beside all others that are kept.

    `saved_tokens`: tokens that a request which would continue from it computes again; `freed_bytes`: its
    states, and the blocks of attention that no other checkpoint needs, in any unit that is the same for all;
    `above`: the next one in front.
    """

    saved_tokens: int
    freed_bytes: int
    above: int | None


class CheckpointIndex(Protocol):
    """What the prefix index tells of resident checkpoints."""

    def marginal(self, key: int) -> Marginal: ...


class CheckpointPolicy(Protocol):
    """Chooses checkpoints by the content key of their prefix."""

    def __len__(self) -> int:
        """Resident checkpoints that may be chosen."""

    def places(
        self, keys: Sequence[int], num_known: int, num_reused: int, num_output_tokens: int, now_s: float
    ) -> list[int]:
        """Depths in blocks, ascending, at which a request should keep its state."""

    def made(self, key: int, depth: int, now_s: float) -> None:
        """A checkpoint behind `depth` blocks is resident."""

    def victim(self, now_s: float) -> int:
        """The key of the one that goes first. Raises `BookkeepingError` if there is none."""

    def removed(self, key: int, above: int | None, now_s: float) -> None:
        """A checkpoint was dropped, or cannot be chosen for now."""

    def hint(self, key: int, hint: Hint, now_s: float) -> None:
        """Note what became known of a place since its last use."""

    def check(self) -> None:
        """Raise `BookkeepingError` where its books disagree."""


CheckpointPolicyFactory = Callable[[CheckpointIndex], CheckpointPolicy]
