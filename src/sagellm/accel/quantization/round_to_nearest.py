"""Weights rounded to the nearest code, by groups of 32 inputs.

The scale of a group leaves the least squared error. The group's largest value goes to the end of the range
that has one code more (as in llama.cpp's `q4_0`), and several places there are tried: with four bits from 5.5
to 9.25, since the error is often less when that one value is cut off or the range is not used up; with eight
from 120.5 to 128, since of sixteen nearly equal scales one fits the other 31 values best. Relative error of
normal weights: 8 bits 0.0048, 4 bits 0.0814; `q8_0` has 0.0054 and `q4_0` 0.0861.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from sagellm.core.blocks import cdiv
from sagellm.core.errors import ModelError
from sagellm.core.protocols.quantization import QuantizedMatrix

GROUP_SIZE = 32
HEAD = "head.weight"
_HEAD_BITS = 8
_PLACES = {8: tuple(128 - i / 2 for i in range(16)), 4: tuple(i / 4 for i in range(22, 38))}
_CHUNK = 1 << 18


class RoundToNearest:
    """Implements `WeightQuantizer`: symmetric, with float16 scales. The head has at least 8 bits, because no
    later layer balances its rounding.
    """

    def __init__(self, bits: int) -> None:
        if bits not in _PLACES:
            raise ValueError(f"{bits} bits: use {' or '.join(map(str, _PLACES))}")
        self.name = f"int{bits}"
        self._bits = bits

    def quantized(self, name: str, weight: torch.Tensor) -> QuantizedMatrix:
        bits = max(self._bits, _HEAD_BITS) if name == HEAD else self._bits
        outputs, inputs = weight.shape
        codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
        groups = cdiv(inputs, GROUP_SIZE)
        scales = torch.empty(outputs, groups, dtype=torch.float16, device=weight.device)
        rows = max(1, _CHUNK // max(1, inputs))
        for first in range(0, outputs, rows):
            part = slice(first, first + rows)
            values = F.pad(weight[part].float(), (0, -inputs % GROUP_SIZE)).view(-1, groups, GROUP_SIZE)
            if not values.isfinite().all():
                raise ModelError(f"{name} holds values that are not finite: it cannot be quantized")
            scale = _scales(values, bits, _PLACES[bits])
            if not scale.isfinite().all():
                raise ModelError(f"{name} is too large for scales in float16: leave it as it is")
            codes[part] = (
                (_rounded(values, scale, bits) + (1 << bits - 1)).flatten(1)[:, :inputs].to(torch.uint8)
            )
            scales[part] = scale[..., 0]
        return QuantizedMatrix(codes, scales, bits, GROUP_SIZE, activation_bits=8 if bits == 4 else 16)


def _scales(values: torch.Tensor, bits: int, places: Sequence[float]) -> torch.Tensor:
    """The best scales [..., 1], float16, for groups [..., 32]. Candidates put the largest value at minus one
    of `places`.
    """
    largest = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    best = (largest / -places[0]).half()
    least = _squared_error(values, best, bits)
    for place in places[1:]:
        scale = (largest / -place).half()
        error = _squared_error(values, scale, bits)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def _squared_error(values: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    return _rounded(values, scale, bits).mul_(scale).sub_(values).square_().sum(-1, keepdim=True)


def _rounded(values: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers as float32; 0 where the scale is 0."""
    wide, half = scale.float(), 1 << bits - 1
    inverse = torch.where(wide == 0.0, 0.0, 1.0 / wide)
    return (values * inverse).round_().clamp_(-half, half - 1)
