"""The parameters of a model: which tensors of a checkpoint they are made of, and loading them.

Projections that read the same input are one parameter here (Q, K and V; gate and up), so that each is one
GEMM. A `Parameter` lists the checkpoint's pieces of it, stacked by rows. `check` compares all pieces with the
checkpoint's headers; only then does `load` allocate, and every piece is copied once, from the file to its
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from sagellm.core.errors import MissingWeightsError, WeightShapeError
from sagellm.core.protocols.fusion import LinearKernel, Matrix
from sagellm.engines.native.architectures import ModelSpec
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.host_pages import lazy_zeros
from sagellm.engines.native.projection import Dense, look_up

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) as loading begins, with 0 done, and goes on."""

EMBEDDING = "embed.weight"
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
    is_multiplied: bool = False
    """By the tokens of a step; a table may be only looked up."""

    @property
    def is_matrix(self) -> bool:
        return self.is_multiplied or self.name == EMBEDDING

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:])


def parameters(spec: ModelSpec) -> list[Parameter]:
    """Every parameter of a model of this shape, in the order in which the forward pass reads them.

    Names: `embed`, `positions`, `project_in`, `layers.I.{attn_norm,qkv,q_norm,k_norm,out,mlp_norm,up,down}`,
    `final_norm`, `project_out`, `head`; each followed by `.weight` or `.bias`.
    """
    plan = _opt_parameters(spec) if spec.rope is None else _rope_parameters(spec)
    looked_up = {"positions.weight"} if spec.tied else {"positions.weight", EMBEDDING}
    return [
        Parameter(name, pieces, is_multiplied=len(pieces[0].shape) > 1 and name not in looked_up)
        for name, pieces in plan
    ]


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


def check(plan: list[Parameter], checkpoint: Checkpoint) -> None:
    """Raise unless the checkpoint has every piece in its shape; reads headers only.

    `MissingWeightsError` names the missing tensors, `WeightShapeError` the tensor, expected and found shape.
    """
    pieces = [piece for parameter in plan for piece in parameter.pieces]
    missing = [piece.name for piece in pieces if _stored_name(checkpoint, piece.name) is None]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise MissingWeightsError(f"{checkpoint.folder} lacks {', '.join(missing[:_SHOWN])}{more}")
    for piece in pieces:
        found = checkpoint.entries[_stored_name(checkpoint, piece.name) or ""].shape
        if found != piece.shape:
            raise WeightShapeError(
                f"{piece.name}: config.json implies shape {list(piece.shape)}, "
                f"the checkpoint has {list(found)}"
            )


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's parameters: `matrices` by name without `.weight`, all others in `tensors`."""

    matrices: dict[str, Matrix]
    tensors: dict[str, torch.Tensor]

    @property
    def read_bytes(self) -> int:
        """Of what every step reads whole: not tables, of which it looks rows up."""
        untied = {"embed"} if "head" in self.matrices else set()
        matrices = sum(matrix.nbytes for name, matrix in self.matrices.items() if name not in untied)
        return matrices + sum(t.nbytes for name, t in self.tensors.items() if name != "positions.weight")


def load(
    plan: list[Parameter],
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    kernel: LinearKernel | None = None,
) -> Weights:
    """All parameters on `device`, rounded to `dtype` and held in `compute_dtype`; with a `kernel`, matrices
    are in its form, and in `dtype`. Call `check` first.
    """
    total = sum(_bytes(checkpoint, parameter) for parameter in plan)
    done = 0
    if progress is not None:
        progress(done, total)
    weights = Weights({}, {})
    for parameter in plan:
        if parameter.is_matrix:
            matrix = _empty(parameter, device, compute_dtype if kernel is None else dtype, kernel)
            _fill(matrix.store, parameter, checkpoint, dtype)
            weights.matrices[parameter.name.removesuffix(".weight")] = matrix
        else:
            tensor = torch.empty(parameter.shape, dtype=compute_dtype, device=device)
            _fill(partial(_copy, tensor), parameter, checkpoint, dtype)
            weights.tensors[parameter.name] = tensor
        done += _bytes(checkpoint, parameter)
        if progress is not None:
            progress(done, total)
    return weights


def _empty(
    parameter: Parameter, device: torch.device, dtype: torch.dtype, kernel: LinearKernel | None
) -> Matrix:
    outputs, inputs = parameter.shape
    if kernel is None or not parameter.is_multiplied:
        weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        return Dense(weight, look_up if kernel is None else kernel.gather)
    return kernel.empty(outputs, inputs, dtype, partial(lazy_zeros, huge=True))


def _fill(
    store: Callable[[int, torch.Tensor], None], parameter: Parameter, checkpoint: Checkpoint,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    row = 0
    for piece in parameter.pieces:
        for part in checkpoint.parts(_stored_name(checkpoint, piece.name) or piece.name, dtype):
            store(row, part)
            row += len(part)


def _copy(target: torch.Tensor, first: int, rows: torch.Tensor) -> None:
    target[first : first + len(rows)].copy_(rows)


def _stored_name(checkpoint: Checkpoint, name: str) -> str | None:
    """The name under which the checkpoint has `name`: some were saved without the leading `model.`."""
    return next((form for form in (name, name.removeprefix("model.")) if form in checkpoint), None)


def _bytes(checkpoint: Checkpoint, parameter: Parameter) -> int:
    names = (_stored_name(checkpoint, piece.name) for piece in parameter.pieces)
    return sum(checkpoint.entries[name].end - checkpoint.entries[name].begin for name in names if name)
