"""Our functions in transformers' attention interface: to trace a model, to run it.

A model calls the interface's function with its own attention module. To run, each such module has our
`BridgedLayer` as an attribute, which knows the layer's number and the step in progress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from sagellm.core.protocols.fusion import Scores
from sagellm.engines.native.attention import attend
from sagellm.engines.native.kv_cache import LayerKind, PagedKV
from sagellm.engines.native.model import StepInputs

PAGED, TRACED = "sagellm_paged", "sagellm_traced"
_LAYER = "sagellm_layer"
_FAR = 1 << 20

UNKNOWN_MASK = -1
"""The window of a mask that is neither causal nor a causal window."""


@dataclass(slots=True)
class CurrentStep:
    """The step that a bridged model computes."""

    inputs: StepInputs | None = None
    kv: PagedKV | None = None
    num_calls: int = 0


@dataclass(slots=True)
class BridgedLayer:
    """One attention layer of a bridged model.

    `scores` are those of its first call.
    """

    index: int
    kind: LayerKind
    current: CurrentStep
    scores: Scores | None = None
    is_known: bool = False

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Attention output [1, T, heads, value_dim] for inputs [1, heads, T, dim].

        Writes keys and values.
        """
        step, kv = self.current.inputs, self.current.kv
        assert step is not None
        assert kv is not None
        self.current.num_calls += 1
        pool = kv.keys[self.index]
        if not self.is_known:
            self.scores, self.is_known = scores_of(query.shape[-1], options), True
        q, k, v = (part[0].transpose(0, 1).to(pool.dtype).contiguous() for part in (query, key, value))
        padding = pool.shape[3] - value.shape[3]
        if padding:
            v = F.pad(v, (0, padding))
        kv.write(self.index, step.slots[self.kind[0]], k, v)
        mixed = attend(step.attention[self.kind], kv, self.index, q, k, v, self.scores)
        return mixed[None, ..., : value.shape[3]].to(query.dtype)


def place(module: nn.Module, layer: BridgedLayer) -> None:
    """Make `layer` the attention of `module`."""
    setattr(module, _LAYER, layer)


def scores_of(head_dim: int, options: dict[str, Any]) -> Scores | None:
    """The scores that a call's options ask for.

    None where they are q k / sqrt(head_dim).
    """
    scale, softcap, sinks = (options.get(name) for name in ("scaling", "softcap", "s_aux"))
    usual = head_dim**-0.5
    if softcap is None and sinks is None and (scale is None or abs(scale / usual - 1) < 1e-12):
        return None
    if sinks is not None:
        sinks = sinks.detach().to(torch.promote_types(sinks.dtype, torch.float32))
    return Scores(usual if scale is None else scale, softcap, sinks)


def _paged(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    layer: BridgedLayer = getattr(module, _LAYER)
    return layer.attend(query, key, value, options), None


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call of the interface's function. `window` is the mask's, or `UNKNOWN_MASK`."""

    module: nn.Module
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    window: int | None
    options: dict[str, Any]


@dataclass(slots=True)
class CallLog:
    """The calls of one forward pass, in order."""

    calls: list[TracedCall] = field(default_factory=list)


_trace = CallLog()


def traced(run: Callable[[], object]) -> list[TracedCall]:
    """The attention calls of `run`, a forward pass with the `TRACED` interface."""
    _trace.calls = []
    run()
    return _trace.calls


def _traced(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    window = options.get("sliding_window") or None
    if attention_mask is not None:
        window = getattr(attention_mask, "window", UNKNOWN_MASK)
    given = {name: option for name, option in options.items() if option is not None}
    _trace.calls.append(
        TracedCall(module, tuple(query.shape), tuple(key.shape), tuple(value.shape), window, given)
    )
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[3]), None


def _traced_mask(
    *, mask_function: Callable[..., torch.Tensor], local_size: int | None = None, **_: Any
) -> torch.Tensor:
    """A tensor without numbers that carries the window of the mask."""

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(*(torch.tensor(i) for i in (0, 0, query, key))))

    window: int | None = UNKNOWN_MASK
    try:
        if sees(_FAR, _FAR) and not sees(_FAR, _FAR + 1):
            if sees(_FAR, 0):
                window = None
            elif local_size and sees(_FAR, _FAR - local_size + 1) and not sees(_FAR, _FAR - local_size):
                window = local_size
    except (RuntimeError, NotImplementedError, IndexError):  # it depends on tokens, which a trace has not
        pass
    mask = torch.empty(1, 1, 1, 1, device="meta")
    mask.window = window  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(PAGED, _paged)
AttentionInterface.register(TRACED, _traced)
AttentionMaskInterface.register(TRACED, _traced_mask)
