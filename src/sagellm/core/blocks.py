"""Blocks of KV: ids, memory tiers, and the arithmetic of blocks and tokens."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sagellm.core.types import Tokens


class Tier(StrEnum):
    """A memory that holds KV blocks. A backend computes on the blocks in `HBM`."""

    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"
    REMOTE = "remote"


NO_PAGE = -1
"""In a block table: no block, because no token attends to that part of this KV group any more."""


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient, rounded up: how many blocks of `divisor` tokens hold `dividend` tokens."""
    return -(-dividend // divisor)


def num_common(tokens: Tokens, others: Tokens) -> int:
    """Leading tokens that both have."""
    pairs = enumerate(zip(tokens, others, strict=False))
    shorter = min(len(tokens), len(others))
    return next((position for position, (left, right) in pairs if left != right), shorter)
