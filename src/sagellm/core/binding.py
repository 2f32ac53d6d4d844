"""`Binding`: the blocks that the KV manager has reserved for one draft.

passes edit the Draft -> kv.bind(binding) -> verify_bound -> freeze -> kv.executed(binding)
                                          \\-> kv.rollback(binding)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import BlockCopy, BlockTableDelta, Chunk, Draft, RequestState


class BindingStage(Enum):
    """How far a binding has come, and the call that follows."""

    OPEN = "call bind first"
    BOUND = "call executed or rollback"
    EXECUTED = "it was executed: commit its requests, and make a new binding for the next draft"


@dataclass(slots=True)
class ChunkBlocks:
    """The blocks of one bound chunk. `block_ids` are new at the end of the request's block table. The backend
    lacks the table from index `first_block` on, or has it otherwise."""

    chunk: Chunk
    first_block: int = 0
    block_ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Binding:
    """The blocks that are reserved for `draft`, from `KVCacheManager.bind` until the step is committed.

    Private to planner and KV manager: a draft has no way to its binding, so a pass cannot reach it. A pass
    may have blocks bound early (`SchedulingView.bind_early`); then the binding is filled in parts.

    `chunks`: by request id, the chunks that are bound, in order. No pass can take them back.
    `decodes_bound`: whether the requests in decode have their blocks. No pass can leave out those that got
    one. `number`: which of all binds of the manager was the last one of this binding. `decode_indices`: the
    members of the decode batch that take part in the step; None means all.

    Requests in decode are many, so their new blocks are columns: request `appended_to[i]` got block
    `appended_ids[i]`; with several KV groups, as many blocks as there are groups. A request with proposed
    tokens may be there several times. The backend is sent what changed in their block tables with
    `table_deltas`. `kept_states`: whose recurrent state is kept, behind how many tokens and in which blocks.
    """

    draft: Draft
    stage: BindingStage = BindingStage.OPEN
    number: int = 0
    chunks: dict[str, ChunkBlocks] = field(default_factory=dict)
    decodes_bound: bool = False
    decode_indices: list[int] | None = None
    appended_to: list[RequestState] = field(default_factory=list)
    appended_ids: list[int] = field(default_factory=list)
    table_deltas: list[BlockTableDelta] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    kept_states: list[tuple[RequestState, int, tuple[int, ...]]] = field(default_factory=list)

    def clear_decodes(self) -> None:
        """Forget what the requests in decode got."""
        self.decodes_bound = False
        self.appended_to.clear()
        self.appended_ids.clear()
        self.table_deltas.clear()

    def require(self, call: str, *allowed: BindingStage) -> None:
        """Raise `BookkeepingError` naming the right call unless the binding is in an allowed stage."""
        if self.stage not in allowed:
            raise BookkeepingError(f"{call} of step {self.draft.step.number}: {self.stage.value}")
