"""GreedyDual-Size with frequency (GDSF): keep what is costly to get back and often used.

Source: Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (1998).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sagellm.core.protocols.eviction import CostBenefitModel, Extent
from sagellm.kvmgr.eviction.cost_model import PrefillCostModel
from sagellm.kvmgr.eviction.lfu import LFUPolicy

CopiesOf = Callable[[Extent], Iterable[str]]


class CostBenefitPolicy(LFUPolicy):
    """LFU-DA where a use is worth seconds per block.

    The seconds are those of the cheapest way: prefill at its position, or a transfer from one of the tiers
    that `copies` names as holding it.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        model: CostBenefitModel | None = None,
        copies: CopiesOf | None = None,
    ) -> None:
        super().__init__(capacity=capacity)
        self._model: CostBenefitModel = PrefillCostModel() if model is None else model
        self._copies = copies

    def _worth(self, extent: Extent, num_uses: int) -> float:
        seconds = self._model.recompute_s(extent)
        if self._copies is not None:
            for tier in self._copies(extent):
                seconds = min(seconds, self._model.transfer_s(extent, tier))
        return num_uses * seconds / extent.num_blocks


def chance_of_reuse(extent: Extent) -> float:
    """Expected later uses, by the rule of succession. After u uses: u / (u + 1).

    Each of the first u - 1 uses had a next one, and the last one may have one.
    """
    return extent.num_uses / (extent.num_uses + 1)


PLUGIN = CostBenefitPolicy
