"""Blocks of running requests that a sliding window has left behind: given up before anything cached is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sagellm.core.protocols.kv_pool import BlockQuota, KVPool
from sagellm.core.types import Account
from sagellm.kvmgr.manager.donors import Donors
from sagellm.kvmgr.manager.prefix_registrar import PrefixRegistrar
from sagellm.kvmgr.manager.sequence import SequenceKV

BEHIND_WINDOW = "behind the window"


class Windows:
    """`width`: no token attends further back than so many; None: each attends to all before it."""

    def __init__(
        self,
        width: int | None,
        sequences: Mapping[str, SequenceKV],
        donors: Donors,
        registrar: PrefixRegistrar,
        pool: KVPool,
        quota: BlockQuota | None,
    ) -> None:
        self.width = width
        self._sequences = sequences
        self._donors = donors
        self._registrar = registrar
        self._pool = pool
        self._quota = quota

    def behind(self, sequence: SequenceKV) -> int:
        """Own blocks of the request that can be given up; none of a donor, since somebody may be about to
        copy a block of it."""
        if self.width is None or sequence in self._donors:
            return 0
        return sequence.behind_window(self.width, self._pool.block_size)

    def num_behind(self) -> int:
        """Such blocks of all requests."""
        return sum(map(self.behind, self._sequences.values())) if self.width is not None else 0

    def behind_by_account(self) -> Iterator[tuple[Account, int]]:
        """Such blocks of each request, with the account that pays for them."""
        for one in self._sequences.values() if self.width is not None else ():
            yield one.own.account, self.behind(one)

    def drop(self, num_blocks: int, account: Account) -> None:
        """Free such blocks until the account has room for so many; who gives any keeps none for the index."""
        for sequence in self._sequences.values() if self.width is not None else ():
            if self._has_room(num_blocks, account):
                return
            dead = self.behind(sequence)
            if dead:
                self._registrar.free_first(sequence.own, dead, BEHIND_WINDOW)
                sequence.num_shared += dead
                sequence.is_windowed = True

    def _has_room(self, num_blocks: int, account: Account) -> bool:
        if self._quota is not None and self._quota.headroom(account) < num_blocks:
            return False
        return self._pool.num_free >= num_blocks
