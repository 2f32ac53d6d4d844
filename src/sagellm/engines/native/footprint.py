"""How large a model is and what memory it will take, from headers alone.

The kernel packs a sample of each quantized matrix, sixteen outputs with the shapes, dtypes and parts of the
checkpoint. So the size is the kernel's own, and what formats or kernel refuse is refused before loading.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import KernelSet, KernelSource
from sagellm.core.protocols.quantization import FormatSource, QuantizedMatrix, WeightQuantizer
from sagellm.core.types import KVCacheSchema
from sagellm.engines.native.architectures import ModelSpec, read_config, read_spec
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.hub import model_folder
from sagellm.engines.native.kv_cache import LAYOUT
from sagellm.engines.native.loading import WeightLoader
from sagellm.engines.native.matrices import packed, quantization_of, read_matrix
from sagellm.engines.native.memory import check_fits, check_host, kv_blocks
from sagellm.engines.native.options import dtype_name, model_length, torch_dtype, usable_device
from sagellm.engines.native.weights import (
    EMBEDDING,
    Parameter,
    WeightPiece,
    check,
    is_quantized,
    num_parameters,
    parameters,
    stored_name,
)

_OUTPUTS = 16


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """How matrices are quantized; `group_size` inputs share a scale (None: all inputs)."""

    bits: int
    group_size: int | None

    def __str__(self) -> str:
        return f"{self.bits} bits by {f'groups of {self.group_size}' if self.group_size else 'output'}"


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model as the engine would hold it, in `dtype` and `compute_dtype`. `codes` are quantized by `method`;
    `obstacle` is why some of them have to be held as their values.
    """

    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    dtype: str
    compute_dtype: str
    method: str
    codes: tuple[CodeFormat, ...]
    obstacle: str


@dataclass(frozen=True, slots=True)
class _HeldParameter:
    """One parameter in memory."""

    nbytes: int
    codes: frozenset[CodeFormat] = frozenset()
    obstacle: str = ""


def footprint(
    model: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    max_model_len: int | None = None,
    kernels: KernelSource | None = None,
    quantizer: WeightQuantizer | None = None,
    formats: FormatSource | None = None,
) -> Footprint:
    """The footprint of a model folder or a hub name. The options are those of `NativeBackend`. Raises the
    same errors for a model that cannot be served.
    """
    folder = model_folder(model)
    config = read_config(folder)
    spec = read_spec(config)
    quantization = quantization_of(config, quantizer, formats)
    where, length = usable_device(device), model_length(spec, max_model_len)
    plan, checkpoint = parameters(spec), Checkpoint(folder)
    check(plan, checkpoint, quantization.stored)
    kernel_set = kernels(1) if kernels and where.type == "cpu" else KernelSet()
    wanted = torch_dtype(spec.dtype if dtype == "auto" else dtype)
    loading = WeightLoader.fastest(
        checkpoint, plan, where, wanted, None, quantization, kernel_set, kernel_set
    )
    held = [_held_parameter(loading, parameter) for parameter in _with_own_head(plan, loading)]
    checkpoint.close()
    codes = sorted(frozenset().union(*(parameter.codes for parameter in held)), key=str)
    return Footprint(
        num_parameters(plan),
        sum(parameter.nbytes for parameter in held),
        _kv_bytes_per_token(spec, dtype_name(loading.compute_dtype)),
        length,
        dtype_name(loading.dtype),
        dtype_name(loading.compute_dtype),
        quantization.method if codes else "",
        tuple(codes),
        next((parameter.obstacle for parameter in held if parameter.obstacle), ""),
    )


def kv_blocks_beside(
    size: Footprint, device: str, free_bytes: int, *, block_size: int, num_blocks: int | None,
    max_num_seqs: int, kv_memory_fraction: float | None, host_memory_bytes: int,
) -> int:  # fmt: skip
    """Blocks of the pool if `free_bytes` are free before the model is loaded. The options are those of
    `NativeBackend`. Raises its `CapacityError` for what does not fit.
    """
    where, left = torch.device(device), max(0, free_bytes - size.weight_bytes)
    bytes_per_block = size.kv_bytes_per_token * block_size
    most = max_num_seqs * math.ceil(size.max_model_len / block_size)
    blocks = num_blocks or kv_blocks(where, bytes_per_block, most, None, kv_memory_fraction, left)
    check_host(host_memory_bytes)
    check_fits(where, blocks, bytes_per_block, host_memory_bytes, left)
    return blocks


def _kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    schema = KVCacheSchema(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, 1, LAYOUT)
    return schema.bytes_per_token


def _with_own_head(plan: Sequence[Parameter], loading: WeightLoader) -> list[Parameter]:
    """The parameters; a tied head that is quantized is one more matrix."""
    if loading.quantization.quantizer is None or any(parameter.name == "head.weight" for parameter in plan):
        return list(plan)
    [embedding] = (parameter for parameter in plan if parameter.name == EMBEDDING)
    return [*plan, replace(embedding, name="head.weight")]


def _held_parameter(loading: WeightLoader, parameter: Parameter) -> _HeldParameter:
    if not parameter.is_matrix:
        return _HeldParameter(math.prod(parameter.shape) * loading.compute_dtype.itemsize)
    values = _value_bytes(loading, parameter)
    samples = _samples(loading, parameter)
    if not samples:
        return _HeldParameter(values)
    codes = frozenset(_codes(sample) for sample in samples)
    try:
        once, twice = (packed(samples * n, loading.quantized, loading.compute_dtype) for n in (1, 2))
    except KernelError as error:
        return _HeldParameter(values, codes, str(error))
    more = (twice.nbytes - once.nbytes) * (parameter.shape[0] - once.shape[0]) // once.shape[0]
    # The order of inputs is held once, for any number of outputs.
    return _HeldParameter(once.nbytes + more, codes)


def _value_bytes(loading: WeightLoader, parameter: Parameter) -> int:
    outputs, inputs = parameter.shape
    if loading.linear is None or not loading.multiplies_by_values_of(parameter):
        return outputs * inputs * loading.matrix_dtype.itemsize
    return loading.linear.empty(outputs, inputs, loading.dtype, partial(torch.zeros, device="meta")).nbytes


def _codes(matrix: QuantizedMatrix) -> CodeFormat:
    return CodeFormat(matrix.bits, matrix.group_size if matrix.group_size < matrix.shape[1] else None)


def _samples(loading: WeightLoader, parameter: Parameter) -> list[QuantizedMatrix]:
    """Samples of the quantized pieces, or of the parameter that will be quantized. Empty for a table, or if a
    piece is not quantized.
    """
    quantizer = loading.quantization.quantizer
    if not parameter.is_multiplied or parameter.name == EMBEDDING:
        return []
    if quantizer is not None:
        return [quantizer.quantized(parameter.name, torch.zeros(_OUTPUTS, parameter.shape[1]))]
    found = [_sample(loading, piece) for piece in parameter.pieces]
    samples = [sample for sample in found if sample is not None]
    return samples if len(samples) == len(found) else []


def _sample(loading: WeightLoader, piece: WeightPiece) -> QuantizedMatrix | None:
    """A sample of a piece: all numbers are -1, except the order of inputs. Tensors of one number per input
    are read: they deal inputs into groups.
    """
    stored, checkpoint = loading.quantization.stored, loading.checkpoint
    if stored is None or not is_quantized(piece, checkpoint, stored):
        return None
    module, inputs = piece.name.removesuffix("weight"), piece.shape[1]
    tensors = {}
    for name, tensor in stored.tensors(_OUTPUTS, inputs).items():
        at = stored_name(checkpoint, module + name)
        if at is not None:
            found = checkpoint.tensor(at)
            is_order = tensor.shape == (inputs,)
            tensors[name] = found.clone() if is_order else torch.full(tensor.shape, -1, dtype=found.dtype)
    return read_matrix(stored, module, tensors, (_OUTPUTS, inputs))
