"""How large a model is and what memory it will take, from headers alone.

The kernel packs a sample of each quantized matrix, sixteen outputs with the shapes, dtypes and parts of the
checkpoint. So the size is the kernel's own, and what formats or kernel refuse is refused before loading.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sagellm.accel.quantization.round_to_nearest import HEAD
from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import KernelSet, KernelSource
from sagellm.core.protocols.quantization import FormatSource, QuantizedMatrix, StoredTensor, WeightQuantizer
from sagellm.core.types import KVGroup
from sagellm.engines.native.kv_schema import kv_schema
from sagellm.engines.native.loading import CheckedModel, WeightLoader
from sagellm.engines.native.matrices import Quantization, packed
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.options import dtype_name
from sagellm.engines.native.parallel.split import Split
from sagellm.engines.native.self_draft import SelfDraftSpec
from sagellm.engines.native.weights import EMBEDDING, LAYER_TABLE, Parameter, num_parameters

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
    """A model as the engine would hold it, in `dtype` and `compute_dtype`.

    The KV of a token is that of all groups, `kv_padding_per_token` bytes included that no layer uses;
    `state_bytes` are the recurrent states of a sequence. `codes` are quantized by `method`; `obstacle` is why
    some of them have to be held as their values. `is_windowed`: all KV is in one group, and every layer has a
    sliding window.
    """

    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    kv_groups: tuple[KVGroup, ...]
    kv_padding_per_token: int
    max_model_len: int
    dtype: str
    compute_dtype: str
    method: str
    codes: tuple[CodeFormat, ...]
    obstacle: str
    is_bridged: bool = False
    is_windowed: bool = False
    draft_weight_bytes: int = 0
    """Copies of weights that a draft of the model has."""
    draft_kv_bytes_per_token: int = 0


def footprint(
    model: str | Path, *, device: str = "cpu", dtype: str = "auto", max_model_len: int | None = None,
    kernels: KernelSource | None = None, quantizer: WeightQuantizer | None = None,
    formats: FormatSource | None = None, split_kv: bool = True, implementation: str = "auto",
    split: Split | None = None, head: Path | None = None, draft: SelfDraftSpec | None = None,
) -> Footprint:  # fmt: skip
    """The footprint of a model folder or a hub name, with `head` and `draft`.

    The other options are those of `NativeBackend`. Raises the same errors for a model that cannot be served.
    With `split` it is of one rank.
    """
    source = CheckedModel.of(model, device, max_model_len, quantizer, formats, implementation, split, head)
    spec, plan, quantization = source.spec, source.plan, source.quantization
    kernel_set = kernels(1) if kernels and source.device.type == "cpu" else KernelSet()
    loading = source.loader(dtype, "auto", kernel_set, kernel_set)
    weight_bytes, codes, obstacle = _weight_bytes(loading, plan, tied=spec.tied)
    source.checkpoint.close()
    kv_dtype = dtype_name(loading.compute_dtype)
    schema = kv_schema(spec, source.layout.kv_windows, loading.compute_dtype, 1, split_kv=split_kv)
    groups = schema.groups
    return Footprint(
        num_parameters(plan),
        weight_bytes,
        schema.bytes_per_block,
        schema.state_bytes,
        groups,
        schema.padding_per_token,
        source.max_model_len,
        dtype_name(loading.dtype),
        kv_dtype,
        quantization.method if codes else "",
        tuple(sorted(codes, key=str)),
        obstacle,
        not isinstance(spec, ModelSpec),
        not groups and None not in spec.kv_windows,
        *_draft_bytes(loading, source, draft, split_kv=split_kv),
    )


def _weight_bytes(
    loading: WeightLoader, plan: Sequence[Parameter], *, tied: bool
) -> tuple[int, set[CodeFormat], str]:
    """Bytes of the parameters, formats of those quantized, and why others are not."""
    held, codes, num_bytes, obstacle = list(plan), set[CodeFormat](), 0, ""
    if loading.quantization.quantizer is not None and tied:  # the tied head is one more matrix
        tables = [parameter for parameter in plan if parameter.name == EMBEDDING]
        held += [replace(table, name=HEAD) for table in tables]
    on_meta = replace(loading, device=torch.device("meta"))
    for parameter in held:
        own_bytes = _value_bytes(on_meta, parameter)
        samples = _samples(loading, parameter)
        if samples:
            codes |= {_code_format(sample) for sample in samples}
            try:
                own_bytes = _packed_bytes(loading, samples, parameter.shape[0])
            except KernelError as error:
                obstacle = obstacle or str(error)
        num_bytes += own_bytes
    return num_bytes, codes, obstacle


def _draft_bytes(
    loading: WeightLoader, source: CheckedModel, draft: SelfDraftSpec | None, *, split_kv: bool
) -> tuple[int, int]:
    """Of a draft: bytes of its copies of weights, and of a token's KV."""
    if draft is None or not isinstance(source.spec, ModelSpec):
        return 0, 0
    spec, num_bytes = draft.spec_of(source.spec), 0
    kv = kv_schema(spec, spec.kv_windows, loading.compute_dtype, 1, split_kv=split_kv)
    if draft.quantizer is not None:
        quantizing = replace(loading, quantization=Quantization(draft.quantizer))
        held = [replace(p, name=HEAD) if p.name == EMBEDDING else p for p in source.plan if p.is_multiplied]
        copied = [p for p in held if draft.name_of(p.name) and quantizing.quantizer_of(p.name)]
        num_bytes, _, _ = _weight_bytes(quantizing, copied, tied=False)
    return num_bytes, kv.bytes_per_block


def _value_bytes(on_meta: WeightLoader, parameter: Parameter) -> int:
    """Bytes of a parameter that is held as values."""
    if parameter.is_multiplied or parameter.name in (EMBEDDING, LAYER_TABLE):
        is_multiplied = on_meta.multiplies_by_values_of(parameter)
        return on_meta.empty(parameter.shape, multiplied=is_multiplied).nbytes
    return math.prod(parameter.shape) * on_meta.compute_dtype.itemsize


def _packed_bytes(loading: WeightLoader, samples: list[QuantizedMatrix], outputs: int) -> int:
    """Bytes of a matrix of so many outputs in the kernel's form. Raises `KernelError` where it has none."""
    once, twice = (packed(samples * n, loading.quantized, loading.compute_dtype) for n in (1, 2))
    # The order of inputs is held once, for any number of outputs.
    more = (twice.nbytes - once.nbytes) * (outputs - once.shape[0]) // once.shape[0]
    return once.nbytes + more


def _code_format(matrix: QuantizedMatrix) -> CodeFormat:
    return CodeFormat(matrix.bits, matrix.group_size if matrix.group_size < matrix.shape[1] else None)


def _samples(loading: WeightLoader, parameter: Parameter) -> list[QuantizedMatrix]:
    """Samples of the quantized pieces, or of the parameter that will be quantized. Empty for a table, or if a
    piece is not quantized.
    """
    quantizer = loading.quantizer_of(parameter.name)
    if not parameter.is_multiplied or parameter.name == EMBEDDING:
        return []
    if quantizer is not None:
        return [quantizer.quantized(parameter.name, torch.zeros(_OUTPUTS, parameter.shape[1]))]
    found = [loading.codes(piece, _OUTPUTS, _sample) for piece in parameter.pieces]
    samples = [sample for sample in found if sample is not None]
    return samples if len(samples) == len(found) else []


def _sample(stored: torch.Tensor, wanted: StoredTensor) -> torch.Tensor:
    """A tensor of -1. One of one number per input is read, because it deals inputs into groups."""
    return stored.clone() if stored.dim() == 1 else torch.full(wanted.shape, -1, dtype=stored.dtype)
