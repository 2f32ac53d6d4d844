"""Higher priority first; who arrived first within one priority."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView


class PriorityBasedPass:
    """Sorts the waiting by priority, equals staying as they are, and the running by priority and arrival.

    Who stands last among the running is the first to be preempted. Free where everything is in order.
    """

    name = "priority_based"

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        _sort(draft.waiting, lambda state: -state.request.priority)
        _sort(draft.running, lambda state: (-state.request.priority, state.request.arrival_s))


def _sort(queue: list[RequestState], rank: Callable[[RequestState], Any]) -> None:
    if any(rank(a) > rank(b) for a, b in pairwise(queue)):
        queue.sort(key=rank)


PLUGIN = PriorityBasedPass
