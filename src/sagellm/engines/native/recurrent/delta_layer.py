"""`DeltaLayer`: a layer by the gated delta rule, over a flat batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from sagellm.core.protocols.fusion import FusedKernel
from sagellm.engines.native.recurrent.delta_rule import DeltaInputs, chunks, token, unit
from sagellm.engines.native.recurrent.states import LayerStates, RecurrentRows
from sagellm.engines.native.recurrent_spec import DeltaSpec

if TYPE_CHECKING:
    from sagellm.engines.native.model import Linear


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """Weights of one layer. `into` has queries, keys, values and output gates; `gates` betas and decays.

    `conv` is [width, channels]; `decay` is log(-A) and `step_bias` the bias of the step size, each [heads].
    `kernel` computes rows in decode; without it torch does.
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
    kernel: FusedKernel | None = None

    def __call__(self, x: torch.Tensor, rows: RecurrentRows, states: LayerStates) -> torch.Tensor:
        """The layer's output [T, hidden] for `x` [T, hidden]. Moves the states of all rows on."""
        mixed, gates, count = self.into(x), self.gates(x), len(rows.decode)
        parts: list[torch.Tensor] = []
        for row in rows.kept:
            states.keep(rows, row, 0)
        if count:
            decode = self._decoded if self.kernel is None else self._decoded_by_kernel
            parts.append(decode(mixed[:count], gates[:count], rows.decode, states))
        if rows.prefill:
            parts.append(self._prefilled(mixed, gates, rows, states))
        return self.output(torch.cat(parts) if len(parts) > 1 else parts[0])

    def _decoded_by_kernel(
        self, mixed: torch.Tensor, gates: torch.Tensor, rows: torch.Tensor, states: LayerStates
    ) -> torch.Tensor:
        assert self.kernel is not None
        computed: torch.Tensor = self.kernel.apply(
            mixed, gates, rows, states.conv, states.matrix, self.conv, self.decay, self.step_bias, self.norm,
            self.norm_eps,
        )  # fmt: skip
        return computed

    def _decoded(
        self, mixed: torch.Tensor, gates: torch.Tensor, rows: torch.Tensor, states: LayerStates
    ) -> torch.Tensor:
        """One token of each of `rows`: the output's input [len(rows), value size]."""
        mixed, gate = self._split(mixed)
        window = torch.cat([states.conv[rows], mixed.unsqueeze(1)], 1)
        states.conv[rows] = window[:, 1:]
        inputs = self._inputs(self._convolved(window)[:, 0], *self._rates(gates))
        outputs, states.matrix[rows] = token(inputs, states.matrix[rows])
        return self._gated(outputs, gate)

    def _prefilled(
        self, mixed: torch.Tensor, gates: torch.Tensor, rows: RecurrentRows, states: LayerStates
    ) -> torch.Tensor:
        """The tokens of all prefill spans: the output's input [tokens, value size]."""
        mixed, gate = self._split(mixed)
        log_decay, beta = self._rates(gates)
        parts: list[torch.Tensor] = []
        for start, num_tokens, row in rows.prefill:
            first = start
            for after in rows.cuts(row, num_tokens):
                last = start + after
                window = torch.cat([states.conv[row], mixed[first:last]])
                states.conv[row] = window[last - first :]
                convolved = self._convolved(window[None])[0]
                inputs = self._inputs(convolved, log_decay[first:last], beta[first:last])
                outputs, states.matrix[row] = chunks(inputs, states.matrix[row])
                parts.append(self._gated(outputs, gate[first:last]))
                states.keep(rows, row, after)
                first = last
        return torch.cat(parts)

    def _split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The channels of the convolution, and the output gates."""
        channels, gate = torch.split(mixed, [self.spec.conv_channels, self.spec.value_size], dim=-1)
        return channels, gate

    def _rates(self, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The log of decay and the beta of each token and head, [T, heads]."""
        beta, step = gates.to(self.decay.dtype).chunk(2, dim=-1)
        return -self.decay.exp() * F.softplus(step + self.step_bias), beta.sigmoid()

    def _gated(self, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """RMSNorm by head, times SiLU of the gate [T, value size]."""
        normed = F.rms_norm(outputs, outputs.shape[-1:], None, self.norm_eps).to(gate.dtype) * self.norm
        gated = normed.to(outputs.dtype) * F.silu(gate.view(normed.shape).to(outputs.dtype))
        return gated.to(gate.dtype).flatten(1)

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
