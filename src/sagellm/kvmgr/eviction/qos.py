"""Fairness between tenants: the tenants that the cache serves best give up blocks first.

The measure of fairness is that of Jain, Chiu and Hawe, "A Quantitative Measure of Fairness" (1984).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._base import (
    ExtentQueue,
    GhostQueue,
    QueuedPolicy,
    QueueEntry,
    recency,
)

MAX_TENANTS = 1024
"""Beyond so many tenants, those without an extent are forgotten."""
MIN_CHOICES, TENANTS_PER_CHOICE = 4, 4
"""The tenant that gives up blocks is chosen anew after `MIN_CHOICES` evictions and one more for each
`TENANTS_PER_CHOICE` tenants: each choice looks at every tenant."""


def jain_index(values: Iterable[float]) -> float:
    """Jain's index of fairness: 1 if all are equal, 1/n if one has all.

    (sum of x)^2 / (n x sum of x^2); 1 if all values are 0. Raises `ConfigError` without a value, and on
    negative ones.
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
    """One tenant's extents by last use, its ghosts, and how well it was served.

    `hits`: blocks that it found. `lost`: blocks that only an infinite cache would have had. `service`:
    (hits + 1) / (hits + lost + 1) / weight, so that a new tenant starts at its best.
    """

    __slots__ = ("ghosts", "hits", "lost", "queue", "service", "weight")

    def __init__(self, weight: float) -> None:
        self.queue = ExtentQueue()
        self.ghosts = GhostQueue()
        self.hits = self.lost = 0.0
        self.weight = weight
        self.service = 1.0 / weight

    def count(self, hits: float, lost: float, window: float) -> None:
        """Add to both; counts older than about `window` blocks are halved."""
        self.hits += hits
        self.lost += lost
        if self.hits + self.lost > window:
            self.hits /= 2
            self.lost /= 2
        self.service = (self.hits + 1.0) / (self.hits + self.lost + 1.0) / self.weight


class QoSPolicy(QueuedPolicy):
    """Equalises the tenants' normalised hit ratio: hits / hits of an infinite cache.

    The blocks that only an infinite cache would have found are those of inserted extents that have a ghost.
    Only tenants served at least (1 - `tolerance`) times as well as the best served give up blocks, the least
    recently used first. So where all are served alike, this is LRU. Of values within r..1, Jain's index is at
    least 4r / (1 + r)^2: where the policy can hold its default of r = 0.57, at least 0.92. `weights`: a
    tenant of weight 2 is entitled to twice the ratio of one of weight 1, the default. The ghosts of all
    tenants have up to `ghost_factor` x capacity blocks, divided equally, so that a busy tenant cannot push
    out the ghosts of a quiet one.
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
        self._choices_left = 0
        self._most_tenants = MAX_TENANTS

    def insert(self, extent: Extent) -> None:
        self._count_service(extent)
        super().insert(extent)

    def _count_service(self, extent: Extent) -> None:
        """Count what the request of this extent found, and what room would have saved.

        It found the path in front of a new extent, or all of one that it pinned. A new extent with a ghost
        would have been found.
        """
        tenant, key = self._tenant(extent.tenant), extent.key
        window = max(1024, 8 * self._capacity)
        former = self._away.get(key)
        if former is not None:
            if former.num_uses:
                tenant.count(extent.first_position + extent.num_blocks, 0, window)
        elif key not in self._held:
            lost = extent.num_blocks if tenant.ghosts.pop(key) else 0
            tenant.count(extent.first_position, lost, window)

    def _enqueue(self, extent: Extent, former: QueueEntry | None) -> None:
        self._push(extent, self._tenant(extent.tenant).queue, recency(extent))

    def _enqueue_parent(self, parent: Extent, child: QueueEntry) -> None:
        self._enqueue(parent, None)

    def _next_queue(self) -> ExtentQueue | None:
        self._choices_left -= 1
        giver = self._giver
        if self._choices_left <= 0 or giver is None or not giver.live:
            giver = self._giver = self._best_served()
            self._choices_left = MIN_CHOICES + len(self._tenants) // TENANTS_PER_CHOICE
        return giver

    def _best_served(self) -> ExtentQueue | None:
        """Of the tenants that are served well enough, the queue with the oldest extent."""
        served = [(tenant.service, tenant.queue) for tenant in self._tenants.values() if tenant.queue.live]
        if not served:
            return None
        enough = (1 - self._tolerance) * max(service for service, _ in served)
        return min(
            (queue for service, queue in served if service >= enough), key=lambda queue: queue.first().rank
        )

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._most_tenants:
                self._forget_absent()
                self._most_tenants = max(MAX_TENANTS, 2 * len(self._tenants))
            tenant = self._tenants[name] = _Tenant(self._weights.get(name, 1.0))
        return tenant

    def _forget_absent(self) -> None:
        """Forget tenants without an extent. Clients choose the names, without a limit."""
        hinted = {id(place.queue) for place in self._own_place.values()}
        for name, tenant in list(self._tenants.items()):
            if not tenant.queue.live and id(tenant.queue) not in hinted:
                del self._tenants[name]

    def _evicted(self, entry: QueueEntry) -> None:
        ghosts = self._tenant(entry.extent.tenant).ghosts
        ghosts.add(entry.extent.key, entry.size)
        ghosts.trim(self._ghost_factor * self._capacity / max(1, len(self._tenants)))

    def _queues(self) -> Sequence[ExtentQueue]:
        return [self._ended, self._wanted, *(tenant.queue for tenant in self._tenants.values())]

    def check(self) -> None:
        super().check()
        for tenant in self._tenants.values():
            tenant.ghosts.check(self._ghost_factor * self._capacity)


PLUGIN = QoSPolicy
