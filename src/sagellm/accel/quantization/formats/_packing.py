"""Codes side by side in 32-bit words, the first in the lowest bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sagellm.core.blocks import cdiv
from sagellm.core.errors import UnsupportedModelError
from sagellm.core.protocols.quantization import QuantizedMatrix

WORDS, BYTES, INDEX, REAL = ("I32",), ("I8",), ("I32", "I64"), ("F16", "BF16", "F32")
"""Dtypes of stored tensors."""


def group_size_of(value: object) -> int | None:
    """How many inputs share a scale; None: all. Raises `UnsupportedModelError` for an invalid size."""
    if value is None or value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(
            f"quantization_config: group_size {value!r} is none: use -1 or a positive number"
        )
    return value


def num_groups(inputs: int, group_size: int | None) -> int:
    return cdiv(inputs, group_size or inputs)


def unpacked(words: torch.Tensor, bits: int, *, places: Sequence[int] | None = None) -> torch.Tensor:
    """The codes of int32 `words` [rows, n], uint8 [rows, n x 32 / bits]. Field i of each word becomes code
    `places[i]` of the word (default: i).
    """
    per_word, mask = 32 // bits, (1 << bits) - 1
    codes = torch.empty(*words.shape, per_word, dtype=torch.uint8, device=words.device)
    for i in range(per_word):
        codes[..., places[i] if places else i] = (words >> (bits * i)) & mask
    return codes.flatten(1)


def ordered(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, group_size: int | None,
    group_of: torch.Tensor | None = None, *, activation_bits: int | None = None,
) -> QuantizedMatrix:  # fmt: skip
    """The matrix of codes [outputs, inputs] that are still in input order. Input k is in group `group_of[k]`
    (int [inputs]), or k / group_size without it, or if all are -1, by which the library that writes them
    means that. Activations have 16 bits by default; beside 4-bit codes 8, whose rounding is lost in that of
    the codes. Raises `UnsupportedModelError` where a group but the last has more or fewer inputs.
    """
    inputs = codes.shape[1]
    group_size, order = group_size or inputs, None
    if group_of is not None and not bool((group_of == -1).all()):
        expected = torch.arange(inputs, device=group_of.device) // group_size
        order = None if torch.equal(group_of.long(), expected) else group_of.long().argsort(stable=True)
        if order is not None and not torch.equal(group_of.long()[order], expected):
            raise UnsupportedModelError(f"g_idx does not deal {inputs} inputs into groups of {group_size}")
    codes = codes if order is None else codes[:, order]
    if not scales.isfinite().all():
        raise UnsupportedModelError("scales that are not finite")
    activation_bits = activation_bits or (8 if bits == 4 else 16)
    return QuantizedMatrix(
        codes.contiguous(), scales.clone(), bits, group_size, zeros, order, activation_bits
    )
