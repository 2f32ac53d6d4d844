"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464): token by token, and in chunks.

A head's state S [key, value] forgets and is corrected by each token, and is then read by its query:

    S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  output = S^T q

In a chunk the corrections of all tokens are one triangular system (the WY form of Yang et al. 2024,
arXiv:2406.06484), so a prompt is computed by matrix products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

CHUNK = 64
_NORM_EPS = 1e-6


class DeltaInputs(NamedTuple):
    """Of T tokens and H heads, in float32 or float64.

    `query` (scaled) and `key` are [T, H, key], `value` [T, H, value], `log_decay` (g) and `beta` [T, H].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor

    def of(self, first: int, last: int) -> DeltaInputs:
        """The tokens [first, last)."""
        return DeltaInputs(*(tensor[first:last] for tensor in self))


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1, along the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)


def token(inputs: DeltaInputs, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of T sequences: outputs [T, H, value] and new states.

    `states` are [T, H, key, value].
    """
    states = states * inputs.log_decay.exp()[..., None, None]
    known = (states * inputs.key.unsqueeze(-1)).sum(-2)
    correction = (inputs.value - known) * inputs.beta.unsqueeze(-1)
    states = states + inputs.key.unsqueeze(-1) * correction.unsqueeze(-2)
    return (states * inputs.query.unsqueeze(-1)).sum(-2), states


def sequence(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens of one sequence, one by one: the slow twin of `chunks`."""
    outputs = torch.empty_like(inputs.value)
    states = state.unsqueeze(0)
    for i in range(len(outputs)):
        output, states = token(inputs.of(i, i + 1), states)
        outputs[i] = output[0]
    return outputs, states[0]


def chunks(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens of one sequence: outputs [T, H, value] and the new state.

    `state` is [H, key, value].
    """
    outputs = torch.empty_like(inputs.value)
    for first in range(0, len(outputs), CHUNK):
        part = inputs.of(first, first + CHUNK)
        outputs[first : first + CHUNK], state = _chunk(part, state)
    return outputs, state


def _chunk(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = (x.transpose(0, 1) for x in inputs[:3])  # [H, T, ...]
    decay, beta = (x.T for x in inputs[3:])
    since = decay.cumsum(-1)  # log of what is left, after token t, of the state before the chunk
    between = (since.unsqueeze(-1) - since.unsqueeze(-2)).tril_().exp_().tril_()
    known = (key @ key.transpose(-1, -2)).mul_(between).mul_(beta.unsqueeze(-1))
    system = torch.cat([value, key * since.exp().unsqueeze(-1)], -1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(known, system, upper=False, unitriangular=True)
    corrections = solved[..., : value.shape[-1]] - solved[..., value.shape[-1] :] @ state
    seen = (query @ key.transpose(-1, -2)).mul_(between)
    outputs = (query * since.exp().unsqueeze(-1)) @ state + seen @ corrections
    left = (since[:, -1:] - since).exp().unsqueeze(-1)
    state = state * since[:, -1].exp()[:, None, None] + (key * left).transpose(-1, -2) @ corrections
    return outputs.transpose(0, 1), state
