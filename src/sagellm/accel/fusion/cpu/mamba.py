"""A step of Mamba-2 in C++, for all rows in decode."""

from __future__ import annotations

import torch

from sagellm.accel.fusion.cpu.calls import DTYPE_CODES, CpuKernel, int32s, int64s, pointers, structure
from sagellm.accel.fusion.mamba_kernel import MambaStep

_MambaStep = structure(
    "MambaStep",
    pointers("projected", "slots", "tails", "states", "conv", "conv_bias", "decay", "step_bias", "skip"),
    pointers("convolved", "y"),
    int64s("rows", "groups", "heads", "state_dim", "head_dim", "width", "num_slots"),
    int64s("projected_stride", "tail_stride", "state_stride"),
    int32s("type"),
)


class CpuMambaStep(CpuKernel, MambaStep):
    """`MambaStep` on a CPU. A slot outside the states is a `KernelError`; nothing changes then."""

    c_name = "sagellm_mamba_step"

    def _compute(
        self, projected: torch.Tensor, slots: torch.Tensor, tails: torch.Tensor, states: torch.Tensor,
        conv: torch.Tensor, conv_bias: torch.Tensor | None, decay: torch.Tensor, step_bias: torch.Tensor,
        skip: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        projected = projected if projected.stride(1) == 1 else projected.contiguous()
        num_slots, heads, state_dim, head_dim = states.shape
        rows, channels, inner = len(projected), tails.shape[2], heads * head_dim
        convolved, y = states.new_empty(rows, channels), states.new_empty(rows, inner)
        pointed = (projected, slots, tails, states, conv, conv_bias, decay, step_bias, skip, convolved, y)
        job = _MambaStep(
            *(None if tensor is None else tensor.data_ptr() for tensor in pointed), rows,
            (channels - inner) // (2 * state_dim), heads, state_dim, head_dim, len(conv), num_slots,
            projected.stride(0), tails.stride(0), states.stride(0), DTYPE_CODES[projected.dtype],
        )  # fmt: skip
        self._call(self.name, self._function, job, *pointed)
        return y
