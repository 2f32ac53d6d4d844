"""Checkpoints of the compressed-tensors library: integer weights of 4 or 8 bits.

llm-compressor writes them. `pack-quantized`: `weight_packed` int32 [outputs, inputs x bits / 32], packed
along the inputs, each code plus 2^(bits - 1); `weight_scale` [outputs, groups]; where asymmetric
`weight_zero_point` int32 [outputs x bits / 32, groups], packed along the outputs in the same way;
`weight_g_idx` where `actorder` is group; `weight_shape`. `int-quantized`: `weight` int8 [outputs, inputs],
`weight_scale` and optionally `weight_zero_point` int8 as above.

The kernel quantizes activations by groups, which is finer than the per-token form of these checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sagellm.accel.quantization.formats._packing import (
    BYTES,
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

_PACKED, _PLAIN = "pack-quantized", "int-quantized"
_READABLE = "use a checkpoint of pack-quantized int4 or int8 weights, or of int-quantized int8 weights"


class CompressedTensors:
    """Implements `WeightFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        weights = [_only(group, config) for group in (config.get("config_groups") or {}).values()]
        if not weights or any(settings != weights[0] for settings in weights):
            raise UnsupportedModelError(
                f"compressed-tensors with {len(weights)} different groups: {_READABLE}"
            )
        sparse = (config.get("sparsity_config") or {}).get("format", "dense")
        if config.get("transform_config") or sparse != "dense":  # they change the product
            raise UnsupportedModelError(
                "compressed-tensors with a transform_config or a sparsity_config that is not dense cannot be "
                f"computed: {_READABLE}, without them"
            )
        self._form, self._bits, self._symmetric, self._group_size, self._activation_bits, order = weights[0]
        self._is_reordered = order in ("group", "dynamic")

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        groups, per_word = num_groups(inputs, self._group_size), 32 // self._bits
        scale = {"weight_scale": StoredTensor((outputs, groups), REAL)}
        if self._form == _PLAIN:
            zero = StoredTensor((outputs, groups), BYTES, optional=self._symmetric)
            weight = StoredTensor((outputs, inputs), BYTES)
            return {"weight": weight, "weight_zero_point": zero, **scale}
        zero = StoredTensor((cdiv(outputs, per_word), groups), WORDS, optional=self._symmetric)
        return {
            "weight_packed": StoredTensor((outputs, cdiv(inputs, per_word)), WORDS),
            "weight_zero_point": zero,
            "weight_g_idx": StoredTensor((inputs,), INDEX, optional=not self._is_reordered),
            "weight_shape": StoredTensor((2,), INDEX, optional=True, values=(outputs, inputs)),
            **scale,
        }

    def matrix(self, stored: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> QuantizedMatrix:
        stored_zeros, zeros = stored.get("weight_zero_point"), None
        if self._form == _PLAIN:
            codes = _shifted(stored["weight"])
            if stored_zeros is not None:
                zeros = _shifted(stored_zeros)
        else:
            codes = unpacked(stored["weight_packed"], self._bits)[:, :inputs]
            if stored_zeros is not None:
                zeros = unpacked(stored_zeros.t().contiguous(), self._bits)[:, :outputs].t().contiguous()
        scales = stored["weight_scale"]
        return ordered(
            codes, scales, zeros, self._bits, self._group_size, stored.get("weight_g_idx"),
            activation_bits=self._activation_bits,
        )  # fmt: skip


def _only(
    group: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[str, int, bool, int | None, int | None, object]:
    """The settings of one config group. Form, bits, whether symmetric, group size (None: a channel), bits of
    activations if given, and `actorder`.
    """
    weights = group.get("weights") or {}
    form, bits = group.get("format") or config.get("format"), weights.get("num_bits")
    strategy, inputs = weights.get("strategy"), group.get("input_activations") or {}
    readable = (form, bits) in ((_PACKED, 4), (_PACKED, 8), (_PLAIN, 8)) and weights.get("type") == "int"
    if not readable or strategy not in ("channel", "group"):
        raise UnsupportedModelError(
            f"compressed-tensors {form!r} with {weights.get('type')}{bits} weights by {strategy}: "
            f"{_READABLE}, by channel or group"
        )
    dynamic_int8 = {"num_bits": 8, "type": "int", "dynamic": True}
    if inputs and {key: inputs.get(key) for key in dynamic_int8} != dynamic_int8:
        raise UnsupportedModelError(
            "compressed-tensors with activations that are not dynamic int8 cannot be computed: " + _READABLE
        )
    if group.get("output_activations"):
        raise UnsupportedModelError(
            f"compressed-tensors with output_activations cannot be computed: {_READABLE}"
        )
    group_size = group_size_of(weights["group_size"]) if strategy == "group" else None
    return (
        str(form),
        4 if bits == 4 else 8,
        bool(weights.get("symmetric", True)),
        group_size,
        8 if inputs else None,
        weights.get("actorder"),
    )


def _shifted(signed: torch.Tensor) -> torch.Tensor:
    """int8 as uint8 codes of the same order."""
    return signed.view(torch.uint8) ^ 128


PLUGIN = CompressedTensors
