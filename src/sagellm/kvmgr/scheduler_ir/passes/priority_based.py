"""Higher priority first; who arrived first within one priority."""

from __future__ import annotations

import itertools

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulingView


class PriorityBasedPass:
    """Sorts the waiting and the running by (priority descending, arrival).

    Who stands last among the running is the first to be preempted. Stable, and free where everything is in
    order.
    """

    name = "priority_based"

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        for queue in (draft.waiting, draft.running):
            if any(_rank(a) > _rank(b) for a, b in itertools.pairwise(queue)):
                queue.sort(key=_rank)


def _rank(state: RequestState) -> tuple[int, float]:
    return (-state.request.priority, state.request.arrival_s)


PLUGIN = PriorityBasedPass
