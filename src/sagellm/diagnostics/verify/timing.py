"""Times of one prompt that is cold, warm, and cached under another salt.

A prompt that another tenant has cached must not be answered faster: the time tells that it was asked.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from sagellm.diagnostics.verify import statistics
from sagellm.diagnostics.verify.prober import Lane, Prober
from sagellm.diagnostics.verify.report import HitTiming

ROUNDS = 12
TIMING_LEVEL = 1e-4
"""The probability of a false finding by times, at most."""


async def measure_timing(prober: Prober, has_time: Callable[[], bool]) -> HitTiming:
    """One-token requests of new longest prompts: new, again, and under another salt.

    At least once, at most twelve times while there is time. Leaves a finding where the other salt is as fast
    as a hit.
    """
    length = prober.facts.max_units
    colds: list[float] = []
    warms: list[float] = []
    others: list[float] = []
    while not colds or (len(colds) < ROUNDS and has_time()):
        prompt = prober.prompt(length)
        lane = await prober.lane()
        colds.append((await prober.warm_up(lane, prompt)).seconds)
        warms.append((await prober.warm_up(lane, prompt)).seconds)
        if prober.facts.salts:
            others.append((await prober.warm_up(Lane(prober.salt()), prompt)).seconds)
    times = HitTiming(
        length + prober.facts.overhead,
        median(colds),
        median(warms),
        median(others) if others else None,
    )
    p = statistics.rank_sum_test(others, colds)
    middle = (times.cold_s + times.warm_s) / 2
    if times.other_salt_s is not None and times.other_salt_s < middle and p <= TIMING_LEVEL:
        shown = ", ".join(f"{1000 * s:.3g}" for s in (times.cold_s, times.warm_s, times.other_salt_s))
        text = f"a prompt that another cache_salt has cached is fast: {shown} ms new, again, under another"
        prober.note("isolation", "timing", text, p)
    return times
