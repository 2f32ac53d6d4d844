"""The inputs of the kernel for recurrent layers: their checks and slow twin."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from sagellm.accel.fusion.checked_kernels import DTYPES, GlueKernel

_UNIT_EPS = 1e-6


class DeltaStep(GlueKernel):
    """One token of each of several sequences, by the gated delta rule.

    Yang et al. 2024, arXiv:2412.06464: all of a layer that lies between its matrices. Inputs, in this order:

    `mixed` [T, channels + heads x value_dim], of each row the queries and keys of all key heads, the values,
    and then the output gates; `gates` [T, 2 heads], the betas, then the step sizes; `slots`, int64 [T], the
    state of each row, no two the same; `tails` [n, width - 1, channels], the last inputs of the convolution;
    `states`, float32 [n, heads, key_dim, value_dim]; `conv` [width, channels]; `decay` and `step_bias`,
    float32 [heads]; `norm` [value_dim]; and `eps`. Tails and states of the slots move on, in place. The
    result is [T, heads x value_dim].
    """

    name = "delta_step"

    def reference(
        self, mixed: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor, tails: torch.Tensor,
        states: torch.Tensor, conv: torch.Tensor, decay: torch.Tensor, step_bias: torch.Tensor,
        norm: torch.Tensor, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        """The slow twin, row by row, in float64."""
        (heads, key_dim, value_dim), channels = states.shape[1:], tails.shape[2]
        keys = (channels - heads * value_dim) // 2
        y = mixed.new_empty(len(mixed), heads, value_dim)
        for row, slot in enumerate(slots.tolist()):
            window = torch.cat([tails[slot], mixed[row : row + 1, :channels]])
            tails[slot] = window[1:]
            convolved = F.silu((window.double() * conv.double()).sum(0))
            query, key = (x.view(-1, key_dim) for x in convolved[: 2 * keys].chunk(2))
            query, key = (x / (x.square().sum(-1, keepdim=True) + _UNIT_EPS).sqrt() for x in (query, key))
            query, key = (x.repeat_interleave(heads // len(x), 0) for x in (query * key_dim**-0.5, key))
            beta, step = gates[row].double().chunk(2)
            left = (-decay.double().exp() * F.softplus(step + step_bias)).exp()
            state = states[slot].double() * left[:, None, None]
            value = convolved[2 * keys :].view(heads, value_dim)
            error = (value - torch.einsum("hkv,hk->hv", state, key)) * beta.sigmoid()[:, None]
            state += key[:, :, None] * error[:, None, :]
            states[slot] = state.to(states.dtype)
            read = torch.einsum("hkv,hk->hv", state, query)
            normed = F.rms_norm(read, (value_dim,), norm.double(), eps)
            y[row] = normed * F.silu(mixed[row, channels:].double()).view(heads, value_dim)
        return y.flatten(1)

    def _obstacle(
        self, mixed: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor, tails: torch.Tensor,
        states: torch.Tensor, conv: torch.Tensor, decay: torch.Tensor, step_bias: torch.Tensor,
        norm: torch.Tensor, eps: float,
    ) -> str:  # fmt: skip
        dtype, wide = mixed.dtype, (states, decay, step_bias)
        if dtype not in DTYPES or any(tensor.dtype is not dtype for tensor in (gates, tails, conv, norm)):
            return f"no kernel for {dtype} with {[str(t.dtype) for t in (gates, tails, conv, norm)]}"
        if any(tensor.dtype is not torch.float32 for tensor in wide):
            return f"states, decay and step_bias are float32, not {[str(t.dtype) for t in wide]}"
        if states.ndim != 4 or tails.ndim != 3 or mixed.ndim != 2 or len(states) != len(tails):
            return f"no states and tails: {list(states.shape)}, {list(tails.shape)}"
        (heads, key_dim, value_dim), (kept, channels) = states.shape[1:], tails.shape[1:]
        keys, odd = divmod(channels - heads * value_dim, 2 * key_dim)
        if keys < 1 or odd or heads % keys:
            return f"{channels} channels for {heads} heads of {key_dim} and {value_dim}"
        rows = len(mixed)
        wanted = {
            "mixed": (mixed, (rows, channels + heads * value_dim)), "gates": (gates, (rows, 2 * heads)),
            "slots": (slots, (rows,)), "conv": (conv, (kept + 1, channels)), "decay": (decay, (heads,)),
            "step_bias": (step_bias, (heads,)), "norm": (norm, (value_dim,)),
        }  # fmt: skip
        for name, (tensor, shape) in wanted.items():
            if tensor.shape != shape:
                return f"{name} is {list(tensor.shape)}, not {list(shape)}"
        if slots.dtype is not torch.int64:
            return f"slots are int64, not {slots.dtype}"
        whole = (slots, conv, decay, step_bias, norm)
        slots_of = ((states, key_dim * value_dim), (tails, channels))
        if any(not tensor.is_contiguous() for tensor in whole) or any(
            tensor.stride(1) != size or tensor.stride(-1) != 1 for tensor, size in slots_of
        ):
            return "the state of a slot and all weights must be contiguous"
        return self._device_obstacle(mixed, gates, slots, tails, states, conv, decay, step_bias, norm)
