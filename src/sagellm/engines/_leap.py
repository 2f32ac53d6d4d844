"""Many decode steps at once, for simulations: the steps that an engine would take one by one while nothing
but decoding happens, without planning each.

Every step's blocks are taken, and missing ones evicted, at that step's moment and in its order, so that the
books, the clock and the policies see what single steps would show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from sagellm.core.clock import Clock
from sagellm.engines._roster import Roster
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR

MOST_STEPS = 256


@runtime_checkable
class LeapingBackend(Protocol):
    """A backend that knows what decode steps will take before they are done, and whose tokens do not depend
    on KV. It keeps no block tables."""

    def price_decodes(self, positions: Sequence[int], num_steps: int) -> Sequence[float]:
        """Seconds of each of so many steps in a row, the rows being at those positions in the first; or of
        fewer."""
        ...

    def pass_decodes(self, step: int, rows: Sequence[int], seconds: float) -> None:
        """One such step: the clock moves."""
        ...

    def repeated(self, rows: Sequence[int]) -> Sequence[int]:
        """The token that each row draws in every one of these steps."""
        ...


class Leap(NamedTuple):
    """`num_steps` steps, in each of which `num_decodes` requests decoded one token. `ends_s`: when each
    ended."""

    first_step: int
    num_decodes: int
    durations_s: Sequence[float]
    ends_s: Sequence[float]

    @property
    def num_steps(self) -> int:
        return len(self.ends_s)


def can_leap(
    scheduler: BaseSchedulerIR, kv: KVCacheManager, roster: Roster, told: Sequence[int] = ()
) -> bool:
    """Whether the next step can only decode, and no pass or hint would do otherwise. `told`: rows that the
    backend knows to be left."""
    return (
        len(roster.decodes) > 0
        and not roster.waiting
        and not roster.prefilling
        and len(roster.left) == len(told)
        and not roster.num_new_running
        and kv.is_regular
        and all(getattr(one, "quiet", False) for one in scheduler.order)
    )


def leap(
    backend: LeapingBackend,
    kv: KVCacheManager,
    roster: Roster,
    clock: Clock,
    first_step: int,
    until_s: float,
) -> Leap | None:
    """Decode steps that begin before `until_s`, up to the one before the first request ends, or before memory
    is short."""
    batch = roster.decodes
    most = min(batch.num_regular, MOST_STEPS)
    if most < 2:
        return None
    prices_s = backend.price_decodes(batch.positions(), most)
    most = len(prices_s)
    borders = batch.borders(most)
    durations_s: list[float] = []
    ends_s: list[float] = []
    for number in range(most):
        if clock.now() >= until_s:
            break
        growing = borders.get(number)
        if growing:
            if len(growing) > kv.available_blocks():
                break
            kv.extend([batch.states[i] for i in growing])
        backend.pass_decodes(first_step + number, batch.rows, prices_s[number])
        durations_s.append(prices_s[number])
        ends_s.append(clock.now())
    if not ends_s:
        return None
    batch.repeat(backend.repeated(batch.rows), len(ends_s))
    return Leap(first_step, len(batch), durations_s, ends_s)
