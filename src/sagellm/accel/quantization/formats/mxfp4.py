"""MXFP4: numbers of 4 bits in groups of 32 with one exponent.

OCP Microscaling Formats 1.0, 2023. A byte of `blocks` has two numbers, the low half first: a sign, two bits
of exponent and one of mantissa, so 0, 0.5, 1, 1.5, 2, 3, 4 or 6. A byte of `scales` is the exponent of a
group, plus 127. gpt-oss stores its experts so, all of a layer in one tensor, and nothing else. Twice a number
is whole, so 8-bit codes hold the values exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sagellm.core.errors import UnsupportedModelError
from sagellm.core.protocols.quantization import QuantizedMatrix, StoredTensor

GROUP_SIZE = 32
_ZERO = 128
_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
_CODES = torch.tensor([_ZERO + sign * m for sign in (1, -1) for m in _MAGNITUDES], dtype=torch.uint8)


class MXFP4:
    """Implements `WeightFormat`. Only stacked experts are stored so; `expert` reads one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """No matrix of its own module is quantized."""
        return {}

    def matrix(self, stored: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> QuantizedMatrix:
        raise UnsupportedModelError("MXFP4 is read for stacked experts only")


def stored_parts(count: int, outputs: int, inputs: int) -> dict[str, StoredTensor]:
    """What is stored for `count` experts of this shape, by ending."""
    groups = inputs // GROUP_SIZE
    return {
        "_blocks": StoredTensor((count, outputs, groups, GROUP_SIZE // 2), ("U8",)),
        "_scales": StoredTensor((count, outputs, groups), ("U8",)),
    }


def expert(blocks: torch.Tensor, scales: torch.Tensor) -> QuantizedMatrix:
    """One expert, of `blocks` [outputs, groups, 16] and `scales` [outputs, groups]."""
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1)
    codes = _CODES[halves.flatten(1).long()]
    return QuantizedMatrix(codes, 2.0 ** (scales.float() - 128), 8, GROUP_SIZE)


PLUGIN = MXFP4
