"""From queues to a draft: every running request wants to go on, everything else is up to the passes."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.plan import Chunk, Draft, RequestState


class IRBuilder:
    """Builds the draft that the first pass sees.

    Each running request has a chunk with all its uncomputed tokens (one, in decode); nobody waiting has one.
    """

    def build(
        self,
        step: int,
        now_s: float,
        token_budget: int,
        running: Sequence[RequestState],
        waiting: Sequence[RequestState],
    ) -> Draft:
        chunks = {s.request_id: Chunk(s, s.num_computed, s.num_uncomputed) for s in running}
        return Draft(step, now_s, token_budget, list(running), list(waiting), chunks)
