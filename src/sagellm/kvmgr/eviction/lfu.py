"""Least frequently used, with dynamic ageing (LFU-DA): what was popular once does not stay for ever."""

from __future__ import annotations

from typing import Self

from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._ageing import AgeingPolicy


class LFUEvictionPolicy(AgeingPolicy):
    """A use is worth 1. Without `ageing`: plain LFU with ties by LRU, counting while an extent is here."""

    def __init__(self, *, capacity: int | None = None, ageing: bool = True) -> None:
        super().__init__(capacity, ageing=ageing)

    def _worth(self, extent: Extent, uses: int) -> float:
        return uses

    def fresh(self) -> Self:
        return type(self)(capacity=self._given_capacity, ageing=self._ageing)


PLUGIN = LFUEvictionPolicy
