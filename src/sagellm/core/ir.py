"""The operations of a plan, one by one: what `ExecutionPlan` lists by kind, here as nodes of a graph.

An operation is a record of the plan (`Join`, `Prefill`, ...) with an id, the instance that does it, and the
ids of the operations that it comes after.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from sagellm.core.plan import BlockCopy, BlockTableDelta, Decision, Join, Placement, Prefill, Transfer

LOCAL = "local"
"""The name of the instance where there is one only."""


class Phase(str, Enum):
    """The two kinds of work of a request: its prompt, then one token a step."""

    PREFILL = "prefill"
    DECODE = "decode"


BOTH_PHASES = frozenset(Phase)


@dataclass(frozen=True, slots=True)
class InstanceStep:
    """One instance's part of a graph: its name, its step, the phases that it computes, the tokens that may be
    drafted for each request in decode, and why it does what it does."""

    name: str
    step: int
    phases: frozenset[Phase] = BOTH_PHASES
    num_draft_tokens: int = 0
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`op_id` is unique in its graph; `after` names the operations whose effects this one must see."""

    word: ClassVar[str] = "operation"
    op_id: int
    instance: str = LOCAL
    after: tuple[int, ...] = ()

    @property
    def request_id(self) -> str | None:
        """The request that it is about, where that is known."""
        return None

    @property
    def name(self) -> str:
        """How messages speak of it."""
        about = self.request_id
        return f"%{self.op_id} {self.word}" + ("" if about is None else f' "{about}"')


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptOp(Operation):
    """A running request gives its blocks back and waits again."""

    word: ClassVar[str] = "preempt"
    request: str

    @property
    def request_id(self) -> str:
        return self.request


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectOp(Operation):
    """A request ends with an error, since it can never go on."""

    word: ClassVar[str] = "reject"
    request: str
    reason: str

    @property
    def request_id(self) -> str:
        return self.request


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOp(Operation):
    """Phases of a request, or halves of its layers (attention, FFN), are computed by other instances."""

    word: ClassVar[str] = "place"
    request: str
    placement: Placement

    @property
    def request_id(self) -> str:
        return self.request


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOp(Operation):
    """A row of the batch is empty from here on. The plan does not say who left: `request` may be None."""

    word: ClassVar[str] = "leave"
    row: int
    request: str | None = None

    @property
    def request_id(self) -> str | None:
        return self.request


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOp(Operation):
    """A request enters the batch; `resumes`: it was there before, and was preempted."""

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
class BlockTableOp(Operation):
    """The block table of a row changes from one index on."""

    word: ClassVar[str] = "grow"
    growth: BlockTableDelta
    request: str | None = None

    @property
    def request_id(self) -> str | None:
        return self.request

    @property
    def row(self) -> int:
        return self.growth.row


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOp(Operation):
    """One block goes from tier to tier, or from block to block."""

    word: ClassVar[str] = "copy"
    copy: BlockCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOp(Operation):
    """Compute the token at `position` of a row, its last, and draw the next."""

    word: ClassVar[str] = "decode"
    row: int
    position: int
    request: str | None = None

    @property
    def request_id(self) -> str | None:
        return self.request

    @property
    def phase(self) -> Phase:
        return Phase.DECODE

    @property
    def start(self) -> int:
        return self.position

    @property
    def end(self) -> int:
        return self.position + 1

    @property
    def samples(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOp(Operation):
    """Compute a range of a request's tokens. Its `phase` is decode where a request whose prompt another
    instance computed goes on with its last token alone."""

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
    """Blocks of a request go to another instance."""

    word: ClassVar[str] = "transfer"
    transfer: Transfer

    @property
    def request_id(self) -> str:
        return self.transfer.request_id


ComputeOp = DecodeOp | PrefillOp
