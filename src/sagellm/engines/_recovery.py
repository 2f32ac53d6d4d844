"""How the loop goes on after a step that failed: with fewer tokens, or with one request at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sagellm.core.errors import CapacityError
from sagellm.core.plan import Draft, ExecutionPlan, RequestState

log = logging.getLogger("sagellm.engine")

MAX_CAPACITY_FAILURES = 3
"""Times that a step of one token may run out of device memory, in a row, before its request ends."""


class Recovery:
    """The token budget of the next step, and the requests of which one made a step fail."""

    def __init__(self, max_batched_tokens: int) -> None:
        self.token_budget = self._most = max_batched_tokens
        self._num_failures = 0
        self._suspects: list[RequestState] = []

    @property
    def isolates(self) -> bool:
        """Whether requests run one at a time, so that most of what the passes decide is left out."""
        return bool(self._suspects)

    def isolate(self, draft: Draft) -> None:
        """After a step that failed for no known reason, its requests run one at a time, so that the one that
        makes it fail fails alone."""
        while self._suspects and not draft.computes(self._suspects[-1]):
            self._suspects.pop()
        if self._suspects:
            for state in list(draft.scheduled()):
                if state is not self._suspects[-1]:
                    draft.hold(state)
            draft.preempted.clear()
            draft.swapped.clear()

    def succeeded(self) -> None:
        """A step was executed."""
        self._num_failures = 0
        self.relax()
        if self._suspects:
            self._suspects.pop()

    def relax(self) -> None:
        """A smaller budget grows back, step by step."""
        self.token_budget = min(self._most, self.token_budget + self._most // 8 + 1)

    def short_of_memory(
        self, draft: Draft, plan: ExecutionPlan, error: CapacityError
    ) -> Sequence[RequestState]:
        """The next step tries half the tokens. Returns the requests that end: those of a step that keeps
        failing with one token. Of the plan's requests some may have ended since, and are not in `draft`."""
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
        """Returns the request that ends, if the step did nothing else; several are suspects, and so is one
        where KV was to be saved or brought back, which the next step does not do again."""
        scheduled = list(draft.scheduled())
        swaps = draft.swapped or any(chunk.hit.num_swapped for chunk in draft.admitted() if chunk.hit)
        alone = len(scheduled) == 1 and not swaps
        if alone and len(plan.decode_rows) + len(plan.prefills) == 1:
            self._suspects = [one for one in self._suspects if one is not scheduled[0]]
            return scheduled
        self._suspects = scheduled[::-1]
        return ()
