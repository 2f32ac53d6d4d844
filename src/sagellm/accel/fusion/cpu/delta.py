"""A step of the gated delta rule in C++, for all rows in decode."""

from __future__ import annotations

import torch

from sagellm.accel.fusion.cpu.calls import DTYPE_CODES, CpuKernel, floats, int32s, int64s, pointers, structure
from sagellm.accel.fusion.delta_kernel import DeltaStep

_DeltaStep = structure(
    "DeltaStep",
    pointers("mixed", "gates", "slots", "tails", "states", "conv", "decay", "step_bias", "norm", "y"),
    int64s("rows", "key_heads", "heads", "key_dim", "value_dim", "width", "num_slots"),
    int64s("mixed_stride", "gates_stride", "tail_stride", "state_stride"),
    floats("eps"),
    int32s("type"),
)


class CpuDeltaStep(CpuKernel, DeltaStep):
    """`DeltaStep` on a CPU. A slot outside the states is a `KernelError`; nothing changes then."""

    c_name = "sagellm_delta_step"

    def _compute(
        self, mixed: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor, tails: torch.Tensor,
        states: torch.Tensor, conv: torch.Tensor, decay: torch.Tensor, step_bias: torch.Tensor,
        norm: torch.Tensor, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        mixed, gates = (x if x.stride(1) == 1 else x.contiguous() for x in (mixed, gates))
        num_slots, heads, key_dim, value_dim = states.shape
        y = mixed.new_empty(len(mixed), heads * value_dim)
        pointed = (mixed, gates, slots, tails, states, conv, decay, step_bias, norm, y)
        job = _DeltaStep(
            *(tensor.data_ptr() for tensor in pointed), len(mixed),
            (tails.shape[2] - heads * value_dim) // (2 * key_dim), heads, key_dim, value_dim, len(conv),
            num_slots, mixed.stride(0), gates.stride(0), tails.stride(0), states.stride(0), eps,
            DTYPE_CODES[mixed.dtype],
        )  # fmt: skip
        self._call(self.name, self._function, job, *pointed)
        return y
