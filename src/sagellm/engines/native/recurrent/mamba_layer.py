"""`MambaLayer`: a layer of Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from sagellm.engines.native.recurrent.layer import RecurrentLayer
from sagellm.engines.native.recurrent.state_space import SpaceInputs, chunks, token
from sagellm.engines.native.recurrent_spec import MambaSpec


@dataclass(frozen=True, slots=True)
class MambaLayer(RecurrentLayer):
    """`into` has output gates, the channels of the convolution, and steps.

    Those are values, B and C. `decay` is log(-A), `step_bias` the bias of the steps and `skip` what of a
    value is added to the output (D), each [heads]; `norm` is [heads x head dim].
    """

    spec: MambaSpec
    decay: torch.Tensor
    step_bias: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor

    def _projected(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        spec = self.spec
        return torch.split(self.into(x), [spec.inner_size, spec.conv_channels, spec.heads], dim=-1)

    def _channels(self, projected: Sequence[torch.Tensor]) -> torch.Tensor:
        return projected[1]

    def _computed(
        self, convolved: torch.Tensor, projected: Sequence[torch.Tensor], states: torch.Tensor, *,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        spec, wide = self.spec, convolved.to(self.decay.dtype)
        value, write, read = torch.split(wide, [spec.inner_size, *[spec.group_size] * 2], dim=-1)
        value = value.reshape(-1, spec.heads, spec.head_dim)
        write, read = (x.reshape(-1, spec.groups, spec.state_dim) for x in (write, read))
        step = F.softplus(projected[2].to(wide.dtype) + self.step_bias)
        inputs = SpaceInputs(value, write, read, -self.decay.exp() * step, step)
        outputs, states = (token if is_decode else chunks)(inputs, states)
        return self._gated(outputs + value * self.skip.unsqueeze(-1), projected[0]), states

    def _gated(self, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Times SiLU of the gate [T, heads x head dim], and RMSNorm by group."""
        gated = (outputs.flatten(1) * F.silu(gate.to(outputs.dtype))).view(len(gate), self.spec.groups, -1)
        normed = F.rms_norm(gated, gated.shape[-1:], None, self.spec.norm_eps).flatten(1)
        return normed.to(gate.dtype) * self.norm
