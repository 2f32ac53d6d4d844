"""`MambaLayer`: a layer of Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from sagellm.core.protocols.fusion import FusedKernel
from sagellm.engines.native.recurrent.layer import RecurrentLayer
from sagellm.engines.native.recurrent.state_space import SpaceInputs, chunks, token
from sagellm.engines.native.recurrent.states import LayerStates
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
    kernel: FusedKernel | None = None

    def _projected(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return (self.into(x),)

    def _channels(self, projected: Sequence[torch.Tensor]) -> torch.Tensor:
        return projected[0][:, self.spec.inner_size : self.spec.inner_size + self.spec.conv_channels]

    def _decoded(
        self, projected: Sequence[torch.Tensor], rows: torch.Tensor, states: LayerStates
    ) -> torch.Tensor:
        if self.kernel is None:
            return RecurrentLayer._decoded(self, projected, rows, states)
        gated: torch.Tensor = self.kernel.apply(
            *projected, rows, states.conv, states.matrix, self.conv, self.conv_bias, self.decay,
            self.step_bias, self.skip,
        )  # fmt: skip
        return self._normed(gated, self.conv.dtype)

    def _computed(
        self, convolved: torch.Tensor, projected: Sequence[torch.Tensor], states: torch.Tensor, *,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        spec, wide = self.spec, convolved.to(self.decay.dtype)
        value, write, read = torch.split(wide, [spec.inner_size, *[spec.group_size] * 2], dim=-1)
        value = value.reshape(-1, spec.heads, spec.head_dim)
        write, read = (x.reshape(-1, spec.groups, spec.state_dim) for x in (write, read))
        step = F.softplus(projected[0][:, -spec.heads :].to(wide.dtype) + self.step_bias)
        inputs = SpaceInputs(value, write, read, -self.decay.exp() * step, step)
        outputs, states = (token if is_decode else chunks)(inputs, states)
        outputs = (outputs + value * self.skip.unsqueeze(-1)).flatten(1)
        gated = outputs * F.silu(projected[0][:, : spec.inner_size].to(wide.dtype))
        return self._normed(gated, convolved.dtype), states

    def _normed(self, gated: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """RMSNorm of the outputs [T, heads x head dim], by group."""
        by_group = gated.view(len(gated), self.spec.groups, -1)
        normed = F.rms_norm(by_group, by_group.shape[-1:], None, self.spec.norm_eps).flatten(1)
        return normed.to(dtype) * self.norm
