"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): token by token, and in chunks.

A head's state S [state, value] forgets, takes in a token, and is read by it:

    S = exp(g) S + s B x^T;  output = S^T C

In a chunk the tokens that are taken in and read are one masked matrix product per head, so a prompt is
computed by matrix products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

CHUNK = 64


class SpaceInputs(NamedTuple):
    """Of T tokens, H heads, and G groups of heads, in float32 or float64.

    `value` (x) is [T, H, value], `write` (B) and `read` (C) are [T, G, state], `log_decay` (g) and `step` (s)
    are [T, H].
    """

    value: torch.Tensor
    write: torch.Tensor
    read: torch.Tensor
    log_decay: torch.Tensor
    step: torch.Tensor

    def of(self, first: int, last: int) -> SpaceInputs:
        """The tokens [first, last)."""
        return SpaceInputs(*(tensor[first:last] for tensor in self))


def token(inputs: SpaceInputs, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of T sequences: outputs [T, H, value] and new states.

    `states` are [T, H, state, value].
    """
    count, groups, state_dim = inputs.write.shape
    states = states * inputs.log_decay.exp()[..., None, None]
    by_group = states.view(count, groups, -1, state_dim, states.shape[-1])
    taken = (inputs.value * inputs.step.unsqueeze(-1)).view(count, groups, -1, 1, states.shape[-1])
    by_group.addcmul_(taken, inputs.write[:, :, None, :, None])
    outputs = inputs.read[:, :, None, None] @ by_group
    return outputs.view(inputs.value.shape), states


def sequence(inputs: SpaceInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens of one sequence, one by one: the slow twin of `chunks`."""
    outputs = torch.empty_like(inputs.value)
    states = state.unsqueeze(0)
    for i in range(len(outputs)):
        output, states = token(inputs.of(i, i + 1), states)
        outputs[i] = output[0]
    return outputs, states[0]


def chunks(inputs: SpaceInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens of one sequence: outputs [T, H, value] and the new state.

    `state` is [H, state, value].
    """
    outputs = torch.empty_like(inputs.value)
    for first in range(0, len(outputs), CHUNK):
        part = inputs.of(first, first + CHUNK)
        outputs[first : first + CHUNK], state = _chunk(part, state)
    return outputs, state


def _chunk(inputs: SpaceInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, groups, state_dim = inputs.write.shape
    write, read = (x.transpose(0, 1).unsqueeze(1) for x in (inputs.write, inputs.read))  # [G, 1, T, state]
    since = inputs.log_decay.T.reshape(groups, -1, tokens).cumsum(-1)  # log of what a token leaves of `state`
    between = (since.unsqueeze(-1) - since.unsqueeze(-2)).tril_().exp_().tril_()
    taken = (inputs.value * inputs.step.unsqueeze(-1)).transpose(0, 1)
    taken = taken.reshape(groups, -1, tokens, taken.shape[-1])  # [G, H / G, T, value]
    before = state.view(groups, -1, state_dim, state.shape[-1])
    outputs = (read * since.exp().unsqueeze(-1)) @ before + (read @ write.transpose(-1, -2) * between) @ taken
    left = taken * (since[..., -1:] - since).exp().unsqueeze(-1)
    after = before * since[..., -1].exp()[..., None, None] + write.transpose(-1, -2) @ left
    return outputs.flatten(0, 1).transpose(0, 1), after.view(state.shape)
