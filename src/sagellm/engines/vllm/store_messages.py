"""What the two halves of `SageStoreConnector` send each other.

The half in the scheduler sends `StoreMetadata` with each step. The half in each worker answers with a
`StoreReport`; vLLM merges those of all workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from sagellm.core.blocks import Tier
from sagellm.core.protocols.kv_tiers import ReadOutcome, StoredBlock
from sagellm.kvmgr.kv_pool.tiers.migrator import MigrationPlan, MigrationReport


@dataclass(slots=True)
class Move:
    """A plan to carry out. `request_id`: of the request that waits for it; empty for one on its way down."""

    move_id: int
    plan: MigrationPlan
    request_id: str = ""


@dataclass
class StoreMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Goes to the workers with a step.

    `forgotten` slots hold nothing any more, before the moves begin. Loads begin before the model runs and
    saves after it. `has_forward`: whether the model runs at all.
    """

    step: int = 0
    forgotten: dict[Tier, list[int]] = field(default_factory=dict)
    loads: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)
    has_forward: bool = True


@dataclass(slots=True)
class MoveResult:
    """What became of a move, as in `MigrationReport`. With several ranks: what all of them have done."""

    move_id: int
    num_read: int
    outcome: ReadOutcome
    num_written: dict[Tier, int]
    errors: dict[Tier, str]
    num_bytes: int
    spent_s: float
    num_ranks: int = 1

    @classmethod
    def of(cls, move_id: int, report: MigrationReport) -> MoveResult:
        return cls(
            move_id, report.num_read, report.outcome, report.num_written, report.errors, report.num_bytes,
            report.spent_s,
        )  # fmt: skip

    def merged(self, other: MoveResult) -> MoveResult:
        """What this rank and the others have done together."""
        tiers = [tier for tier in self.num_written if tier in other.num_written]
        return MoveResult(
            self.move_id,
            min(self.num_read, other.num_read),
            other.outcome if self.outcome is ReadOutcome.OK else self.outcome,
            {tier: min(self.num_written[tier], other.num_written[tier]) for tier in tiers},
            {**other.errors, **self.errors},
            min(self.num_bytes, other.num_bytes),
            max(self.spent_s, other.spent_s),
            self.num_ranks + other.num_ranks,
        )


@dataclass(slots=True)
class OpenedStore:
    """The slots of a worker's storages, and the blocks that they have from before.

    `refusal`: why this model has no store; empty if it has one.
    """

    bytes_per_block: int = 0
    num_slots: dict[Tier, int] = field(default_factory=dict)
    blocks: dict[Tier, list[StoredBlock]] = field(default_factory=dict)
    refusal: str = ""
    num_ranks: int = 1

    def merged(self, other: OpenedStore) -> OpenedStore:
        """What both ranks have: blocks that are in the same slot of both."""
        blocks = {}
        for tier, found in self.blocks.items():
            there = {(block.slot, block.token_hash) for block in other.blocks.get(tier, ())}
            blocks[tier] = [block for block in found if (block.slot, block.token_hash) in there]
        tiers = [tier for tier in self.num_slots if tier in other.num_slots]  # the nearest first
        return OpenedStore(
            max(self.bytes_per_block, other.bytes_per_block),
            {tier: min(self.num_slots[tier], other.num_slots[tier]) for tier in tiers},
            blocks,
            self.refusal or other.refusal,
            self.num_ranks + other.num_ranks,
        )


@dataclass
class StoreReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What one worker, or several, report of a step.

    `step`: its number. `faults`: why a tier's storage is not used any more.
    """

    step: int = 0
    opened: OpenedStore | None = None
    results: dict[int, MoveResult] = field(default_factory=dict)
    faults: dict[Tier, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StoreReport:
        """Called by vLLM with the report of another worker of the same step."""
        assert isinstance(other, StoreReport)
        opened = self.opened or other.opened
        if self.opened and other.opened:
            opened = self.opened.merged(other.opened)
        results = dict(self.results)
        for move_id, result in other.results.items():
            results[move_id] = results[move_id].merged(result) if move_id in results else result
        return StoreReport(self.step, opened, results, {**other.faults, **self.faults})
