"""`DeltaLayer`: a layer by the gated delta rule, over a flat batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from sagellm.engines.native.recurrent.delta_rule import DeltaInputs, chunks, token, unit
from sagellm.engines.native.recurrent.states import LayerStates, RecurrentRows
from sagellm.engines.native.recurrent_spec import DeltaSpec

if TYPE_CHECKING:
    from sagellm.engines.native.model import Linear


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """Weights of one layer. `into` has queries, keys, values and output gates; `gates` betas and decays.

    `conv` is [width, channels]; `decay` is log(-A) and `step_bias` the bias of the step size, each [heads].
    """

    spec: DeltaSpec
    norm_eps: float
    into: Linear
    gates: Linear
    conv: torch.Tensor
    decay: torch.Tensor
    step_bias: torch.Tensor
    norm: torch.Tensor
    output: Linear

    def __call__(self, x: torch.Tensor, rows: RecurrentRows, states: LayerStates) -> torch.Tensor:
        """The layer's output [T, hidden] for `x` [T, hidden]. Moves the states of all rows on."""
        spec = self.spec
        mixed, gate = torch.split(self.into(x), [spec.conv_channels, spec.value_size], dim=-1)
        beta, step = self.gates(x).to(self.decay.dtype).chunk(2, dim=-1)
        log_decay, beta = -self.decay.exp() * F.softplus(step + self.step_bias), beta.sigmoid()
        outputs = torch.empty(len(x), *spec.state_shape[::2], dtype=states.matrix.dtype, device=x.device)
        count = len(rows.decode)
        if count:
            window = torch.cat([states.conv[rows.decode], mixed[:count].unsqueeze(1)], 1)
            states.conv[rows.decode] = window[:, 1:]
            inputs = self._inputs(self._convolved(window)[:, 0], log_decay[:count], beta[:count])
            outputs[:count], states.matrix[rows.decode] = token(inputs, states.matrix[rows.decode])
        for first, num_tokens, row in rows.prefill:
            last = first + num_tokens
            window = torch.cat([states.conv[row], mixed[first:last]])
            states.conv[row] = window[num_tokens:]
            inputs = self._inputs(self._convolved(window[None])[0], log_decay[first:last], beta[first:last])
            outputs[first:last], states.matrix[row] = chunks(inputs, states.matrix[row])
        normed = F.rms_norm(outputs, outputs.shape[-1:], None, self.norm_eps).to(x.dtype) * self.norm
        gated = normed.to(outputs.dtype) * F.silu(gate.view(normed.shape).to(outputs.dtype))
        return self.output(gated.to(x.dtype).flatten(1))

    def _convolved(self, window: torch.Tensor) -> torch.Tensor:
        """The causal convolution and SiLU of windows [B, width - 1 + T, channels]."""
        num_tokens = window.shape[1] - self.spec.conv_width + 1
        total = window[:, :num_tokens] * self.conv[0]
        for i in range(1, self.spec.conv_width):
            total = total + window[:, i : i + num_tokens] * self.conv[i]
        return F.silu(total)

    def _inputs(self, mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor) -> DeltaInputs:
        """The rule's inputs of T tokens, from the convolution's outputs [T, channels]."""
        spec, wide = self.spec, mixed.to(beta.dtype)
        query, key, value = torch.split(wide, [spec.key_size, spec.key_size, spec.value_size], dim=-1)
        shared = spec.value_heads // spec.key_heads
        query, key = (unit(x.reshape(len(x), -1, spec.key_dim)) for x in (query, key))
        query, key = (x.repeat_interleave(shared, dim=1) for x in (query * spec.key_dim**-0.5, key))
        return DeltaInputs(query, key, value.reshape(len(value), -1, spec.value_dim), log_decay, beta)
