"""`EngineView`: what scheduling passes see of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sagellm.core.protocols.scheduler_ir import StepFacts
from sagellm.engines.planner import Planner
from sagellm.engines.request_table import RequestTable

if TYPE_CHECKING:
    from sagellm.engines.engine import Engine


class EngineView:
    """Implements `SchedulingView`: what passes see of an engine, and nothing else of it."""

    def __init__(self, engine: Engine, planner: Planner, table: RequestTable) -> None:
        self._engine = engine
        self._table = table
        self.kv = engine.kv.quotes
        self.max_num_seqs = engine.max_num_seqs
        self.max_batched_tokens = engine.max_batched_tokens
        self.bind_early = planner.bind_early

    @property
    def num_free_rows(self) -> int:
        return len(self._table.free_rows)

    @property
    def last_step(self) -> StepFacts:
        return self._engine.last_step
