"""The operations of a plan as nodes of a graph.

`ExecutionPlan` lists them by kind. An operation is a record of the plan (`Join`, `Prefill`, ...) with an id,
the instance that executes it, and the ids of the operations that must come before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from sagellm.core.plan import BlockCopy, BlockTableDelta, Decision, Join, PhasePlacement, Prefill, Transfer

LOCAL = "local"
"""The name of the instance where there is only one."""


class Phase(str, Enum):
    """The kinds of work of a request: its prompt, then one token per step."""

    PREFILL = "prefill"
    DECODE = "decode"


BOTH_PHASES = frozenset(Phase)


@dataclass(frozen=True, slots=True)
class InstanceStep:
    """One instance's part of a graph, beside its operations.

    `phases` are those that the instance computes. `num_draft_tokens` may be proposed for each request in
    decode. `decisions` are those of its passes, with their reasons.
    """

    name: str
    step: int
    phases: frozenset[Phase] = BOTH_PHASES
    num_draft_tokens: int = 0
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A node of the graph. `op_id` is unique in it; `after` are the ids of operations that come before."""

    word: ClassVar[str] = "operation"
    op_id: int
    instance: str = LOCAL
    after: tuple[int, ...] = ()

    @property
    def request_id(self) -> str | None:
        """The request, where it is known."""
        return None

    @property
    def name(self) -> str:
        """The operation in messages, as `%3 prefill "c"`."""
        request_id = self.request_id
        return f"%{self.op_id} {self.word}" + ("" if request_id is None else f' "{request_id}"')


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOperation(Operation):
    """An operation with a request. None where a plan names only the row."""

    request: str | None = None

    @property
    def request_id(self) -> str | None:
        return self.request


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptOp(RequestOperation):
    """A running request releases its blocks and waits again."""

    word: ClassVar[str] = "preempt"
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectOp(RequestOperation):
    """A request ends with an error because it can never run."""

    word: ClassVar[str] = "reject"
    request: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOp(RequestOperation):
    """Other instances compute phases of a request, or halves of its layers (attention, FFN)."""

    word: ClassVar[str] = "place"
    request: str
    placement: PhasePlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOp(RequestOperation):
    """A row of the batch becomes empty."""

    word: ClassVar[str] = "leave"
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOp(Operation):
    """A request enters the batch. `resumes` is set if it was preempted before."""

    word: ClassVar[str] = "join"
    join: Join
    resumes: bool = False

    @property
    def request_id(self) -> str:
        return self.join.request_id

    @property
    def row(self) -> int:
        return self.join.row


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTableOp(RequestOperation):
    """Blocks are written into the block table of a row, from index `delta.first` on."""

    word: ClassVar[str] = "table"
    delta: BlockTableDelta

    @property
    def row(self) -> int:
        return self.delta.row


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOp(Operation):
    """One block is copied to another block or tier."""

    word: ClassVar[str] = "copy"
    copy: BlockCopy

    @property
    def source(self) -> tuple[str, int]:
        """Tier and block that are read."""
        return self.copy.source_tier, self.copy.source_block

    @property
    def target(self) -> tuple[str, int]:
        """Tier and block that are written."""
        return self.copy.target_tier, self.copy.target_block


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOp(RequestOperation):
    """Compute the last token of a row, at `position`, and sample the next."""

    word: ClassVar[str] = "decode"
    phase: ClassVar[Phase] = Phase.DECODE
    samples: ClassVar[bool] = True
    row: int
    position: int

    @property
    def start(self) -> int:
        return self.position

    @property
    def end(self) -> int:
        return self.position + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOp(Operation):
    """Compute a range of a request's tokens. `phase` is decode if another instance computed the prompt and
    only its last token is computed again."""

    word: ClassVar[str] = "prefill"
    prefill: Prefill
    phase: Phase = Phase.PREFILL

    @property
    def request_id(self) -> str:
        return self.prefill.request_id

    @property
    def row(self) -> int:
        return self.prefill.row

    @property
    def start(self) -> int:
        return self.prefill.start

    @property
    def end(self) -> int:
        return self.prefill.start + self.prefill.num_tokens

    @property
    def samples(self) -> bool:
        return self.prefill.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOp(Operation):
    """Blocks of a request are sent to another instance."""

    word: ClassVar[str] = "transfer"
    transfer: Transfer

    @property
    def request_id(self) -> str:
        return self.transfer.request_id


ComputeOp = DecodeOp | PrefillOp
