"""Writers of the formats that checkpoints store quantized matrices in, number by number: slow, plain, and
with nothing in common with the readers. They follow the formats' descriptions: AutoGPTQ's, AutoAWQ's gemm
layout and the compressed-tensors library's.

Each takes codes [outputs, inputs], zeros and scales [outputs, groups] and gives the tensors by name, and
beside them the values that they mean, (code - zero) scale, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sagellm.core.blocks import cdiv

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Numbers:
    """A quantized matrix as lists of whole numbers; `group_of[k]` is the group of input k."""

    codes: list[list[int]]
    zeros: list[list[int]]
    scales: torch.Tensor
    group_of: list[int]
    bits: int

    def values(self) -> torch.Tensor:
        scales = self.scales.float().tolist()
        return torch.tensor([
            [(code - zeros[g]) * row_scales[g] for code, g in zip(codes, self.group_of, strict=True)]
            for codes, zeros, row_scales in zip(self.codes, self.zeros, scales, strict=True)
        ])  # fmt: skip


def numbers(
    outputs: int, inputs: int, bits: int, group_size: int, *, symmetric: bool = False, shuffled: bool = False,
    dtype: torch.dtype = torch.float16, seed: int = 0,
) -> Numbers:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    groups = cdiv(inputs, group_size)
    group_of = torch.arange(inputs) // group_size
    if shuffled:
        group_of = group_of[torch.randperm(inputs, generator=generator)]
    zeros = torch.randint(0, 1 << bits, (outputs, groups), generator=generator)
    if symmetric:
        zeros.fill_(1 << bits - 1)
    return Numbers(
        torch.randint(0, 1 << bits, (outputs, inputs), generator=generator).tolist(),
        zeros.tolist(),
        (0.25 * torch.rand(outputs, groups, generator=generator) / (1 << bits)).to(dtype),
        group_of.tolist(),
        bits,
    )


def word(fields: Sequence[int], bits: int) -> int:
    """Fields of an int32, the first in its lowest bits."""
    unsigned = sum(value << bits * i for i, value in enumerate(fields))
    return unsigned - (1 << 32) if unsigned >= 1 << 31 else unsigned


def words(line: Sequence[int], bits: int) -> list[int]:
    per = 32 // bits
    return [word(line[i : i + per], bits) for i in range(0, len(line), per)]


def columns(table: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*table, strict=True)]


def int32(table: list[list[int]]) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.int32)


def gptq(made: Numbers, *, less: int = 1) -> dict[str, torch.Tensor]:
    mask = (1 << made.bits) - 1
    by_group = [[(zero - less) & mask for zero in group] for group in columns(made.zeros)]
    return {
        "qweight": int32(columns([words(codes, made.bits) for codes in made.codes])),
        "qzeros": int32([words(group, made.bits) for group in by_group]),
        "scales": made.scales.t().contiguous(),
        "g_idx": torch.tensor(made.group_of, dtype=torch.int32),
    }


def awq(made: Numbers) -> dict[str, torch.Tensor]:
    def packed(line: list[int]) -> list[int]:
        eights = [line[i : i + 8] for i in range(0, len(line), 8)]
        return [word([eight[place] for place in AWQ_ORDER], 4) for eight in eights]

    return {
        "qweight": int32([packed(line) for line in columns(made.codes)]),
        "qzeros": int32([packed(line) for line in columns(made.zeros)]),
        "scales": made.scales.t().contiguous(),
    }


def pack_quantized(made: Numbers, *, symmetric: bool = True, g_idx: bool = False) -> dict[str, torch.Tensor]:
    outputs, inputs = len(made.codes), len(made.group_of)
    stored = {
        "weight_packed": int32([words(codes, made.bits) for codes in made.codes]),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not symmetric:
        stored["weight_zero_point"] = int32(
            columns([words(group, made.bits) for group in columns(made.zeros)])
        )
    if g_idx:
        stored["weight_g_idx"] = torch.tensor(made.group_of, dtype=torch.int32)
    return stored


def int_quantized(made: Numbers, *, symmetric: bool = True) -> dict[str, torch.Tensor]:
    def signed(table: list[list[int]]) -> torch.Tensor:
        return torch.tensor([[value - 128 for value in line] for line in table], dtype=torch.int8)

    stored = {"weight": signed(made.codes), "weight_scale": made.scales}
    return stored if symmetric else {**stored, "weight_zero_point": signed(made.zeros)}


def compressed(form: str, bits: int, group_size: int | None, **changes: Any) -> dict[str, Any]:
    """A `quantization_config` as llm-compressor writes it."""
    weights = {
        "num_bits": bits, "type": "int", "symmetric": True, "group_size": group_size, "dynamic": False,
        "strategy": "channel" if group_size is None else "group", "actorder": None, "observer": "minmax",
    } | changes.pop("weights", {})  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "quantization_status": "compressed", "config_groups": {"group_0": group | changes},
    }  # fmt: skip


Writer = Callable[[Numbers], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Kind:
    """One way to store a matrix: its config, its writer, and the numbers it can hold."""

    config: dict[str, Any]
    write: Writer
    bits: int
    group_size: int
    options: dict[str, Any] = field(default_factory=dict)


def _gptq(
    bits: int, group_size: int, *, desc_act: bool = False, sym: bool = True, form: str = "gptq"
) -> Kind:
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act, "sym": sym,
        "checkpoint_format": form,
    }  # fmt: skip
    less = 1 if form == "gptq" else 0
    return Kind(
        config, lambda made: gptq(made, less=less), bits, group_size, {"shuffled": desc_act, "symmetric": sym}
    )


def _compressed(form: str, bits: int, group_size: int, *, by_channel: bool = False, symmetric: bool = True,
                actorder: bool = False, w8a8: bool = False) -> Kind:  # fmt: skip
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    config = compressed(
        form, bits, None if by_channel else group_size, weights={"symmetric": symmetric},
        input_activations=activations if w8a8 else None,
    )  # fmt: skip

    def write(made: Numbers) -> dict[str, torch.Tensor]:
        if form == "int-quantized":
            return int_quantized(made, symmetric=symmetric)
        return pack_quantized(made, symmetric=symmetric, g_idx=actorder)

    options = {"symmetric": symmetric, "shuffled": actorder, "dtype": torch.bfloat16}
    return Kind(config, write, bits, group_size, options)


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
CHANNEL = 1 << 20

KINDS: dict[str, Kind] = {
    "gptq-4": _gptq(4, 32),
    "gptq-4-asymmetric": _gptq(4, 32, sym=False),
    "gptq-4-act-order": _gptq(4, 32, desc_act=True, sym=False),
    "gptq-8": _gptq(8, 32, sym=False),
    "gptq-8-act-order-128": _gptq(8, 128, desc_act=True),
    "gptq-v2-4": _gptq(4, 64, sym=False, form="gptq_v2"),
    "gptq-4-whole-rows": _gptq(4, -1),
    "awq": Kind(AWQ_CONFIG, awq, 4, 32),
    "pack-4": _compressed("pack-quantized", 4, 32),
    "pack-4-asymmetric": _compressed("pack-quantized", 4, 32, symmetric=False),
    "pack-4-act-order": _compressed("pack-quantized", 4, 32, symmetric=False, actorder=True),
    "pack-4-channel": _compressed("pack-quantized", 4, CHANNEL, by_channel=True),
    "pack-8": _compressed("pack-quantized", 8, 64),
    "int-8-channel": _compressed("int-quantized", 8, CHANNEL, by_channel=True),
    "int-8-group": _compressed("int-quantized", 8, 32),
    "int-8-asymmetric": _compressed("int-quantized", 8, CHANNEL, by_channel=True, symmetric=False),
    "w8a8": _compressed("int-quantized", 8, CHANNEL, by_channel=True, w8a8=True),
}


def made_for(kind: Kind, outputs: int, inputs: int, seed: int = 0) -> Numbers:
    group_size = inputs if kind.group_size in (-1, CHANNEL) else kind.group_size
    return numbers(outputs, inputs, kind.bits, group_size, seed=seed, **kind.options)
