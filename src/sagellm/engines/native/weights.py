"""The parameters of a model, and which tensors of a checkpoint they are made of.

Projections that read the same input are one parameter here (Q, K and V; gate and up), so that each is one
GEMM. A `Parameter` lists the checkpoint's pieces of it, stacked by rows. `weight_check` compares all pieces
with the checkpoint's headers, `loading` makes them tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sagellm.engines.native.architectures import ModelSpec

EMBEDDING = "embed.weight"


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


def num_parameters(plan: Iterable[Parameter]) -> int:
    """Numbers in all of them, as config.json implies: however they are stored, a tied head once."""
    return sum(math.prod(parameter.shape) for parameter in plan)


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
