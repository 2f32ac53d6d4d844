"""AWQ checkpoints (Lin et al. 2023, arXiv:2306.00978) in AutoAWQ's `gemm` version.

`qweight` int32 [inputs, outputs / 8] and `qzeros` int32 [groups, outputs / 8] are packed along the outputs;
`scales` are [groups, outputs]. The eight fields of a word, lowest first, are outputs 0, 2, 4, 6, 1, 3, 5, 7
of eight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sagellm.accel.quantization.formats._packing import (
    REAL,
    WORDS,
    group_size_of,
    num_groups,
    ordered,
    unpacked,
)
from sagellm.core.blocks import cdiv
from sagellm.core.errors import UnsupportedModelError
from sagellm.core.protocols.quantization import QuantizedMatrix, StoredTensor

_BITS, _PLACES = 4, (0, 2, 4, 6, 1, 3, 5, 7)


class AWQ:
    """Implements `WeightFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits = config.get("bits", config.get("w_bit"))
        version = str(config.get("version", "gemm")).lower()
        if bits != _BITS or version != "gemm":
            raise UnsupportedModelError(
                f"AWQ with {bits} bits, version {version!r}, cannot be read: use one with 4 bits, version "
                "gemm"
            )
        self._has_zeros = bool(config.get("zero_point", True))
        self._group_size = group_size_of(config.get("group_size", config.get("q_group_size", 128)))

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        groups, words = num_groups(inputs, self._group_size), cdiv(outputs, len(_PLACES))
        return {
            "qweight": StoredTensor((inputs, words), WORDS),
            "qzeros": StoredTensor((groups, words), WORDS, optional=not self._has_zeros),
            "scales": StoredTensor((groups, outputs), REAL),
        }

    def matrix(self, stored: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> QuantizedMatrix:
        codes = unpacked(stored["qweight"], _BITS, places=_PLACES)[:, :outputs].t()
        zeros = None
        if "qzeros" in stored:
            zeros = unpacked(stored["qzeros"], _BITS, places=_PLACES)[:, :outputs].t().contiguous()
        scales = stored["scales"].t().contiguous()
        return ordered(codes, scales, zeros, _BITS, self._group_size)


PLUGIN = AWQ
