"""The inputs of the kernel for layers of Mamba-2: their checks and slow twin."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from sagellm.accel.fusion.checked_kernels import DTYPES, GlueKernel


class MambaStep(GlueKernel):
    """One token of each of several sequences, by Mamba-2.

    Dao and Gu 2024, arXiv:2405.21060: of a layer what lies between the input projection and the norm. Inputs,
    in this order:

    `projected` [T, inner + channels + heads], of each row the output gates, the channels of the convolution,
    and the step sizes: inner = heads x head_dim, and the channels are inner values, groups x state_dim
    numbers to write and as many to read; `slots`, int64 [T], the state of each row, no two the same; `tails`
    [n, width - 1, channels], the last inputs of the convolution; `states`, float32 [n, heads, state_dim,
    head_dim]; `conv` [width, channels] and its bias [channels] or None; `decay`, `step_bias` and `skip`,
    float32 [heads]. Tails and states of the slots move on, in place. The result is float32 [T, inner].
    """

    name = "mamba_step"

    def reference(
        self, projected: torch.Tensor, slots: torch.Tensor, tails: torch.Tensor, states: torch.Tensor,
        conv: torch.Tensor, conv_bias: torch.Tensor | None, decay: torch.Tensor, step_bias: torch.Tensor,
        skip: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """The slow twin, row by row, in float64."""
        (heads, state_dim, head_dim), channels = states.shape[1:], tails.shape[2]
        inner = heads * head_dim
        y = states.new_empty(len(projected), heads, head_dim)
        for row, slot in enumerate(slots.tolist()):
            gate, mixed, step = projected[row].split([inner, channels, heads])  # type: ignore[no-untyped-call]
            window = torch.cat([tails[slot], mixed[None]])
            tails[slot] = window[1:]
            total = (window.double() * conv.double()).sum(0)
            convolved = F.silu(total if conv_bias is None else total + conv_bias)
            value = convolved[:inner].view(heads, head_dim)
            write, read = convolved[inner:].view(2, -1, state_dim)
            write, read = (x.repeat_interleave(heads // len(x), 0) for x in (write, read))
            size = F.softplus(step.double() + step_bias)
            left = (-decay.double().exp() * size).exp()
            state = states[slot].double() * left[:, None, None]
            state += write[:, :, None] * (value * size[:, None])[:, None, :]
            states[slot] = state.to(states.dtype)
            seen = torch.einsum("hnp,hn->hp", state, read) + value * skip[:, None]
            y[row] = seen * F.silu(gate.double()).view(heads, head_dim)
        return y.flatten(1)

    def _obstacle(
        self, projected: torch.Tensor, slots: torch.Tensor, tails: torch.Tensor, states: torch.Tensor,
        conv: torch.Tensor, conv_bias: torch.Tensor | None, decay: torch.Tensor, step_bias: torch.Tensor,
        skip: torch.Tensor,
    ) -> str:  # fmt: skip
        narrow, wide = (
            [tails, conv, *([] if conv_bias is None else [conv_bias])],
            (states, decay, step_bias, skip),
        )
        if projected.dtype not in DTYPES or any(tensor.dtype is not projected.dtype for tensor in narrow):
            return f"no kernel for {projected.dtype} with {[str(tensor.dtype) for tensor in narrow]}"
        if any(tensor.dtype is not torch.float32 for tensor in wide):
            return f"states, decay, step_bias and skip are float32, not {[str(t.dtype) for t in wide]}"
        if states.ndim != 4 or tails.ndim != 3 or projected.ndim != 2 or len(states) != len(tails):
            return f"no states and tails: {list(states.shape)}, {list(tails.shape)}"
        (heads, state_dim, head_dim), (kept, channels) = states.shape[1:], tails.shape[1:]
        inner = heads * head_dim
        groups, odd = divmod(channels - inner, 2 * state_dim)
        if groups < 1 or odd or heads % groups:
            return f"{channels} channels for {heads} heads of {head_dim} and states of {state_dim}"
        wanted = {
            "projected": (projected, (len(projected), inner + channels + heads)),
            "slots": (slots, (len(projected),)), "conv": (conv, (kept + 1, channels)),
            "decay": (decay, (heads,)), "step_bias": (step_bias, (heads,)), "skip": (skip, (heads,)),
        }  # fmt: skip
        if conv_bias is not None:
            wanted["conv_bias"] = (conv_bias, (channels,))
        for name, (tensor, shape) in wanted.items():
            if tensor.shape != shape:
                return f"{name} is {list(tensor.shape)}, not {list(shape)}"
        if slots.dtype is not torch.int64:
            return f"slots are int64, not {slots.dtype}"
        whole = [tensor for name, (tensor, _) in wanted.items() if name != "projected"]
        slots_of = ((states, state_dim * head_dim), (tails, channels))
        if any(not tensor.is_contiguous() for tensor in whole) or any(
            tensor.stride(1) != size or tensor.stride(-1) != 1 for tensor, size in slots_of
        ):
            return "the state of a slot and all weights must be contiguous"
        return self._device_obstacle(projected, tails, states, *whole)
