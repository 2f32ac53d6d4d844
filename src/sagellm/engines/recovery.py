"""`Recovery`: how the loop continues after a step that failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sagellm.core.errors import CapacityError
from sagellm.core.plan import Draft, ExecutionPlan, RequestState

log = logging.getLogger("sagellm.engine")

MAX_CAPACITY_FAILURES = 3
"""Steps of one token that may run out of device memory in a row before their request ends."""


class Recovery:
    """Owns the token budget of the next step, and the suspects of a failure. Suspects are the requests of a
    failed step, of which one has made it fail."""

    def __init__(self, max_batched_tokens: int) -> None:
        self.token_budget = self._max_token_budget = max_batched_tokens
        self._num_failures = 0
        self._suspects: list[RequestState] = []

    @property
    def isolates(self) -> bool:
        """Whether requests run one at a time, and decisions of passes are discarded."""
        return bool(self._suspects)

    def isolate(self, draft: Draft) -> None:
        """Leave one suspect in the draft, so that it fails alone."""
        while self._suspects and not draft.computes(self._suspects[-1]):
            self._suspects.pop()
        if self._suspects:
            for state in list(draft.scheduled()):
                if state is not self._suspects[-1]:
                    draft.hold(state)
            draft.preempted.clear()

    def succeeded(self) -> None:
        """A step was executed."""
        self._num_failures = 0
        self.relax()
        if self._suspects:
            self._suspects.pop()

    def relax(self) -> None:
        """Let a reduced token budget grow back by an eighth of its maximum."""
        self.token_budget = min(self._max_token_budget, self.token_budget + self._max_token_budget // 8 + 1)

    def short_of_memory(
        self, draft: Draft, plan: ExecutionPlan, error: CapacityError
    ) -> Sequence[RequestState]:
        """Halve the tokens of the next step; returns the requests that must end. Those are the requests of a
        step that has failed repeatedly with one token. Requests of the plan that have ended since are not in
        `draft`."""
        if plan.num_tokens == 1:
            self._num_failures += 1
        self.token_budget = max(1, plan.num_tokens // 2)
        log.warning(
            "device memory is short, next step computes %d tokens at most: %s", self.token_budget, error
        )
        if self._num_failures < MAX_CAPACITY_FAILURES:
            return ()
        self._num_failures = 0
        return list(draft.scheduled())

    def failed(self, draft: Draft, plan: ExecutionPlan) -> Sequence[RequestState]:
        """Make the requests of a failed step suspects; returns the request that must end. A request ends if
        the step did nothing else. A request with proposed tokens is tried again alone, without those."""
        scheduled = list(draft.scheduled())
        if len(scheduled) == 1 and len(plan.decode_rows) + len(plan.prefills) == 1 and not plan.chains:
            self._suspects = [state for state in self._suspects if state is not scheduled[0]]
            return scheduled
        self._suspects = scheduled[::-1]
        return ()
