"""The backends of a divided model.

`FirstRank` is the engine's, and each `FollowingRank` repeats its steps. `AttentionRank` is the engine's where
other ranks have the MLPs (`ffn_rank.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sagellm.core.errors import CommError, ConfigError, EngineFailedError, PlanError, UnsupportedModelError
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.types import CapabilityDescriptor, TokenLogprob
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.block_bytes import PoolBytes
from sagellm.engines.native.parallel.attention_model import AttentionModel, micro_batches
from sagellm.engines.native.parallel.plan_message import Drawn, decode, encode
from sagellm.engines.native.parallel.ranks import Ranks
from sagellm.engines.native.sampler import ScoredPrompt
from sagellm.engines.native.token_copies import TokenCopier

ATTENTION, FFN = "attention", "ffn"
"""The places of a layer's halves in plans of an engine with FFN ranks."""


class LeadingRank(NativeBackend):
    """Announces steps to the other ranks, computes its part and draws the tokens.

    A plan that cannot be executed leaves all ranks as they were. After any other failure between the
    announcement and the logits the ranks are in different places: `EngineFailedError`, and the engine must be
    built anew.
    """

    def __init__(self, model: Any, *, ranks: Ranks, **options: Any) -> None:
        self._ranks = ranks
        try:
            super().__init__(model, ranks=ranks, **options)
        except CommError as error:
            raise ranks.failure(error) from error
        ranks.spent_s = 0.0  # from here on, of the engine's steps

    def check_ranks(self) -> None:
        """Raise `EngineFailedError` if the process of another rank has ended."""
        self._ranks.check()

    @property
    def communication_s(self) -> float:
        """Seconds so far of communication, waiting for others included."""
        return self._ranks.spent_s

    def end_ranks(self, grace_s: float) -> None:
        """End the other ranks, by force after `grace_s`. A step that waits for one of them fails soon."""
        self._ranks.end(grace_s)

    def execute(self, plan: ExecutionPlan) -> StepResult:
        self._ranks.is_midway = False
        try:
            return super().execute(plan)
        except (PlanError, EngineFailedError):
            raise
        except BaseException as error:  # after Ctrl-C, too, the others would be a plan behind
            if not self._ranks.is_midway:
                raise
            failure = self._ranks.failure(error) if isinstance(error, Exception) else None
            self._ranks.close()
            if failure is None:
                raise
            raise failure from error

    def _logits(self, plan: ExecutionPlan) -> torch.Tensor:
        logits = super()._logits(plan)
        self._ranks.is_midway = False
        return logits

    def _logits_and_scores(
        self, plan: ExecutionPlan, scored: Sequence[ScoredPrompt]
    ) -> tuple[torch.Tensor, dict[int, tuple[TokenLogprob, ...]]]:
        found = super()._logits_and_scores(plan, scored)
        self._ranks.is_midway = False
        return found

    def close(self) -> None:
        self._ranks.close()
        super().close()


class FirstRank(LeadingRank):
    """Announces each plan, with the tokens that were drawn before."""

    def __init__(self, model: Any, *, ranks: Ranks, **options: Any) -> None:
        self._drawn = Drawn()
        super().__init__(model, ranks=ranks, **options)

    def capability(self) -> CapabilityDescriptor:
        """Of the whole model, with memory and KV schema of this rank."""
        found = super().capability()
        return found if self._ranks.split.pipeline == 1 else replace(found, sliding_window=None)

    def execute(self, plan: ExecutionPlan) -> StepResult:
        result = super().execute(plan)
        counts = result.num_drawn(plan)
        rows = [row for row, n in zip(plan.decode_rows, counts, strict=True) for _ in range(n)]
        rows += [op.row for op in plan.prefills if op.samples]
        self._drawn = self._drawn._replace(rows=rows, token_ids=result.token_ids)
        return result

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        super()._move(sources, targets)
        self._drawn = Drawn(sources=sources, targets=targets)

    def kv_bytes(self) -> PoolBytes:
        """Raises `ConfigError`: a block of this rank is a part of a block."""
        raise ConfigError(
            "this rank has a part of each block only, so KV is kept on the device alone: set "
            "parallel.tensor and parallel.pipeline to 1 (parallel.ffn may be more), or leave out what stores "
            "or sends KV"
        )

    def token_copier(self) -> TokenCopier:
        raise UnsupportedModelError("KV of a model on several ranks is not moved")

    def _begin(self, plan: ExecutionPlan) -> None:
        super()._begin(plan)
        self._ranks.announce(encode(plan, self._drawn))
        self._drawn = Drawn()


class AttentionRank(LeadingRank):
    """Has attention, all KV, embedding and head. Its model announces the rows of each step to the FFN ranks.

    A step is computed in two micro-batches that take turns, if each has `micro_batch_tokens`; not one with
    log-probabilities of prompts. A plan may place the halves of a request's layers (`PhasePlacement`) where
    they are: on `ATTENTION` and `FFN`, or "". Raises `PlanError` for another place.
    """

    def __init__(self, model: Any, *, ranks: Ranks, micro_batch_tokens: int, **options: Any) -> None:
        self._micro_batch_tokens = micro_batch_tokens
        super().__init__(model, ranks=ranks, **options)

    def capability(self) -> CapabilityDescriptor:
        found = super().capability()
        return replace(found, features=found.features | {"af_separation"})

    def _begin(self, plan: ExecutionPlan) -> None:
        for request_id, placement in plan.placements:
            for half, place, own in (
                ("attention", placement.attention, ATTENTION), ("FFN", placement.ffn, FFN)
            ):  # fmt: skip
                if place not in ("", own):
                    raise PlanError(f"{request_id}: {half} on {place!r}; this engine computes it on {own!r}")
        super()._begin(plan)

    def _logits(self, plan: ExecutionPlan) -> torch.Tensor:
        is_recorded = self._steps is not None and self._steps.can_run(plan)
        parts = [plan] if is_recorded else micro_batches(plan, self._micro_batch_tokens)
        if len(parts) == 1:
            return super()._logits(plan)
        assert isinstance(self._model, AttentionModel)
        with torch.inference_mode():
            hidden = self._model.hidden_of([self._inputs(part) for part in parts], self._kv)
            logits = self._model.head(hidden)
        self._ranks.is_midway = False
        return logits


class FollowingRank(NativeBackend):
    """Computes its part of each step that the first rank announces, and draws nothing."""

    def __init__(self, model: Any, *, ranks: Ranks, **options: Any) -> None:
        self._ranks = ranks
        super().__init__(model, ranks=ranks, **options)

    def follow(self, message: bytes) -> None:
        """Compute the step of a message. Raises what ends this rank."""
        plan, drawn = decode(message)
        self._rows.advance(drawn.rows, drawn.token_ids)
        with self._current_device():
            if drawn.sources:
                self._kv.move(drawn.sources, drawn.targets)
            self._begin(plan)  # the first rank has begun it, so an error here is a difference between ranks
            try:
                self._kv.copy_blocks(plan.copies)
                if plan.num_tokens:
                    self._compute_logits(plan)
            except PlanError:  # the first rank has met it too, before anything was computed
                return

    def _compute_logits(self, plan: ExecutionPlan) -> None:
        scored = self._rows.scored(plan) if plan.prefills else ()
        if not scored:
            self._logits(plan)
        elif self._ranks.split.tensor > 1:
            self._logits_and_scores(plan, scored)
        else:  # the first rank alone has a head
            with torch.inference_mode():
                self._model.hidden(self._inputs(plan, scored), self._kv)
