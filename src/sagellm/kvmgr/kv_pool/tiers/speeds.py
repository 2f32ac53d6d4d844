"""`TransferSpeeds`: how long a load from each tier takes, from what recent moves reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sagellm.core.blocks import Tier

FIRST_BYTES_PER_S = 1e9
"""Assumed bandwidth of a tier from which nothing has been read yet, unless writing to it was faster."""
LATENCY_S = 1e-3
"""Assumed time of a load before its first byte."""
FEWEST_MEASURED_BYTES = 1 << 20
"""Moves of fewer bytes say nothing about bandwidth."""
REGAINED = 1.05
"""Each load that is refused raises the assumed bandwidth of its tier by this factor, if it is below
`FIRST_BYTES_PER_S`, so that a tier that was slow once is tried again."""
SLOWED = 0.8
"""A load that is given up lowers the bandwidth of its tier by this factor."""


class TransferSpeeds:
    """Assumed bandwidths of tiers. The first is a guess; then that of writes, until there has been a load."""

    def __init__(self, tiers: Iterable[Tier], bytes_per_block: int) -> None:
        self.bytes_per_block = bytes_per_block
        self._bytes_per_s = dict.fromkeys(tiers, FIRST_BYTES_PER_S)
        self._measured: set[Tier] = set()

    def load_s(self, tier: Tier, num_blocks: int, latency_s: float = LATENCY_S) -> float:
        """Seconds to load so many blocks."""
        return latency_s + num_blocks * self.bytes_per_block / self._bytes_per_s[tier]

    def is_measured(self, tier: Tier) -> bool:
        """Whether something was loaded from the tier."""
        return tier in self._measured

    def bandwidths(self) -> Mapping[Tier, float]:
        """Bytes per second that loads from each tier are taken to reach."""
        return dict(self._bytes_per_s)

    def set_all(self, bytes_per_s: float) -> None:
        """Take all tiers to be this fast."""
        self._bytes_per_s = dict.fromkeys(self._bytes_per_s, bytes_per_s)

    def wrote(self, tier: Tier, num_blocks: int, spent_s: float) -> None:
        if tier not in self._measured:
            self._bytes_per_s[tier] = max(self._bytes_per_s[tier], self._reached(num_blocks, spent_s))

    def loaded(self, tier: Tier, num_blocks: int, spent_s: float) -> None:
        if reached := self._reached(num_blocks, spent_s):
            self._bytes_per_s[tier] = 0.8 * self._bytes_per_s[tier] + 0.2 * reached
            self._measured.add(tier)

    def refused(self, tier: Tier) -> None:
        """A load was not worth it."""
        before = self._bytes_per_s[tier]
        self._bytes_per_s[tier] = max(before, min(REGAINED * before, FIRST_BYTES_PER_S))

    def gave_up(self, tier: Tier) -> None:
        """A load took longer than computing."""
        self._bytes_per_s[tier] *= SLOWED

    def _reached(self, num_blocks: int, spent_s: float) -> float:
        """The bandwidth that a move reached; 0 if it was too small to say.

        At most twice what its whole time gives, since `LATENCY_S` is only assumed.
        """
        num_bytes = num_blocks * self.bytes_per_block
        if num_bytes < FEWEST_MEASURED_BYTES:
            return 0.0
        return num_bytes / max(spent_s - LATENCY_S, spent_s / 2, 1e-9)
