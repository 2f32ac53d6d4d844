"""From queues to a draft: every running request goes on as far as it can, everything else is up to the
passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sagellm.core.plan import Chunk, Decodes, Draft, ExecutionPlan, RequestState
from sagellm.core.protocols.scheduler_ir import SchedulerPass

if TYPE_CHECKING:
    from sagellm.kvmgr.scheduler_ir.pipeline import ScheduleRequest


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

    def build(
        self,
        requests: Sequence[ScheduleRequest],
        running: Sequence[ScheduleRequest] = (),
        *,
        available_memory: int,
        passes: Sequence[SchedulerPass] = (),
        step: int = 0,
        max_batched_tokens: int = 8192,
        max_num_seqs: int = 256,
    ) -> ExecutionPlan:
        """The design documents' way from requests to a plan, with no engine behind it: see `build_plan`."""
        from sagellm.kvmgr.scheduler_ir.door import build_plan

        return build_plan(
            requests,
            running,
            available_memory=available_memory,
            passes=passes,
            step=step,
            max_batched_tokens=max_batched_tokens,
            max_num_seqs=max_num_seqs,
        )
