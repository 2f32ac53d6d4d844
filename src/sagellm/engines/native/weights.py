"""The parameters of a model: which tensors of a checkpoint they are made of, and loading them.

Projections that read the same input are one parameter here (Q, K and V; gate and up), so that each is one
GEMM. A `Parameter` lists the checkpoint's pieces of it, stacked by rows. `check` compares all pieces with the
checkpoint's headers; only then does `load` allocate, and every piece is copied once, from the file to its
place. A piece may be stored quantized (`WeightFormat`), or be quantized on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from sagellm.core.errors import MissingWeightsError, UnsupportedModelError, WeightShapeError
from sagellm.core.protocols.fusion import QuantizedKernel
from sagellm.core.protocols.quantization import QuantizedMatrix, StoredTensor, WeightFormat
from sagellm.engines.native.architectures import ModelSpec
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.quantized import Held, Holder, Quantization

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) as loading begins, with 0 done, and goes on."""

EMBEDDING, HEAD = "embed.weight", "head.weight"
LOOKED_UP = (EMBEDDING, "positions.weight")
"""Matrices that nothing is multiplied by: these are never held quantized."""
AS_STORED = Quantization()
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the checkpoint; its first dimension is stacked under that of the pieces before it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the model: `name` is ours (see `parameters`)."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:])


def parameters(spec: ModelSpec) -> list[Parameter]:
    """Every parameter of a model of this shape, in the order in which the forward pass reads them.

    Names: `embed`, `positions`, `project_in`, `layers.I.{attn_norm,qkv,q_norm,k_norm,out,mlp_norm,up,down}`,
    `final_norm`, `project_out`, `head`; each followed by `.weight` or `.bias`.
    """
    plan = _opt_parameters(spec) if spec.rope is None else _rope_parameters(spec)
    return [Parameter(name, pieces) for name, pieces in plan]


Plan = Iterator[tuple[str, tuple[Piece, ...]]]


def _rope_parameters(spec: ModelSpec) -> Plan:
    """Names of Llama, Mistral, Qwen2 and Qwen3 checkpoints."""
    hidden = spec.hidden_size
    yield "embed.weight", (Piece("model.embed_tokens.weight", (spec.vocab_size, hidden)),)
    for i in range(spec.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        attn, mlp = theirs + "self_attn.", theirs + "mlp."
        yield ours + "attn_norm.weight", (Piece(theirs + "input_layernorm.weight", (hidden,)),)
        yield from _qkv(spec, ours, attn)
        if spec.qk_norm:
            yield ours + "q_norm.weight", (Piece(attn + "q_norm.weight", (spec.head_dim,)),)
            yield ours + "k_norm.weight", (Piece(attn + "k_norm.weight", (spec.head_dim,)),)
        yield from _linear(ours + "out", [(attn + "o_proj", hidden)], spec.query_size, bias=spec.out_bias)
        yield ours + "mlp_norm.weight", (Piece(theirs + "post_attention_layernorm.weight", (hidden,)),)
        wide = [(mlp + "gate_proj", spec.intermediate_size), (mlp + "up_proj", spec.intermediate_size)]
        yield from _linear(ours + "up", wide, hidden, bias=spec.mlp_bias)
        yield from _linear(
            ours + "down", [(mlp + "down_proj", hidden)], spec.intermediate_size, bias=spec.mlp_bias
        )
    yield "final_norm.weight", (Piece("model.norm.weight", (hidden,)),)
    yield from _head(spec)


def _opt_parameters(spec: ModelSpec) -> Plan:
    hidden, embed, root = spec.hidden_size, spec.embed_dim, "model.decoder."
    yield "embed.weight", (Piece(root + "embed_tokens.weight", (spec.vocab_size, embed)),)
    rows = spec.max_positions + spec.position_offset
    yield "positions.weight", (Piece(root + "embed_positions.weight", (rows, hidden)),)
    if embed != hidden:
        yield from _linear("project_in", [(root + "project_in", hidden)], embed, bias=False)
    for i in range(spec.num_layers):
        ours, theirs = f"layers.{i}.", f"{root}layers.{i}."
        attn = theirs + "self_attn."
        yield from _layer_norm(spec, ours + "attn_norm", theirs + "self_attn_layer_norm")
        yield from _qkv(spec, ours, attn)
        yield from _linear(ours + "out", [(attn + "out_proj", hidden)], spec.query_size, bias=spec.out_bias)
        yield from _layer_norm(spec, ours + "mlp_norm", theirs + "final_layer_norm")
        yield from _linear(
            ours + "up", [(theirs + "fc1", spec.intermediate_size)], hidden, bias=spec.mlp_bias
        )
        yield from _linear(
            ours + "down", [(theirs + "fc2", hidden)], spec.intermediate_size, bias=spec.mlp_bias
        )
    if spec.final_norm:
        yield from _layer_norm(spec, "final_norm", root + "final_layer_norm")
    if embed != hidden:
        yield from _linear("project_out", [(root + "project_out", embed)], hidden, bias=False)
    yield from _head(spec)


def _qkv(spec: ModelSpec, ours: str, attn: str) -> Plan:
    rows = [
        (attn + "q_proj", spec.query_size),
        (attn + "k_proj", spec.kv_size),
        (attn + "v_proj", spec.kv_size),
    ]
    return _linear(ours + "qkv", rows, spec.hidden_size, bias=spec.qkv_bias)


def _linear(ours: str, rows: list[tuple[str, int]], columns: int, *, bias: bool) -> Plan:
    yield ours + ".weight", tuple(Piece(name + ".weight", (size, columns)) for name, size in rows)
    if bias:
        yield ours + ".bias", tuple(Piece(name + ".bias", (size,)) for name, size in rows)


def _layer_norm(spec: ModelSpec, ours: str, theirs: str) -> Plan:
    if spec.norm_affine:
        yield ours + ".weight", (Piece(theirs + ".weight", (spec.hidden_size,)),)
        yield ours + ".bias", (Piece(theirs + ".bias", (spec.hidden_size,)),)


def _head(spec: ModelSpec) -> Plan:
    if not spec.tied:
        yield "head.weight", (Piece("lm_head.weight", (spec.vocab_size, spec.embed_dim)),)


def check(plan: list[Parameter], checkpoint: Checkpoint, stored: WeightFormat | None = None) -> None:
    """Raise unless the checkpoint has every piece in its shape, as it is or in the format `stored`; reads
    headers only.

    `MissingWeightsError` names the missing tensors, `WeightShapeError` the tensor, expected and found shape.
    """
    wanted = [
        one for parameter in plan for piece in parameter.pieces for one in _stored(piece, checkpoint, stored)
    ]
    missing = [name for name, tensor in wanted if not tensor.optional and not _stored_name(checkpoint, name)]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise MissingWeightsError(f"{checkpoint.folder} lacks {', '.join(missing[:_SHOWN])}{more}")
    for name, tensor in wanted:
        found = _stored_name(checkpoint, name)
        if found is not None and checkpoint.entries[found].shape != tensor.shape:
            raise WeightShapeError(
                f"{name}: config.json implies shape {list(tensor.shape)}, "
                f"the checkpoint has {list(checkpoint.entries[found].shape)}"
            )


def load(
    plan: list[Parameter],
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    matrix_dtype: torch.dtype | None = None,
    quantization: Quantization = AS_STORED,
    kernel: QuantizedKernel | None = None,
) -> Held:
    """All parameters by name on `device`, rounded to `dtype` and held in `compute_dtype`, matrices in
    `matrix_dtype` where it is given, or quantized, as `quantization` says, and packed for `kernel`. Call
    `check` first. Beside the model there is never more in memory than one of its matrices.
    """
    total = sum(_bytes(checkpoint, parameter, quantization.stored) for parameter in plan)
    done = 0
    if progress is not None:
        progress(done, total)
    holder = Holder(
        kernel, device, dtype=matrix_dtype or compute_dtype, rounded_to=dtype, computed_in=compute_dtype
    )
    for parameter in plan:
        _take(parameter, checkpoint, holder, quantization, dtype, compute_dtype)
        done += _bytes(checkpoint, parameter, quantization.stored)
        if progress is not None:
            progress(done, total)
    if HEAD not in holder.held.tensors and quantization.quantizer is not None:
        embed = holder.held.tensors[EMBEDDING]
        holder.take(HEAD, [quantization.quantizer.quantized(HEAD, embed)])
    return holder.held


def _take(
    parameter: Parameter, checkpoint: Checkpoint, holder: Holder, quantization: Quantization,
    dtype: torch.dtype, compute_dtype: torch.dtype,
) -> None:  # fmt: skip
    name, is_matrix = parameter.name, len(parameter.shape) > 1
    is_multiplied = is_matrix and name not in LOOKED_UP
    matrices = [_matrix(piece, checkpoint, quantization.stored) for piece in parameter.pieces]
    quantized = [matrix for matrix in matrices if matrix is not None]
    if is_multiplied and len(quantized) == len(matrices):
        return holder.take(name, quantized)
    quantizer = quantization.quantizer if is_multiplied else None
    held = dtype if quantizer else holder.dtype if is_matrix else compute_dtype
    target = torch.empty(parameter.shape, dtype=held, device=None if quantizer else holder.device)
    row = 0
    for piece, matrix in zip(parameter.pieces, matrices, strict=True):
        place = target[row : row + piece.shape[0]]
        if matrix is None:
            checkpoint.copy(_stored_name(checkpoint, piece.name) or piece.name, place, dtype)
        else:
            place.copy_(matrix.values().to(dtype))
        row += piece.shape[0]
    if quantizer:
        return holder.take(name, [quantizer.quantized(name, target)])
    holder.held.tensors[name] = target
    return None


def _matrix(piece: Piece, checkpoint: Checkpoint, stored: WeightFormat | None) -> QuantizedMatrix | None:
    """The piece as its quantized tensors have it; None for one that is not quantized."""
    if stored is None or not _is_quantized(piece, checkpoint, stored):
        return None
    module = piece.name.removesuffix("weight")
    names = {name: _stored_name(checkpoint, name) for name, _ in _stored(piece, checkpoint, stored)}
    tensors = {name.removeprefix(module): checkpoint.tensor(found) for name, found in names.items() if found}
    try:
        matrix = stored.matrix(tensors, piece.shape[0], piece.shape[1])
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{module.removesuffix('.')}: {error}") from error
    for found in names.values():
        if found:
            checkpoint.let_go(found)
    return matrix


def _is_quantized(piece: Piece, checkpoint: Checkpoint, stored: WeightFormat) -> bool:
    module = piece.name.removesuffix("weight")
    return len(piece.shape) == 2 and _stored_name(checkpoint, module + stored.marker) is not None


def _stored(
    piece: Piece, checkpoint: Checkpoint, stored: WeightFormat | None
) -> list[tuple[str, StoredTensor]]:
    """The tensors of the checkpoint that make the piece, by name."""
    if stored is None or not _is_quantized(piece, checkpoint, stored):
        return [(piece.name, StoredTensor(piece.shape))]
    module = piece.name.removesuffix("weight")
    return [(module + name, tensor) for name, tensor in stored.tensors(*piece.shape).items()]


def _stored_name(checkpoint: Checkpoint, name: str) -> str | None:
    """The name under which the checkpoint has `name`: some were saved without the leading `model.`."""
    return next((form for form in (name, name.removeprefix("model.")) if form in checkpoint), None)


def _bytes(checkpoint: Checkpoint, parameter: Parameter, stored: WeightFormat | None) -> int:
    tensors = [one for piece in parameter.pieces for one in _stored(piece, checkpoint, stored)]
    names = [_stored_name(checkpoint, name) for name, _ in tensors]
    return sum(checkpoint.entries[name].end - checkpoint.entries[name].begin for name in names if name)
