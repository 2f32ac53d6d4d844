"""`Replicator`: has hot prefixes copied to cold instances, by what the router knows.

    count(each request that is placed)
    decide(reports of instances) -> copies to make now, at most every `DECIDE_S` seconds

A front and the simulator carry the copies out in their own way; the prefix index says when they have arrived.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sagellm.control_plane.rebalancing import HotPrefix, RebalancingOptions, Replication, replications
from sagellm.control_plane.router._tree import Edge
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.control_plane.router.prefix_uses import (
    PrefixUses,
    device_holders,
    num_prefix_tokens,
    prefix_tokens,
)
from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.router import ExecutionInstance
from sagellm.core.types import Namespace, Tokens

DECIDE_S = 1.0
COPY_TIMEOUT_S = 10.0
"""A copy that has not arrived after so long counts as failed."""
REPEAT_S = 60.0
"""The same copy is not made again for so long: the target has evicted it, or did not take it."""


class PrefixCopy(NamedTuple):
    """`source` shall send the cached KV of `tokens` to `target`."""

    copy_id: str
    tokens: Tokens
    namespace: Namespace
    source: str
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Begun:
    """A copy on its way. `until_s`: when it counts as failed."""

    edge: Edge
    source: str
    until_s: float


class Replicator:
    """Copies `max_copies` prefixes at once, one to each target.

    All copies take `link_share` of one link in the long run.

    `options`: `bytes_per_token` is that of the fleet's model; 0: not known, and nothing is copied.
    """

    def __init__(self, index: PrefixIndex, options: RebalancingOptions, clock: Clock) -> None:
        self.options = options
        self.num_copies = self.num_arrived = 0
        self._index, self._clock = index, clock
        self._uses = PrefixUses(index, clock)
        self._ids = itertools.count(1)
        self._begun: dict[str, _Begun] = {}
        """By target."""
        self._former: dict[tuple[int, str], float] = {}
        """By edge and target: until when that copy is not made again. The earliest first."""
        self._link_s = 0.0
        """Seconds of a link that copies may take now; below 0 they wait."""
        self._decided_s = clock.now()

    def count(self, tokens: Tokens, namespace: Namespace, indexed: Namespace) -> None:
        """A request was placed; see `PrefixUses.count`."""
        self._uses.count(tokens, namespace, indexed)

    def is_due(self) -> bool:
        """Whether `decide` would look at anything."""
        return self._clock.now() >= self._decided_s + DECIDE_S

    def decide(self, instances: Sequence[ExecutionInstance]) -> list[PrefixCopy]:
        """Copies to make now. `instances`: those that can exchange KV.

        An instance is compared with those of its type alone, as others do other work.
        """
        now_s, options = self._clock.now(), self.options
        self._link_s = min(options.link_share, self._link_s + (now_s - self._decided_s) * options.link_share)
        self._decided_s = now_s
        self._end_copies(now_s)
        room = options.max_copies - len(self._begun)
        if not options.bytes_per_token or self._link_s < 0 or room <= 0 or len(instances) < 2:
            return []
        hot = self._hot()
        kinds = dict.fromkeys(instance.kind for instance in instances)
        found = [
            copy
            for kind in kinds
            for copy in replications(
                list(hot.values()),
                [each for each in instances if each.kind is kind],
                replace(options, max_copies=room),
                self._begun,
            )
        ]
        found.sort(key=lambda copy: -copy.gain)
        return self._begin(found, hot, now_s)

    def lost(self, instance_id: str) -> None:
        """An instance is gone, and with it the copies to it and from it."""
        for target, begun in list(self._begun.items()):
            if instance_id in (target, begun.source):
                del self._begun[target]
        self._former = {key: until_s for key, until_s in self._former.items() if key[1] != instance_id}

    def _hot(self) -> dict[bytes, HotPrefix]:
        """Prefixes that are used often, by the number of their edge."""
        found, coming = {}, dict[int, set[str]]()
        for number, target in self._former:
            coming.setdefault(number, set()).add(target)
        for edge, per_s in self._uses.most_used(self.options.least_uses_per_s):
            key, holders = edge.number.to_bytes(8, "big"), self._index.names_of(device_holders(edge))
            former = frozenset(coming.get(edge.number, ()))
            found[key] = HotPrefix(key, num_prefix_tokens(edge), per_s, holders, former)
        return found

    def _begin(
        self, found: Sequence[Replication], hot: dict[bytes, HotPrefix], now_s: float
    ) -> list[PrefixCopy]:
        made: list[PrefixCopy] = []
        for copy in found:
            number = int.from_bytes(copy.key, "big")
            edge = self._index.edge(number)
            if edge is None:
                continue
            if len(self._begun) >= self.options.max_copies or self._link_s < 0:
                break
            self._link_s -= hot[copy.key].num_tokens * self.options.bytes_per_token / self.options.bytes_per_s
            self._begun[copy.target] = _Begun(edge, copy.source, now_s + COPY_TIMEOUT_S)
            self._former[number, copy.target] = now_s + REPEAT_S
            self.num_copies += 1
            name = f"copy-{next(self._ids)}"
            namespace = self._uses.namespace(edge)
            made.append(
                PrefixCopy(name, prefix_tokens(edge), namespace, copy.source, copy.target, copy.reason)
            )
        return made

    def _end_copies(self, now_s: float) -> None:
        for target, begun in list(self._begun.items()):
            has_come = target in self._index.names_of(device_holders(begun.edge))
            self.num_arrived += has_come
            if has_come or now_s >= begun.until_s:
                del self._begun[target]
        for key, until_s in list(self._former.items()):
            if until_s > now_s:
                break
            del self._former[key]

    def check(self) -> None:
        """Raise `BookkeepingError` where more is copied than allowed."""
        if len(self._begun) > self.options.max_copies or self.num_arrived > self.num_copies:
            raise BookkeepingError(f"{len(self._begun)} copies are made, {self.num_arrived} have arrived")
