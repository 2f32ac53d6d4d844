"""The operations of a plan as nodes of a graph.

`ExecutionPlan` lists records by kind (`Join`, `Prefill`, ...). An operation has the fields of its record, and
beside them an id, the instance that executes it, and the ids of the operations that must come before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from sagellm.core.plan import Decision
from sagellm.core.types import SamplingParams

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
    """A node of the graph. `op_id` is unique in it; `after` are the ids of operations that come before.
    `request_id` is None where a plan names only the row."""

    word: ClassVar[str] = "operation"
    op_id: int
    instance: str = LOCAL
    after: tuple[int, ...] = ()
    request_id: str | None = None

    @property
    def name(self) -> str:
        """The operation in messages, as `%3 prefill "c"`."""
        return f"%{self.op_id} {self.word}" + ("" if self.request_id is None else f' "{self.request_id}"')


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptOp(Operation):
    """A running request releases its blocks and waits again."""

    word: ClassVar[str] = "preempt"
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectOp(Operation):
    """A request ends with an error because it can never run."""

    word: ClassVar[str] = "reject"
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOp(Operation):
    """Other instances compute phases of a request, or halves of its layers: a `PhasePlacement`."""

    word: ClassVar[str] = "place"
    request_id: str
    prefill: str = ""
    decode: str = ""
    attention: str = ""
    ffn: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOp(Operation):
    """A row of the batch becomes empty."""

    word: ClassVar[str] = "leave"
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOp(Operation):
    """A request enters the batch: a `Join`. `resumes` is set if it was preempted before."""

    word: ClassVar[str] = "join"
    request_id: str
    row: int
    tokens: bytes
    num_prompt_tokens: int
    num_computed: int
    block_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: frozenset[int]
    state_pages: tuple[int, ...] = ()
    resumes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTableOp(Operation):
    """Blocks are written into the block table of a row: a `BlockTableDelta`."""

    word: ClassVar[str] = "table"
    row: int
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOp(Operation):
    """One block is copied to another: a `BlockCopy`."""

    word: ClassVar[str] = "copy"
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOp(Operation):
    """The recurrent state of a row is kept: a `KeptState`."""

    word: ClassVar[str] = "keep"
    row: int
    num_tokens: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOp(Operation):
    """Compute the last token of a row, at `position`, and sample the next.

    With a `chain`, compute these proposed tokens too, and sample behind each. With `parents` they are a tree.
    """

    word: ClassVar[str] = "decode"
    phase: ClassVar[Phase] = Phase.DECODE
    samples: ClassVar[bool] = True
    row: int
    position: int
    chain: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        return self.position

    @property
    def end(self) -> int:
        return self.position + 1 + len(self.chain)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOp(Operation):
    """Compute tokens `[start, end)` of a request: a `Prefill`. `phase` is decode if another instance computed
    the prompt and only its last token is computed again."""

    word: ClassVar[str] = "prefill"
    request_id: str
    row: int
    start: int
    end: int
    samples: bool
    phase: Phase = Phase.PREFILL

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOp(Operation):
    """Blocks of a request are sent to another instance: a `Transfer`."""

    word: ClassVar[str] = "transfer"
    request_id: str
    block_ids: tuple[int, ...]
    target_instance: str


ComputeOp = DecodeOp | PrefillOp
