"""`DeltaLayer`: a layer by the gated delta rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from sagellm.core.protocols.fusion import FusedKernel
from sagellm.engines.native.recurrent.delta_rule import DeltaInputs, chunks, token, unit
from sagellm.engines.native.recurrent.layer import RecurrentLayer
from sagellm.engines.native.recurrent.states import LayerStates
from sagellm.engines.native.recurrent_spec import DeltaSpec

if TYPE_CHECKING:
    from sagellm.engines.native.layer_parts import Linear


@dataclass(frozen=True, slots=True)
class DeltaLayer(RecurrentLayer):
    """`into` has queries, keys, values and output gates; `gates` betas and steps.

    `decay` is log(-A) and `step_bias` the bias of the steps, each [heads]. `kernel` computes rows in decode;
    without it torch does.
    """

    spec: DeltaSpec
    norm_eps: float
    gates: Linear
    decay: torch.Tensor
    step_bias: torch.Tensor
    norm: torch.Tensor
    kernel: FusedKernel | None = None

    def _projected(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.into(x), self.gates(x)

    def _channels(self, projected: Sequence[torch.Tensor]) -> torch.Tensor:
        return projected[0][:, : self.spec.conv_channels]

    def _decoded(
        self, projected: Sequence[torch.Tensor], rows: torch.Tensor, states: LayerStates
    ) -> torch.Tensor:
        if self.kernel is None:
            return RecurrentLayer._decoded(self, projected, rows, states)
        computed: torch.Tensor = self.kernel.apply(
            *projected, rows, states.conv, states.matrix, self.conv, self.decay, self.step_bias, self.norm,
            self.norm_eps,
        )  # fmt: skip
        return computed

    def _computed(
        self, convolved: torch.Tensor, projected: Sequence[torch.Tensor], states: torch.Tensor, *,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        inputs = self._inputs(convolved, *self._rates(projected[1]))
        outputs, states = (token if is_decode else chunks)(inputs, states)
        return self._gated(outputs, projected[0][:, self.spec.conv_channels :]), states

    def _rates(self, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The log of decay and the beta of each token and head, [T, heads]."""
        beta, step = gates.to(self.decay.dtype).chunk(2, dim=-1)
        return -self.decay.exp() * F.softplus(step + self.step_bias), beta.sigmoid()

    def _gated(self, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """RMSNorm by head, times SiLU of the gate [T, value size]."""
        normed = F.rms_norm(outputs, outputs.shape[-1:], None, self.norm_eps).to(gate.dtype) * self.norm
        gated = normed.to(outputs.dtype) * F.silu(gate.view(normed.shape).to(outputs.dtype))
        return gated.to(gate.dtype).flatten(1)

    def _inputs(self, mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor) -> DeltaInputs:
        """The rule's inputs of T tokens, from the convolution's outputs [T, channels]."""
        spec, wide = self.spec, mixed.to(beta.dtype)
        query, key, value = torch.split(wide, [spec.key_size, spec.key_size, spec.value_size], dim=-1)
        shared = spec.value_heads // spec.key_heads
        query, key = (unit(x.reshape(len(x), -1, spec.key_dim)) for x in (query, key))
        query, key = (x.repeat_interleave(shared, dim=1) for x in (query * spec.key_dim**-0.5, key))
        return DeltaInputs(query, key, value.reshape(len(value), -1, spec.value_dim), log_decay, beta)
