"""`HeadedBackend`: the native backend of a model with a draft head.

Here the kinds of heads part: `eagle` and `block` are a layer behind the model's last (`DraftHead`), which
reads prompts too and has KV in the blocks; `medusa` reads the last hidden state alone (`MedusaHead`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from sagellm.core.features import DROPPED_BLOCKS
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.protocols.fusion import KernelSet
from sagellm.core.types import CapabilityDescriptor, TokenLogprob
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.draft_head import DraftHead
from sagellm.engines.native.head_draft import MOST_TOKENS
from sagellm.engines.native.head_drafter import HeadDrafter, blocks_per_row
from sagellm.engines.native.kv_cache import layer_kinds
from sagellm.engines.native.loading import CheckedModel, ModelWeights
from sagellm.engines.native.medusa_drafter import MedusaDrafter
from sagellm.engines.native.medusa_head import MedusaHead
from sagellm.engines.native.sampler import ScoredPrompt, prompt_logprobs
from sagellm.engines.native.token_copies import TokenCopier

DRAFT_HEAD = "draft_head"


class HeadedBackend(NativeBackend):
    """Keeps the model's last hidden states, from which `drafter` proposes tokens.

    The KV of a layer is one more in the blocks, so blocks are those of another model: they do not move to a
    backend without the head. Medusa has no KV. Needs the option `head`; the others are as
    in `NativeBackend`, without `ranks`.
    """

    _hidden: torch.Tensor
    """Of the step under way, what the model's head was given for the rows of its logits."""

    def _take_head(self, source: CheckedModel, weights: ModelWeights, kernels: KernelSet) -> None:
        assert source.head is not None
        self._layout, self._draw_next = source.head.layout, None
        self._head: DraftHead | MedusaHead
        if source.head.kind == "medusa":
            self._head = MedusaHead(weights)
            return
        self._head = DraftHead(source.head.layout, weights, self._compute_dtype, self._device, kernels)
        self._draw_next = kernels.draw_next if self._layout.logit_softcap is None else None

    def _make_drafter(self) -> None:
        sizes = self._max_num_seqs, self._max_model_len, self._compute_dtype
        self.drafter: HeadDrafter | MedusaDrafter
        if isinstance(self._head, MedusaHead):
            self.drafter = MedusaDrafter(
                self._head, self._model.head, self._rows, *sizes, self._device, self._draw
            )
            return
        kv, group = self._kv.of_last_layer(), layer_kinds(self._layout.kv_windows, self._schema.groups)[-1][0]
        self.drafter = drafter = HeadDrafter(
            self._head, kv, group, self._rows, self._planner, *sizes, self._draw
        )
        drafter.steps = self._recorded(
            self._head, kv, len(drafter.given), drafter.given, MOST_TOKENS - 1, self._draw_next
        )

    def _num_draft_blocks(self, block_size: int) -> int:
        return self._max_num_seqs * blocks_per_row(block_size) if isinstance(self._head, DraftHead) else 0

    def capability(self) -> CapabilityDescriptor:
        found = super().capability()
        # A head that is a layer finds KV by position.
        lost = {DROPPED_BLOCKS} if isinstance(self._head, DraftHead) else set[str]()
        return replace(found, features=(found.features | {DRAFT_HEAD}) - lost)

    def token_copier(self) -> TokenCopier:
        return TokenCopier(self._model, self._kv, self._head if isinstance(self._head, DraftHead) else None)

    def _begin(self, plan: ExecutionPlan) -> None:
        super()._begin(plan)
        self.drafter.apply(plan)

    def _compute(self, plan: ExecutionPlan) -> StepResult:
        result, drafter = super()._compute(plan), self.drafter
        if drafter.rests:
            return result
        began_s = time.perf_counter()
        num_drawn = result.num_drawn(plan) if plan.chains else [1] * len(plan.decode_rows)
        drafter.decoded(plan, self._hidden, num_drawn)
        drafter.keeping_took(time.perf_counter() - began_s)
        return result

    def _logits(self, plan: ExecutionPlan) -> torch.Tensor:
        if self.drafter.rests:
            return super()._logits(plan)
        if self._steps is not None and self._steps.can_run(plan):
            logits = self._steps.logits(plan, self._rows)
            self._hidden = self._steps.hidden(len(plan.decode_rows) + plan.num_proposed_tokens)
            return logits
        with torch.inference_mode():
            self._hidden = self._last_hidden(plan)
            return self._model.head(self._hidden)

    @torch.inference_mode()
    def _logits_and_scores(
        self, plan: ExecutionPlan, scored: Sequence[ScoredPrompt]
    ) -> tuple[torch.Tensor, dict[int, tuple[TokenLogprob, ...]]]:
        if self.drafter.rests:
            return super()._logits_and_scores(plan, scored)
        hidden = self._last_hidden(plan, scored)
        self._hidden, others = hidden.tensor_split([len(plan.sample_rows) + plan.num_proposed_tokens])
        found = prompt_logprobs(self._model.head, others, scored, self._spec.vocab_size)
        return self._model.head(self._hidden), found

    def _last_hidden(self, plan: ExecutionPlan, scored: Sequence[ScoredPrompt] = ()) -> torch.Tensor:
        """The hidden states whose logits are wanted. A head that is a layer takes in the step's prompts."""
        inputs = self._inputs(plan, scored)
        if not plan.prefills or isinstance(self.drafter, MedusaDrafter):
            return self._model.hidden(inputs, self._kv)
        hidden = self._model.hidden(replace(inputs, sampled=None), self._kv)
        self.drafter.prefilled(plan, inputs, hidden)
        return hidden[inputs.sampled]
