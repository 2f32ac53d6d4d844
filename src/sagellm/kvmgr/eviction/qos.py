"""Fairness between tenants: who is served worst by the cache is spared, who is served best gives way.

The measure of fairness is that of Jain, Chiu and Hawe, "A Quantitative Measure of Fairness" (1984).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._ghosts import GhostQueue
from sagellm.kvmgr.eviction._queue import Entry, ExtentQueue, recency
from sagellm.kvmgr.eviction._queued import Note, QueuedPolicy

MAX_TENANTS = 1024
MIN_TURNS = 4
TENANTS_PER_TURN = 4


def jain_index(values: Iterable[float]) -> float:
    """(sum of x)^2 / (n x sum of x^2): 1 where all are equal, 1/n where one has all. All zero counts as 1.

    Raises `ConfigError` on no value, and on negative ones.
    """
    shares = list(values)
    if not shares or min(shares) < 0:
        raise ConfigError(f"Jain's index needs at least one value and none below 0, not {shares}")
    most = max(shares)
    if most == 0:
        return 1.0
    scaled = [share / most for share in shares]  # squares of tiny numbers would vanish
    return sum(scaled) ** 2 / (len(scaled) * sum(share * share for share in scaled))


class _Tenant:
    """One tenant's extents by last use, its ghosts, and how it was served: blocks that it found, and blocks
    that only an infinite cache would have had. `service` is hits / (hits + lost) per weight, with one hit
    more, so that it starts at its best."""

    __slots__ = ("ghosts", "hits", "lost", "queue", "service", "weight")

    def __init__(self, weight: float) -> None:
        self.queue = ExtentQueue()
        self.ghosts = GhostQueue()
        self.hits = self.lost = 0.0
        self.weight = weight
        self.service = 1.0 / weight

    def count(self, hits: float, lost: float, window: float) -> None:
        """Add to both; what is older than about `window` blocks counts half."""
        self.hits += hits
        self.lost += lost
        if self.hits + self.lost > window:
            self.hits /= 2
            self.lost /= 2
        self.service = (self.hits + 1.0) / (self.hits + self.lost + 1.0) / self.weight


class QoSEvictionPolicy(QueuedPolicy):
    """Equalises the normalised hit ratio of tenants: blocks found / blocks that an infinite cache would have
    found. The difference are re-inserted extents that meet their ghost: it was room that they lacked.

    Only tenants served at least (1 - `tolerance`) times as well as the best served give blocks, the least
    recently used first; so where all are served alike this is LRU. Of values within r..1, Jain's index is at
    least 4r / (1 + r)^2: where the policy can hold its default of r = 0.57, at least 0.92. `weights`: a
    tenant of weight 2 is entitled to twice the ratio of one of weight 1, the default. Ghosts of all tenants
    together hold up to `ghost_factor` x capacity blocks, equally divided, so that a busy tenant cannot push
    out the past of a quiet one.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        weights: Mapping[str, float] | None = None,
        tolerance: float = 0.43,
        ghost_factor: float = 4.0,
    ) -> None:
        super().__init__(capacity)
        if not 0 <= tolerance < 1 or ghost_factor <= 0:
            raise ConfigError(f"tolerance {tolerance} must be in 0..1, ghost_factor {ghost_factor} positive")
        if any(not weight > 0 for weight in (weights or {}).values()):
            raise ConfigError(f"weights of tenants must be positive, not {weights}")
        self._weights = dict(weights or {})
        self._tolerance, self._ghost_factor = tolerance, ghost_factor
        self._tenants: dict[str, _Tenant] = {}
        self._giver: ExtentQueue | None = None
        self._turns = 0
        self._most_tenants = MAX_TENANTS

    def insert(self, extent: Extent) -> None:
        self._observe(extent)
        super().insert(extent)

    def _observe(self, extent: Extent) -> None:
        """Count what the request that brings the extent found: the path in front of what is new, or all of
        it. What is new and was here before would have been found in a larger cache."""
        tenant, key = self._tenant(extent.tenant), extent.key
        window = max(1024, 8 * self._capacity)
        note = self._away.get(key)
        if note is not None:
            if note[2]:
                tenant.count(extent.first_position + extent.num_blocks, 0, window)
        elif key not in self._held:
            lost = extent.num_blocks if tenant.ghosts.pop(key) else 0
            tenant.count(extent.first_position, lost, window)

    def _admit(self, extent: Extent, note: Note | None) -> None:
        self._put(extent, self._tenant(extent.tenant).queue, recency(extent))

    def _choose(self) -> ExtentQueue | None:
        self._turns -= 1  # who gives is looked up every few choices: that takes a look at every tenant
        giver = self._giver
        if self._turns <= 0 or giver is None or not giver.live:
            giver = self._giver = self._best_served()
            self._turns = MIN_TURNS + len(self._tenants) // TENANTS_PER_TURN
        return giver

    def _best_served(self) -> ExtentQueue | None:
        """Of the tenants that are served well enough, the one with the oldest extent."""
        here = [(tenant.service, tenant.queue) for tenant in self._tenants.values() if tenant.queue.live]
        if not here:
            return None
        enough = (1 - self._tolerance) * max(service for service, _ in here)
        return min((queue for service, queue in here if service >= enough), key=_oldest)

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._most_tenants:
                self._forget_absent()
                self._most_tenants = max(MAX_TENANTS, 2 * len(self._tenants))
            tenant = self._tenants[name] = _Tenant(self._weights.get(name, 1.0))
        return tenant

    def _forget_absent(self) -> None:
        """Tenants without an extent here: names come from outside, and never end."""
        on_leave = {id(queue) for queue, _ in self._lanes.home.values()}
        for name, tenant in list(self._tenants.items()):
            if not tenant.queue.live and id(tenant.queue) not in on_leave:
                del self._tenants[name]

    def _evicted(self, entry: Entry, queue: ExtentQueue) -> None:
        ghosts = self._tenant(entry[2].tenant).ghosts
        ghosts.add(entry[2].key, entry[3])
        ghosts.trim(self._most_ghosts)

    def _follow(self, parent: Extent, entry: Entry, queue: ExtentQueue) -> None:
        self._admit(parent, None)

    @property
    def _most_ghosts(self) -> float:
        return self._ghost_factor * self._capacity / max(1, len(self._tenants))

    def check(self) -> None:
        super().check()
        for tenant in self._tenants.values():
            tenant.ghosts.check(self._ghost_factor * self._capacity)

    def fresh(self) -> Self:
        return type(self)(
            capacity=self._given_capacity,
            weights=self._weights,
            tolerance=self._tolerance,
            ghost_factor=self._ghost_factor,
        )

    def _queues(self) -> Sequence[ExtentQueue]:
        return [tenant.queue for tenant in self._tenants.values()]


def _oldest(queue: ExtentQueue) -> tuple[float, int, int]:
    rank: tuple[float, int, int] = queue.first()[0]
    return rank


PLUGIN = QoSEvictionPolicy
