"""`TokenMemoryBackend` with steps that take time, for fleets of processes."""

from __future__ import annotations

import time

from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.engines.simulator.token_memory import TokenMemoryBackend


class SlowTokens(TokenMemoryBackend):
    """Each step takes `step_s` seconds. Tokens are ids of the demo model's vocabulary."""

    def __init__(
        self, step_s: float = 0.005, num_blocks: int = 2000, block_size: int = 16, max_model_len: int = 4096
    ) -> None:
        super().__init__(num_blocks, block_size, 64, max_model_len, 500)
        self._step_s = step_s

    def execute(self, plan: ExecutionPlan) -> StepResult:
        time.sleep(self._step_s)
        return super().execute(plan)
