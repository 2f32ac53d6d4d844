"""What to change, best first, with the gain that the ladder shows."""

from __future__ import annotations

from collections.abc import Iterator

from sagellm.diagnostics.watch.ladder import Ladder
from sagellm.diagnostics.watch.report import UNLIMITED, Advice, MissedTokens

LEAST_POINTS = 1.0
"""A smaller gain is no advice."""
MEMORY_FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0)
ENOUGH = 0.8
"""Of the gain of the next larger memory: the smaller one is advised."""
GIB = 2**30


def advice(ladder: Ladder, missed: MissedTokens, kv_bytes: int | None) -> list[Advice]:
    """Advice worth `LEAST_POINTS` or more, best first; else why there is none.

    `kv_bytes`: the KV memory of all instances, if it is known.
    """
    found = [each for each in _candidates(ladder, missed, kv_bytes) if each.gain_points >= LEAST_POINTS]
    found.sort(key=lambda each: -each.gain_points)
    return found or list(_none(ladder, missed))


def _candidates(ladder: Ladder, missed: MissedTokens, kv_bytes: int | None) -> Iterator[Advice]:
    yield from _memory(ladder, kv_bytes)
    adaptive, lru = ladder.replayed("adaptive", 1.0), ladder.replayed("lru", 1.0)
    if adaptive is not None and lru is not None:
        # Against the server too: it may have such a policy already.
        points = 100 * (adaptive - max(lru, ladder.now or 0.0))
        yield Advice(f"The eviction policy `adaptive`: +{points:.1f} points at no memory.", points)
    now, routed, queried = ladder.now, ladder.routed(), ladder.num_queried_tokens
    if now is not None and routed is not None and ladder.is_fleet:
        points = 100 * (routed - now)
        yield Advice(f"Routing by prefix: up to +{points:.1f} points; another instance had it.", points)
    if queried:
        points = 100 * missed.not_aligned / queried
        yield Advice(f"Smaller KV blocks: up to +{points:.1f} points; prompts diverge in a block.", points)
        points = 100 * missed.other_namespace / queried
        text = f"Shared salts or adapters: up to +{points:.1f} points; equal prompts are kept apart."
        yield Advice(text, points)


def _memory(ladder: Ladder, kv_bytes: int | None) -> Iterator[Advice]:
    """The smallest memory that brings most of what the next larger one would."""
    now = ladder.now
    if now is None:
        return
    gains = [
        (factor, 100 * (ratio - now))
        for factor, ratio in ((factor, ladder.lru_from_events(factor)) for factor in MEMORY_FACTORS)
        if ratio is not None
    ]
    for (factor, points), (_, next_points) in zip(gains, [*gains[1:], (UNLIMITED, 0.0)], strict=True):
        if points >= LEAST_POINTS and points >= ENOUGH * next_points:
            more = f"+{(factor - 1) * 100:.0f} % KV memory"
            if kv_bytes:
                more = f"+{(factor - 1) * kv_bytes / GIB:.3g} GiB of KV memory ({factor:g} times)"
            yield Advice(f"{more}: +{points:.1f} points.", points)
            return


def _none(ladder: Ladder, missed: MissedTokens) -> Iterator[Advice]:
    total = sum((missed.never_seen, missed.evicted, missed.not_aligned, missed.other_namespace))
    if ladder.now is None or not total:
        return
    percent = 100 * missed.never_seen / total
    yield Advice(
        f"Nothing that was measured would add a point: {percent:.0f} % of the computed tokens whose cause is "
        "known were never seen before.",
        0.0,
    )
