"""GreedyDual-Size with frequency (GDSF): keep what is costly to get back and often used.

Source: Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (1998).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

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


class CostBenefitMigration:
    """Implements `MigrationPolicy`: demote a victim where that saves seconds, else drop it.

    The benefit of a tier is expected reuse x (seconds to recompute - seconds to bring back), less
    `write_weight` x the seconds of the copy to the tier: 1 if the copy delays other work, 0 if it runs beside
    it. The best tier with room for the whole extent wins, of equals the first named; without a benefit the
    answer is 'drop'. A tier of infinite bandwidth is where the extent is now: choosing it means to keep.
    """

    def __init__(
        self,
        model: CostBenefitModel,
        *,
        expected_reuse: Callable[[Extent], float] = chance_of_reuse,
        write_weight: float = 0.0,
    ) -> None:
        self._model = model
        self._expected_reuse = expected_reuse
        self._write_weight = write_weight

    def decide(self, extent: Extent, *, tiers: Mapping[str, int]) -> str:
        choice, most = "drop", 0.0
        reuse, recompute_s = self._expected_reuse(extent), self._model.recompute_s(extent)
        for tier, num_free in tiers.items():
            if num_free < extent.num_blocks:
                continue
            transfer_s = self._model.transfer_s(extent, tier)
            benefit_s = reuse * (recompute_s - transfer_s) - self._write_weight * transfer_s
            if benefit_s > most:
                choice, most = tier, benefit_s
        return choice


PLUGIN = CostBenefitPolicy
