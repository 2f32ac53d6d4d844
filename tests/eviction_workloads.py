"""Requests that tell retention policies apart."""

from __future__ import annotations

import random
from collections.abc import Sequence

Request = tuple[float, Sequence[int]]
"""When it comes (s), and the keys of its blocks."""


def mixed(seed: int, num: int) -> list[Request]:
    """Three in four ask once, 12 blocks; one in four goes on for six turns, 24 to 36 s apart."""
    draw = random.Random(seed)
    requests: list[Request] = []
    now_s = 0.0
    for number in range(1, num + 1):
        now_s += draw.expovariate(1.0)
        if draw.random() < 0.75:
            requests.append((now_s, range(1_000 * number, 1_000 * number + 12)))
            continue
        time_s = now_s
        for turn in range(1, 7):
            requests.append((time_s, range(1_000 * number, 1_000 * number + 4 * turn)))
            time_s += draw.uniform(24.0, 36.0)
    return sorted(requests, key=lambda request: request[0])
