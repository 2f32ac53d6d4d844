"""GPTQ checkpoints (Frantar et al. 2022, arXiv:2210.17323) of AutoGPTQ and GPTQModel.

`qweight` int32 [inputs x bits / 32, outputs] is packed along the inputs; `qzeros` int32 [groups, outputs x
bits / 32] along the outputs; `scales` are [groups, outputs]; `g_idx` int32 [inputs] is the group of each
input, in no order after `desc_act`. In version 1 of the format a zero is stored less one, in as many bits: 0
is stored as all ones. `checkpoint_format: gptq_v2` stores it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sagellm.accel.quantization.formats._packing import (
    INDEX,
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

_FORMATS = {"gptq": 1, "gptq_v2": 0}
_BITS = (4, 8)


class GPTQ:
    """Implements `WeightFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits, form = config.get("bits"), config.get("checkpoint_format") or "gptq"
        if bits not in _BITS or form not in _FORMATS:
            raise UnsupportedModelError(
                f"GPTQ with {bits} bits, checkpoint_format {form!r}, cannot be read: use a checkpoint with 4 "
                f"or 8 bits in {' or '.join(_FORMATS)}"
            )
        if any(
            not pattern.startswith("-:") for pattern in config.get("dynamic") or ()
        ):  # "-:" leaves one out
            raise UnsupportedModelError(
                "GPTQ with bits that differ by module (dynamic) cannot be read: use one without"
            )
        self._bits, self._group_size = int(bits), group_size_of(config.get("group_size", 128))
        self._is_reordered = bool(config.get("desc_act", False))
        self._stored_less = _FORMATS[form]

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        groups, per_word = num_groups(inputs, self._group_size), 32 // self._bits
        return {
            "qweight": StoredTensor((cdiv(inputs, per_word), outputs), WORDS),
            "qzeros": StoredTensor((groups, cdiv(outputs, per_word)), WORDS),
            "scales": StoredTensor((groups, outputs), REAL),
            "g_idx": StoredTensor((inputs,), INDEX, optional=not self._is_reordered),
        }

    def matrix(self, stored: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> QuantizedMatrix:
        codes = unpacked(stored["qweight"].t().contiguous(), self._bits)[:, :inputs]
        zeros = unpacked(stored["qzeros"], self._bits)[:, :outputs] + self._stored_less
        zeros &= (1 << self._bits) - 1
        scales = stored["scales"].t().contiguous()
        return ordered(
            codes, scales, zeros.t().contiguous(), self._bits, self._group_size, stored.get("g_idx")
        )


PLUGIN = GPTQ
