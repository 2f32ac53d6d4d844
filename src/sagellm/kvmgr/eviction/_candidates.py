"""The form that the design documents use, given once for every policy: a list of candidates in, victims
out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sagellm.core.protocols.eviction import EvictionPolicy, Run


@dataclass(slots=True)
class EvictionCandidate:
    """A sequence that may be evicted whole. Times in seconds; `estimated_lifetime` is a predictor's, if
    any."""

    sequence_id: str
    block_ids: list[int]
    last_access_time: float
    access_count: int = 1
    priority: int = 0
    is_pinned: bool = False
    estimated_lifetime: float | None = None


def select_victims(
    fresh_policy: Callable[[], EvictionPolicy], candidates: Sequence[EvictionCandidate], required_blocks: int
) -> list[str]:
    """Sequence ids whose blocks together are at least `required_blocks`, in the order that a policy of this
    kind gives them up; empty if all unpinned candidates together do not suffice.

    Replays the candidates into a fresh policy in order of access time, so it says what the policy would do
    and changes nothing.
    """
    policy = fresh_policy()
    ordered = sorted((c for c in candidates if not c.is_pinned), key=lambda c: c.last_access_time)
    if sum(len(c.block_ids) for c in ordered) < required_blocks:
        return []
    for index, candidate in enumerate(ordered):
        policy.insert(_run(index, candidate))
    victims: dict[str, None] = {}

    def give_up(run: Run, num_blocks: int) -> None:
        run.num_blocks -= num_blocks
        victims[ordered[run.key].sequence_id] = None

    policy.evict(required_blocks, give_up)
    return list(victims)


def _run(index: int, candidate: EvictionCandidate) -> Run:
    meta = {"access_count": candidate.access_count, "estimated_lifetime": candidate.estimated_lifetime}
    return Run(
        index,
        len(candidate.block_ids),
        last_use=index,
        num_uses=candidate.access_count,
        used_s=candidate.last_access_time,
        priority=candidate.priority,
        meta=meta,
    )
