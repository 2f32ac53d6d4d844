"""Events as instances send them, and a slow twin of the prefix index: sets of prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from sagellm.core.blocks import Tier
from sagellm.core.events import BlocksRemoved, BlocksStored
from sagellm.core.protocols.router import CachedPrefix
from sagellm.core.types import Namespace

Prefix = tuple[Namespace, tuple[int, ...]]


def block_hash(namespace: Namespace, tokens: Sequence[int], block_size: int) -> bytes:
    """One for each prefix and block size."""
    return blake2b(repr((namespace, tuple(tokens), block_size)).encode(), digest_size=16).digest()


def stored(
    tokens: Sequence[int],
    block_size: int,
    first_block: int = 0,
    namespace: Namespace = Namespace(),
    tier: Tier = Tier.HBM,
) -> BlocksStored:
    """The blocks of a prompt from `first_block` on."""
    ends = range((first_block + 1) * block_size, len(tokens) + 1, block_size)
    start = first_block * block_size
    return BlocksStored(
        (),
        start,
        tuple(block_hash(namespace, tokens[:end], block_size) for end in ends),
        block_hash(namespace, tokens[:start], block_size) if first_block else None,
        array("i", tokens[start : start + len(ends) * block_size]).tobytes(),
        namespace,
        tier,
    )


def removed(hashes: Iterable[bytes], tier: Tier = Tier.HBM) -> BlocksRemoved:
    return BlocksRemoved((), "capacity", tuple(hashes), Namespace(), tier)


@dataclass
class Twin:
    """One instance: the prefixes of each tier by hash, and which of them are suspect."""

    held: dict[Tier, dict[bytes, Prefix]] = field(default_factory=dict)
    suspects: set[tuple[Tier, bytes]] = field(default_factory=set)

    def store(self, event: BlocksStored, tokens: Sequence[int], block_size: int) -> None:
        """The event's blocks are the last of `tokens`."""
        known = {name for tier in self.held.values() for name in tier}
        if event.parent_hash is not None and event.parent_hash not in known:
            return
        tier = self.held.setdefault(event.tier, {})
        for number, name in enumerate(event.hashes, 1):
            end = len(tokens) - (len(event.hashes) - number) * block_size
            tier[name] = (event.namespace, tuple(tokens[:end]))
            self.suspects.discard((event.tier, name))

    def remove(self, hashes: Iterable[bytes], tier: Tier) -> None:
        for name in hashes:
            self.held.get(tier, {}).pop(name, None)
            self.suspects.discard((tier, name))

    def clear(self, tiers: Iterable[Tier]) -> None:
        for tier in tiers:
            for name in list(self.held.get(tier, {})):
                self.remove([name], tier)

    def gap(self) -> None:
        self.suspects = {(tier, name) for tier, held in self.held.items() for name in held}

    def expire(self) -> None:
        for tier, name in list(self.suspects):
            self.remove([name], tier)

    def lookup(self, tokens: Sequence[int], namespace: Namespace, block_size: int) -> CachedPrefix:
        device = set(self.held.get(Tier.HBM, {}))
        anywhere = {name for tier in self.held.values() for name in tier}
        return CachedPrefix(*(_leading(names, tokens, namespace, block_size) for names in (device, anywhere)))


def _leading(names: set[bytes], tokens: Sequence[int], namespace: Namespace, block_size: int) -> int:
    end = 0
    while end + block_size <= len(tokens):
        if block_hash(namespace, tokens[: end + block_size], block_size) not in names:
            break
        end += block_size
    return end
