"""`Comparison`: what each kind of hint wins or loses, why blocks were computed, and the guard."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from sagellm.core.clock import ManualClock
from sagellm.core.protocols.eviction import Use
from sagellm.core.types import Namespace
from sagellm.engines.guests import comparison as comparison_module
from sagellm.engines.guests import path_of
from sagellm.engines.guests.comparison import Comparison
from sagellm.engines.guests.paths import TOKENS_PER_DIGEST
from sagellm.engines.guests.request_hints import NO_HINTS, hints_of
from sagellm.engines.guests.settings import GuestSettings

LOGGER, SIZE, CAPACITY = logging.getLogger("lmdeploy.sagellm"), 16, 60
END = hints_of({"sage_hints": {"actions": [{"action_type": "session.end"}]}})


class Guide:
    """Stands for what has taken the order over."""

    def __init__(self) -> None:
        self.is_guided, self.reason = True, ""

    def give_back(self, reason: str) -> None:
        self.is_guided, self.reason = False, reason


def compare(**settings: Any) -> tuple[Comparison, ManualClock]:
    clock = ManualClock()
    given = GuestSettings.of({"policy": "lru", "report_s": 0, **settings})
    return Comparison("Host", CAPACITY, SIZE, TOKENS_PER_DIGEST, given, clock, LOGGER), clock


def serve_sessions(found: Comparison, clock: ManualClock, *, truthful: bool, count: int = 600) -> None:
    """Sessions of four turns; a client says which turn is the last, or the opposite."""
    rng, turns = random.Random(0), [1] * 12
    names = list(range(12))
    for number in range(count):
        slot = rng.randrange(12)
        is_last = turns[slot] == 4
        path = path_of([(1000 * names[slot] + i).to_bytes(32, "little") for i in range(3 * turns[slot])])
        num_tokens = 3 * turns[slot] * SIZE + 5
        clock.advance(1.0)
        found.began(str(number), path, 0, num_tokens, Namespace())
        found.ended(str(number), path, Use(5), END if is_last is truthful else NO_HINTS)
        turns[slot] += 1
        if is_last:
            names[slot], turns[slot] = 100 + number, 1


def test_each_kind_of_hint_has_a_shadow(caplog: pytest.LogCaptureFixture) -> None:
    found, clock = compare(hints=["session.end", "pin"])
    serve_sessions(found, clock, truthful=True)
    hits = {name: shadow.reuse.num_hits for name, shadow in found.shadows.items()}
    assert list(hits) == ["lru", "lru with session.end", "lru with pin", "lru with all hints"]
    assert hits["lru"] == hits["lru with pin"]
    assert hits["lru with session.end"] == hits["lru with all hints"] > 1.05 * hits["lru"]
    with caplog.at_level(logging.INFO, LOGGER.name):
        found.report()
    assert f"lru with session.end {found.shadows['lru with session.end'].reuse.ratio:.2%}" in caplog.text


def test_misses_have_causes() -> None:
    found, clock = compare()
    serve_sessions(found, clock, truthful=True)
    misses, lru = found.misses, found.shadows["lru"].reuse
    assert sum(misses) == lru.num_blocks - lru.num_hits
    assert misses.cold > 0
    assert misses.capacity + misses.premature > 0
    assert misses.namespace == misses.quota == misses.preemption == 0


def test_hints_that_lie_are_switched_off_with_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_module, "JUDGED_TOKENS", 10_000)
    for truthful in (True, False):
        found, clock = compare(hints=["session.end"])
        guide = found.guide = Guide()
        serve_sessions(found, clock, truthful=truthful)
        assert guide.is_guided is truthful
        assert ("lru with session.end reuses" in guide.reason) is not truthful
