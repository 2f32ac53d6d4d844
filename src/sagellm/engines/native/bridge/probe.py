"""The check of a loaded bridged model: a prompt whole, and token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sagellm.core.blocks import cdiv
from sagellm.core.plan import ExecutionPlan, Join, Prefill
from sagellm.core.types import KVGroup, SamplingParams, Tokens
from sagellm.engines.native.attention import AttentionPlanner
from sagellm.engines.native.bridge.description import refusal
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.rows import BatchRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sagellm.engines.native.bridge.model import BridgedModel

_PROMPT, _OTHER, _BLOCK_SIZE = 7, 12, 4
_RELATIVE = {torch.float64: 1e-6, torch.float32: 1e-3}
_RELATIVE_OF_HALF = 0.25


def check_steps(
    model: BridgedModel, groups: Sequence[KVGroup], device: torch.device, dtype: torch.dtype
) -> None:
    """Raise `UnsupportedModelError` unless both ways give the same logits and each layer attends once.

    It finds what a trace cannot: a state that layers keep, or tokens of a batch that see one another.
    """
    spec, num_groups = model.spec, max(1, len(groups))
    blocks = cdiv(_PROMPT, _BLOCK_SIZE) + cdiv(_OTHER, _BLOCK_SIZE)
    kv = PagedKV(
        spec.num_layers, blocks * num_groups, _BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, device, dtype,
        groups=groups,
    )  # fmt: skip
    rows = BatchRows(2, _OTHER, kv.num_blocks, _BLOCK_SIZE, spec.vocab_size, 0, num_groups)
    planner = AttentionPlanner(kv, plain_scores=spec.scores is None or spec.scores.is_scaled_only)

    def logits(plan: ExecutionPlan) -> torch.Tensor:
        rows.apply(plan, device)
        step = rows.inputs(plan, planner, model.kinds, device)
        try:
            found = model.forward(step, kv)
        except (AttributeError, TypeError, ValueError, LookupError, AssertionError) as error:
            raise refusal(spec.architecture, f"its first step fails: {error!r}") from error
        if model.num_calls != spec.num_layers:
            calls = f"{model.num_calls} calls of the attention interface for {spec.num_layers} layers"
            raise refusal(spec.architecture, calls)
        return found

    first = _join(0, _PROMPT, 0, num_groups, spec.vocab_size)
    second = _join(1, _OTHER, cdiv(_PROMPT, _BLOCK_SIZE) * num_groups, num_groups, spec.vocab_size)
    whole = logits(ExecutionPlan(0, joined=(first,), prefills=(_part(0, 0, _PROMPT),)))
    rows.apply(ExecutionPlan(1, joined=(first, second), left=(0,)), device)
    for i in range(_PROMPT):
        by_token = logits(ExecutionPlan(i + 2, prefills=(_part(1, i, 1), _part(0, i, 1))))
    difference = ((whole[0] - by_token[-1]).norm() / whole[0].norm()).item()
    if not difference <= _RELATIVE.get(dtype, _RELATIVE_OF_HALF):
        reason = f"a prompt computed token by token beside another differs by {difference:.1%} of its logits"
        raise refusal(spec.architecture, reason)


def _join(row: int, num_tokens: int, first_block: int, num_groups: int, vocab_size: int) -> Join:
    tokens = Tokens((31 * i + 17 * row + 7) % vocab_size for i in range(num_tokens))
    blocks = range(first_block, first_block + cdiv(num_tokens, _BLOCK_SIZE) * num_groups)
    params = SamplingParams(max_tokens=1)
    return Join(row, str(row), tokens.tobytes(), num_tokens, 0, tuple(blocks), params, frozenset())


def _part(row: int, start: int, num_tokens: int) -> Prefill:
    return Prefill(row, str(row), start, num_tokens, samples=True)
