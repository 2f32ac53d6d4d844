"""How long a schedule stays as it is: what simulations ask before they take many decode steps at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from sagellm.core.plan import Draft
from sagellm.core.protocols.scheduler_ir import SchedulerPass, SchedulingView


class Stability(NamedTuple):
    """A promise for the drafts of the next steps: nobody is admitted, held, preempted or rejected in those
    made before `until_s`, and with `same_cache` before anything enters or leaves the cache."""

    until_s: float = math.inf
    same_cache: bool = False

    def and_also(self, other: Stability) -> Stability:
        return Stability(min(self.until_s, other.until_s), self.same_cache or other.same_cache)


ALWAYS_STABLE = Stability()
"""For as long as nobody comes or goes."""
Ask = Callable[[Draft, SchedulingView], Stability | None]


class QuietPass(Protocol):
    """A pass that can also be quiet while somebody waits."""

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        """How long it would go on to do with such drafts what it does with this one; None where it would do
        more than order the waiting and keep them waiting, or cannot tell.

        Asked in order of the passes about a draft in which all who run decode, or all but one: that one's
        chunk is then made as long as the pass would make it, which must be the same in all steps to come.
        Those differ in this: requests have more tokens and blocks, and time has passed. `draft.waiting` is
        put into the order that the pass gives it, cut to those whom it leaves to the passes behind it.
        """
        ...


def knows_queues(order: Sequence[SchedulerPass]) -> bool:
    """Whether it is worth to ask while somebody waits or a prompt is computed."""
    return all(_promised(one, "stable_until") is not None for one in order)


def quiet(order: Sequence[SchedulerPass], draft: Draft, view: SchedulingView) -> Stability | None:
    """How long all passes together stay quiet; `draft` is spent with it. A pass that has no `stable_until` is
    quiet where it says so (`quiet = True`), nobody waits, nobody has just come and all decode."""
    found, alone = ALWAYS_STABLE, not draft.waiting and not draft.num_new_running and not draft.chunks
    for one in order:
        ask: Ask | None = _promised(one, "stable_until")
        said = ALWAYS_STABLE if ask is None and alone and _promised(one, "quiet") else None
        if ask is not None:
            said = ask(draft, view)
        if said is None:
            return None
        found = found.and_also(said)
    return found


def _promised(one: SchedulerPass, name: str) -> Any:
    """The pass's promise of that name, or None: one that was made for another `__call__`, which a subclass
    has replaced, does not count."""
    made = "__init__" if name in getattr(one, "__dict__", {}) else name
    classes = type(one).__mro__
    made_by = next((place for place, cls in enumerate(classes) if made in vars(cls)), len(classes))
    runs_by = next(place for place, cls in enumerate(classes) if "__call__" in vars(cls))
    return getattr(one, name, None) if made_by <= runs_by else None
