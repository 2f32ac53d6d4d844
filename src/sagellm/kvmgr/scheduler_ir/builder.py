"""From queues to a draft: every running request goes on as far as it can, everything else is up to the
passes."""

from __future__ import annotations

from collections.abc import Iterable

from sagellm.core.plan import Chunk, Decodes, Draft, RequestState


class IRBuilder:
    """Builds the draft that the first pass sees.

    Each running request whose prompt is not whole has a chunk with all its uncomputed tokens, those in decode
    compute one token, and nobody waiting has anything.
    """

    def draft(
        self,
        step: int,
        now_s: float,
        token_budget: int,
        running: Iterable[RequestState],
        waiting: Iterable[RequestState],
        decodes: Decodes,
        prefilling: Iterable[RequestState] = (),
        num_new_running: int = 0,
    ) -> Draft:
        """`prefilling`: those of `running` that are not in `decodes`, in the order of their chunks."""
        chunks = {s.request_id: Chunk(s, s.num_computed, s.num_uncomputed) for s in prefilling}
        return Draft(
            step, now_s, token_budget, list(running), list(waiting), chunks, decodes, num_new_running
        )
