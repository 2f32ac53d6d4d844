"""A model's parameters, and the checkpoint's tensors that they are made of.

Projections that read the same input are one parameter (Q, K and V; gate and up), so each is one GEMM. A
`Parameter` lists its pieces in the checkpoint, stacked by rows. `check` compares all pieces with the
checkpoint's headers; `loading` makes them tensors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from sagellm.accel.quantization.formats import mxfp4
from sagellm.core.errors import MissingWeightsError, UnsupportedModelError, WeightShapeError
from sagellm.core.protocols.quantization import StoredTensor, WeightFormat
from sagellm.engines.native.checkpoint import FLOATS, Checkpoint, TensorEntry
from sagellm.engines.native.experts import ExpertSpec
from sagellm.engines.native.latent_spec import LatentSpec
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.recurrent_spec import DeltaSpec, MambaSpec

EMBEDDING = "embed.weight"
LAYER_TABLE = "layer_table.weight"
"""Of the layers' own inputs."""


@dataclass(frozen=True, slots=True)
class StackedPart:
    """One of `count` experts in a tensor that has them all. Rows are the model's outputs, or columns if
    `is_transposed`; of a gate and an up that alternate (`alternates`), the gate's come first in the model.
    """

    index: int
    count: int
    is_transposed: bool = False
    alternates: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rank has of a piece: rows in the model's order, and columns."""

    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """One tensor of the checkpoint, or a part of one. Pieces are stacked along their first dimension. Row i
    of each of its first `num_reordered` heads is row `head_order[i]` of the stored head. `kept`: what is
    loaded of it; None: all.
    """

    name: str
    shape: tuple[int, ...]
    num_reordered: int = 0
    head_order: tuple[int, ...] = ()
    part: StackedPart | None = None
    kept: Kept | None = None

    @property
    def loaded_shape(self) -> tuple[int, ...]:
        """The shape of what is loaded."""
        if self.kept is None:
            return self.shape
        rows, columns = sum(stop - first for first, stop in self.kept.rows), self.kept.columns
        return (rows, *self.shape[1:]) if columns is None else (rows, columns[1] - columns[0])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, stored plain."""
        if self.part is None:
            return self.shape
        return (self.part.count, *(reversed(self.shape) if self.part.is_transposed else self.shape))

    def ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of a part in the model's order."""
        if self.part is None or not self.part.alternates:
            return rows
        return torch.cat((rows[::2], rows[1::2]))


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the model; `parameters` defines its `name`."""

    name: str
    pieces: tuple[WeightPiece, ...]
    is_multiplied: bool = False
    """Whether a step multiplies by it; a table may be only looked up."""

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [piece.loaded_shape for piece in self.pieces]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def parameters(spec: ModelSpec) -> list[Parameter]:
    """All parameters of a model of this shape, in the forward pass's order. Names: `embed`, `positions`,
    `project_in`, `layers.I.{attn_norm,qkv,q_norm,k_norm,out,mlp_norm,up,down}`, `final_norm`, `project_out`,
    with experts `layers.I.{router,experts.up,experts.down}`, and up and down if a part is shared by tokens,
    `head`; each followed by `.weight` or `.bias`. `layers.I.sinks` are vectors of logits.
    Latent attention has `query_norm`, `query_up`, `kv_norm` and `kv_up` in place of q_norm and k_norm. The
    qkv of attention with an output gate begins with the gate. A recurrent layer has
    `recurrent.{into,conv,decay,step_bias,norm,out}` in place of qkv and out, and `recurrent.gates` (delta
    rule) or `recurrent.{conv_bias,skip}` (Mamba). Where layers have inputs of their own, there are
    `layer_table`, `layer_inputs`, `layer_inputs_norm` and `layers.I.{input_gate,input_up,input_norm}`; with
    experts beside an MLP `layers.I.{router_norm,expert_scale,experts_norm,experts_out_norm,mlp_own_norm}`.
    """
    looked_up = {"positions.weight", LAYER_TABLE} | (set() if spec.tied else {EMBEDDING})
    return [
        Parameter(name, pieces, is_multiplied=len(pieces[0].shape) == 2 and name not in looked_up)
        for name, pieces in _named_pieces(spec)
    ]


def head_parameters(spec: ModelSpec) -> list[Parameter]:
    """Those of a draft head, the last layer of `spec` (`ModelSpec.with_draft_layer`).

    Beside the layer's: `token_norm`, `hidden_norm`, `from_token` and `from_hidden` (the halves of a matrix),
    and `head_norm`, in front of the model's head. In a checkpoint they have the names of the family's MTP.
    """
    own, size = spec.draft_head, spec.hidden_size
    theirs = head_root(spec)
    firsts = (size, 0) if own.hidden_first else (0, size)
    halves = [Kept(((0, size),), (first, first + size)) for first in firsts]
    whole = WeightPiece(head_projection(spec), (size, 2 * size))
    pieces = [(replace(whole, kept=half),) for half in halves]
    named = [
        *_norm(spec, "token_norm", theirs + own.token_norm),
        *_norm(spec, "hidden_norm", theirs + own.hidden_norm),
        *zip(("from_token.weight", "from_hidden.weight"), pieces, strict=True),
        *_layer_pieces(spec, spec.num_layers - 1, theirs),
        *_norm(spec, "head_norm", theirs + own.last_norm),
    ]
    return [Parameter(name, found, is_multiplied=len(found[0].shape) == 2) for name, found in named]


def block_parameters(spec: ModelSpec, checkpoint: Checkpoint) -> list[Parameter]:
    """As `head_parameters`, of a block drafter.

    `mask_embed` has a mask for each place behind the first.
    """
    name = head_root(spec) + MASKS
    count = checkpoint[name].shape[0] if name in checkpoint and checkpoint[name].shape else 1
    return [*head_parameters(spec), Parameter(MASKS, (WeightPiece(name, (count, spec.hidden_size)),))]


MASKS = "mask_embed"
MEDUSA_ROOT = "medusa."


def medusa_parameters(checkpoint: Checkpoint, size: int) -> list[Parameter]:
    """The blocks of a Medusa head that a checkpoint has.

    They read hidden states of `size`. In the file block k, from 0, is `medusa.k.linear`; the parameters
    `medusa.weight` and `medusa.bias` have one below another.
    """
    count = sum(name.startswith(MEDUSA_ROOT) and name.endswith(".weight") for name in checkpoint.entries)
    shapes: dict[str, tuple[int, ...]] = {"weight": (size, size), "bias": (size,)}
    return [
        Parameter(
            MEDUSA_ROOT + ending,
            tuple(WeightPiece(f"{MEDUSA_ROOT}{block}.linear.{ending}", shape) for block in range(count or 1)),
            is_multiplied=ending == "weight",
        )
        for ending, shape in shapes.items()
    ]


def head_root(spec: ModelSpec) -> str:
    """With what the names of a head's tensors begin."""
    return spec.draft_head.root or _layer_root(spec, spec.num_layers - 1)


def head_projection(spec: ModelSpec) -> str:
    """The tensor that projects a token's embedding and a hidden state."""
    return f"{head_root(spec)}{spec.draft_head.projection}.weight"


def as_stored(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """`spec`, with its experts stacked where the checkpoint has them so.

    A layer's experts lie in a tensor each, or all in one.
    """
    experts = spec.experts
    if experts is None or experts.stacked:
        return spec
    module = f"{_layer_root(spec, experts.layers.index(True))}{spec.names.experts}"
    if f"{module}.{spec.names.stacked_up}" not in checkpoint:
        return spec
    return replace(spec, experts=replace(experts, stacked="rows"))


def num_parameters(plan: Iterable[Parameter]) -> int:
    """Numbers in all parameters, as config.json implies; a tied head counts once."""
    return sum(math.prod(parameter.shape) for parameter in plan)


Plan = Iterator[tuple[str, tuple[WeightPiece, ...]]]


def _named_pieces(spec: ModelSpec) -> Plan:
    names = spec.names
    root, hidden, embed = names.root, spec.hidden_size, spec.embed_dim
    yield from _linear("embed", [(root + "embed_tokens", spec.vocab_size)], embed)
    if spec.learned_positions:
        rows = spec.max_positions + spec.position_offset
        yield from _linear("positions", [(root + "embed_positions", rows)], hidden)
    if embed != hidden:
        yield from _linear("project_in", [(root + "project_in", hidden)], embed)
    if spec.layer_inputs is not None:
        width = spec.num_layers * spec.layer_inputs.width
        table = [(root + "embed_tokens_per_layer", spec.layer_inputs.vocab_size)]
        yield from _linear(LAYER_TABLE.removesuffix(".weight"), table, width)
        yield from _linear("layer_inputs", [(root + "per_layer_model_projection", width)], hidden)
        norm = WeightPiece(root + "per_layer_projection_norm.weight", (spec.layer_inputs.width,))
        yield "layer_inputs_norm.weight", (norm,)
    for i in range(spec.num_layers):
        yield from _layer_pieces(spec, i, _layer_root(spec, i))
    if spec.final_norm:
        yield from _norm(spec, "final_norm", root + names.final_norm)
    if embed != hidden:
        yield from _linear("project_out", [(root + "project_out", embed)], hidden)
    if not spec.tied:
        yield from _linear("head", [(names.head, spec.vocab_size)], embed)


def _layer_root(spec: ModelSpec, index: int) -> str:
    return f"{spec.names.root}layers.{index}."


def _layer_pieces(spec: ModelSpec, index: int, theirs: str) -> Plan:
    names, hidden, inner = spec.names, spec.hidden_size, spec.shape(index).intermediate_size
    ours = f"layers.{index}."
    if spec.norm_place != "output":
        yield from _norm(spec, ours + "attn_norm", theirs + names.attn_norm)
    if spec.attends(index):
        yield from _attention_pieces(spec, index, ours, theirs)
    else:
        yield from _recurrent(spec, ours + "recurrent.", f"{theirs}{names.recurrent}.")
    if names.attn_out_norm:
        yield from _norm(spec, ours + "attn_out_norm", theirs + names.attn_out_norm)
    if spec.norm_place != "output":
        yield from _norm(spec, ours + "mlp_norm", theirs + names.mlp_norm)
    if spec.has_experts(index):
        yield from _expert_pieces(spec, ours, theirs)
    if not spec.has_experts(index) or spec.has_experts_beside:
        up = _stacked(theirs, names.up, (inner,) * (1 + spec.gated_mlp))
        yield from _linear(ours + "up", up, hidden, bias=spec.mlp_bias)
        yield from _linear(ours + "down", [(theirs + names.down, hidden)], inner, bias=spec.mlp_bias)
    if names.mlp_out_norm:
        yield from _norm(spec, ours + "mlp_out_norm", theirs + names.mlp_out_norm)
    if spec.layer_inputs is not None:
        width = spec.layer_inputs.width
        yield from _linear(ours + "input_gate", [(theirs + "per_layer_input_gate", width)], hidden)
        yield from _linear(ours + "input_up", [(theirs + "per_layer_projection", hidden)], width)
        yield from _norm(spec, ours + "input_norm", theirs + "post_per_layer_input_norm")
    if spec.layer_scale:
        yield ours + "scale", (WeightPiece(theirs + "layer_scalar", (1,)),)


def _attention_pieces(spec: ModelSpec, index: int, ours: str, theirs: str) -> Plan:
    names, hidden, shape, has_kv = spec.names, spec.hidden_size, spec.shape(index), spec.has_kv(index)
    rope, heads = spec.ropes[index], (spec.num_heads, shape.num_kv_heads)
    order = rope.head_order if rope is not None else ()
    query_size = spec.num_heads * shape.head_dim
    qkv = _stacked(theirs, names.qkv, (query_size, shape.kv_size, shape.kv_size))
    turned = (*heads, 0) if len(qkv) > 1 else (sum(heads),)
    if shape.value_is_key:
        qkv[2] = qkv[1]
    if not has_kv:
        qkv, turned = qkv[:1], turned[:1]
    norm_dims = (shape.head_dim,) * 2 if spec.qk_norm == "head" else (query_size, shape.kv_size)
    if spec.latent is not None:
        yield from _latent(spec, spec.latent, ours, theirs + "self_attn.")
    elif spec.output_gate:
        yield from _gated_qkv(spec, ours + "qkv", qkv, order)
    else:
        yield from _linear(ours + "qkv", qkv, hidden, bias=spec.qkv_bias, turned=turned, order=order)
    normed = ("qk" if has_kv else "q") if spec.qk_norm in ("head", "all") else ""
    for part, dim in zip(normed, norm_dims, strict=False):
        piece = WeightPiece(f"{theirs}self_attn.{part}_norm.weight", (dim,), dim // shape.head_dim, order)
        yield f"{ours}{part}_norm.weight", (piece,)
    if spec.attention_sinks:
        yield ours + "sinks", (WeightPiece(theirs + "self_attn.sinks", (spec.num_heads,)),)
    attn_out = [(theirs + names.attn_out, hidden)]
    inputs = spec.num_heads * (spec.latent.value_dim if spec.latent else shape.head_dim)
    yield from _linear(ours + "out", attn_out, inputs, bias=spec.out_bias)


def _expert_pieces(spec: ModelSpec, ours: str, theirs: str) -> Plan:
    names, experts = spec.names, spec.experts
    assert experts is not None
    shared = experts.shared_width
    router = [(theirs + names.router, experts.count)]
    yield from _linear(ours + "router", router, spec.hidden_size, bias=experts.has_bias)
    if experts.stacked:
        yield from _stacked_experts(spec, experts, ours, theirs + names.experts)
    else:
        modules = [f"{theirs}{names.experts}.{number}." for number in range(experts.count)]
        up = [(module + name, experts.width) for module in modules for name in names.expert_up]
        yield from _linear(ours + "experts.up", up, spec.hidden_size)
        down = [(module + names.expert_down, spec.hidden_size) for module in modules]
        yield from _linear(ours + "experts.down", down, experts.width)
    if experts.beside_mlp:
        yield ours + "router_norm.weight", (WeightPiece(theirs + "router.scale", (spec.hidden_size,)),)
        yield ours + "expert_scale", (WeightPiece(theirs + "router.per_expert_scale", (experts.count,)),)
        yield from _norm(spec, ours + "experts_norm", theirs + "pre_feedforward_layernorm_2")
        yield from _norm(spec, ours + "experts_out_norm", theirs + "post_feedforward_layernorm_2")
        yield from _norm(spec, ours + "mlp_own_norm", theirs + "post_feedforward_layernorm_1")
    if experts.is_corrected:
        bias = WeightPiece(f"{theirs}{names.router}.e_score_correction_bias", (experts.count,))
        yield ours + "router.correction", (bias,)
    if shared:
        module = f"{theirs}{names.shared_experts}."
        up = _stacked(module, names.shared_up or names.expert_up, (shared, shared))
        yield from _linear(ours + "up", up, spec.hidden_size, bias=spec.mlp_bias)
        down = [(module + (names.shared_down or names.expert_down), spec.hidden_size)]
        yield from _linear(ours + "down", down, shared, bias=spec.mlp_bias)
    if experts.shared_gate:
        gate = [(f"{theirs}{names.shared_experts}_gate", 1)]
        yield from _linear(ours + "shared_gate", gate, spec.hidden_size)


def _stacked_experts(spec: ModelSpec, experts: ExpertSpec, ours: str, module: str) -> Plan:
    sizes = {"up": (spec.names.stacked_up, 2 * experts.width, spec.hidden_size)}
    sizes["down"] = (spec.names.stacked_down, spec.hidden_size, experts.width)
    by_column = experts.stacked == "columns"
    for ending, (name, outputs, inputs) in sizes.items():
        mine, stored, count = f"{ours}experts.{ending}", f"{module}.{name}", experts.count
        alternates = experts.alternates and ending == "up"
        parts = [StackedPart(i, count, by_column, alternates) for i in range(count)]
        yield mine + ".weight", tuple(WeightPiece(stored, (outputs, inputs), part=part) for part in parts)
        if experts.has_bias:
            parts = [replace(part, is_transposed=False) for part in parts]
            yield (
                mine + ".bias",
                tuple(WeightPiece(stored + "_bias", (outputs,), part=part) for part in parts),
            )


def _stacked(layer: str, names: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, int]]:
    """Matrices of these rows, each under its name or all under one."""
    rows = sizes if len(names) == len(sizes) else (sum(sizes),)
    return [(layer + name, size) for name, size in zip(names, rows, strict=True)]


def _latent(spec: ModelSpec, latent: LatentSpec, ours: str, attn: str) -> Plan:
    heads, query_size = spec.num_heads, spec.num_heads * latent.key_dim
    query = ("q_proj", query_size) if latent.query_rank is None else ("q_a_proj", latent.query_rank)
    rows = [(attn + query[0], query[1]), (attn + "kv_a_proj_with_mqa", latent.width)]
    yield from _linear(ours + "qkv", rows, spec.hidden_size)
    if latent.query_rank is not None:
        yield ours + "query_norm.weight", (WeightPiece(attn + "q_a_layernorm.weight", (latent.query_rank,)),)
        yield from _linear(ours + "query_up", [(attn + "q_b_proj", query_size)], latent.query_rank)
    yield ours + "kv_norm.weight", (WeightPiece(attn + "kv_a_layernorm.weight", (latent.rank,)),)
    kv_size = heads * (latent.nope_dim + latent.value_dim)
    yield from _linear(ours + "kv_up", [(attn + "kv_b_proj", kv_size)], latent.rank)


def _gated_qkv(spec: ModelSpec, ours: str, qkv: Sequence[tuple[str, int]], order: Sequence[int]) -> Plan:
    """Gates, queries, keys and values. In the checkpoint each head's gate follows its query."""
    dims, (query, key, value) = order or range(spec.head_dim), qkv
    firsts = [2 * spec.head_dim * head for head in range(spec.num_heads)]
    rows = [first + spec.head_dim + i for first in firsts for i in range(spec.head_dim)]
    rows += [first + i for first in firsts for i in dims]
    for kind, inputs in (
        (("weight", (spec.hidden_size,)), ("bias", ()))
        if spec.qkv_bias
        else (("weight", (spec.hidden_size,)),)
    ):
        yield (
            f"{ours}.{kind}",
            (
                WeightPiece(f"{query[0]}.{kind}", (2 * spec.query_size, *inputs), 1, tuple(rows)),
                WeightPiece(f"{key[0]}.{kind}", (key[1], *inputs), spec.num_kv_heads, tuple(order)),
                WeightPiece(f"{value[0]}.{kind}", (value[1], *inputs)),
            ),
        )


def _recurrent(spec: ModelSpec, ours: str, theirs: str) -> Plan:
    recurrent = spec.recurrent
    assert recurrent is not None
    if isinstance(recurrent, MambaSpec):
        heads, inner, bias = recurrent.heads, recurrent.inner_size, recurrent.has_bias
        into = [(theirs + "in_proj", inner + recurrent.conv_channels + heads)]
        yield from _linear(ours + "into", into, spec.hidden_size, bias=bias)
        if recurrent.conv_bias:
            yield ours + "conv_bias", (WeightPiece(theirs + "conv1d.bias", (recurrent.conv_channels,)),)
        yield ours + "skip", (WeightPiece(theirs + "D", (heads,)),)
        yield ours + "norm", (WeightPiece(theirs + "norm.weight", (inner,)),)
    else:
        heads, inner, bias = recurrent.value_heads, recurrent.value_size, False
        yield from _delta_inputs(recurrent, spec.hidden_size, ours, theirs)
        yield ours + "norm", (WeightPiece(theirs + "norm.weight", (recurrent.value_dim,)),)
    conv = WeightPiece(theirs + "conv1d.weight", (recurrent.conv_channels, 1, recurrent.conv_width))
    yield ours + "conv", (conv,)
    yield ours + "decay", (WeightPiece(theirs + "A_log", (heads,)),)
    yield ours + "step_bias", (WeightPiece(theirs + "dt_bias", (heads,)),)
    yield from _linear(ours + "out", [(theirs + "out_proj", spec.hidden_size)], inner, bias=bias)


def _delta_inputs(delta: DeltaSpec, hidden: int, ours: str, theirs: str) -> Plan:
    into = [("in_proj_qkv", delta.conv_channels), ("in_proj_z", delta.value_size)]
    gates = [("in_proj_b", delta.value_heads), ("in_proj_a", delta.value_heads)]
    orders: tuple[tuple[int, ...], ...] = ((), ())
    if delta.by_head:
        into, gates = [("in_proj_qkvz", sum(n for _, n in into))], [("in_proj_ba", sum(n for _, n in gates))]
        orders = delta.input_order(), delta.gate_order()
    for name, rows, order in zip(("into", "gates"), (into, gates), orders, strict=True):
        stored = [(theirs + stem, count) for stem, count in rows]
        turned = (int(bool(order)),) * len(rows)
        yield from _linear(ours + name, stored, hidden, turned=turned, order=order)


def _linear(
    ours: str, rows: list[tuple[str, int]], columns: int, *, bias: bool = False, turned: Sequence[int] = (),
    order: tuple[int, ...] = (),
) -> Plan:  # fmt: skip
    """A matrix of these pieces, each with its rows, or a table. `turned` heads of each are reordered."""
    for kind, inputs in (("weight", (columns,)), ("bias", ())) if bias else (("weight", (columns,)),):
        yield (
            f"{ours}.{kind}",
            tuple(
                WeightPiece(f"{name}.{kind}", (size, *inputs), num_heads, order)
                for (name, size), num_heads in zip(rows, turned or (0,) * len(rows), strict=True)
            ),
        )


def _norm(spec: ModelSpec, ours: str, theirs: str) -> Plan:
    if spec.norm_affine:
        yield ours + ".weight", (WeightPiece(theirs + ".weight", (spec.hidden_size,)),)
        if not spec.rms_norm:
            yield ours + ".bias", (WeightPiece(theirs + ".bias", (spec.hidden_size,)),)


_HARMLESS = ("rotary_emb.inv_freq", ".masked_bias", "decoder.version", "lm_head.weight")
"""Constants that can be computed, and the head of a model with a tied head."""
_OF_IMAGES = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "model.visual.",
    "model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.",
)  # fmt: skip
log = logging.getLogger("sagellm.weights")


def check(plan: Sequence[Parameter], checkpoint: Checkpoint, stored: WeightFormat | None = None) -> None:
    """Raise unless the checkpoint has every piece in its shape, plain or as `stored`.

    It reads headers, and values only where headers do not suffice: shapes stored as tensors, and biases for
    which the model has no place. `MissingWeightsError` names the missing tensors, `WeightShapeError` the
    tensor with expected and found shape, `UnsupportedModelError` a tensor of a wrong dtype, and biases that
    are not zero of modules without bias. A warning names all other unused tensors.
    """
    pieces = [piece for parameter in plan for piece in parameter.pieces]
    wanted = dict(pair for piece in pieces for pair in stored_tensors(piece, checkpoint, stored))
    missing = [name for name, tensor in wanted.items() if not tensor.optional and name not in checkpoint]
    if missing:
        raise MissingWeightsError(f"{checkpoint.folder} lacks {few(missing)}")
    used = {name: checkpoint[name] for name in wanted if name in checkpoint}
    for name, entry in used.items():
        _check_tensor(checkpoint, entry, wanted[name])
    _check_unused(pieces, checkpoint, {entry.name for entry in used.values()})


def _check_tensor(checkpoint: Checkpoint, entry: TensorEntry, tensor: StoredTensor) -> None:
    name = entry.name
    if entry.shape != tensor.shape:
        raise WeightShapeError(
            f"{name}: config.json implies shape {list(tensor.shape)}, the checkpoint has {list(entry.shape)}"
        )
    if entry.dtype not in tensor.dtypes:
        raise UnsupportedModelError(
            f"{name}: config.json implies {' or '.join(tensor.dtypes)}, the checkpoint has {entry.dtype}; "
            "only a quantization_config says what other numbers mean"
        )
    values = checkpoint.tensor(name).tolist() if tensor.values else []
    if values != list(tensor.values):
        raise WeightShapeError(
            f"{name}: config.json implies {list(tensor.values)}, the checkpoint has {values}"
        )


def _check_unused(pieces: Iterable[WeightPiece], checkpoint: Checkpoint, used: set[str]) -> None:
    """Check tensors that the model does not use. GPTQ's writers give every module a bias, zeros where the
    model has none: those change nothing. A tensor without a float dtype is no bias.
    """
    biases = {piece.name.rpartition(".")[0] + ".bias" for piece in pieces}
    biases |= {name.removeprefix("model.") for name in biases}
    biases = {name for name in biases & checkpoint.entries.keys() if checkpoint.entries[name].dtype in FLOATS}
    unused = [name for name in checkpoint.entries if name not in used and not name.endswith(_HARMLESS)]
    wrong = [name for name in unused if name in biases and checkpoint.tensor(name).any()]
    if wrong:
        raise UnsupportedModelError(
            f"{checkpoint.folder} has {few(wrong)}, not zero, for modules that have no bias by config.json: "
            "correct that (architectures, attention_bias, mlp_bias, enable_bias), or take the biases out"
        )
    others = [name for name in unused if name not in biases and not name.startswith(_OF_IMAGES)]
    if any(name.startswith(_OF_IMAGES) for name in unused):
        log.warning("images are not read: %s has tensors for them, which are left out", checkpoint.folder)
    if others:
        log.warning("not used, config.json describes a model without: %s", few(others))


def few(names: Sequence[str], most: int = 4) -> str:
    """The first `most` names, and how many there are beside."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def is_quantized(piece: WeightPiece, checkpoint: Checkpoint, stored: WeightFormat) -> bool:
    """Whether the checkpoint stores the piece quantized: any tensor, in its dtype."""
    if len(piece.shape) != 2:
        return False
    module = piece.name.removesuffix("weight")
    return any(
        module + name in checkpoint and checkpoint[module + name].dtype in tensor.dtypes
        for name, tensor in stored.tensors(*piece.shape).items()
    )


def stored_tensors(
    piece: WeightPiece, checkpoint: Checkpoint, stored: WeightFormat | None
) -> list[tuple[str, StoredTensor]]:
    """The checkpoint's tensors that make the piece, by name."""
    part = piece.part
    if part is not None:
        if piece.name + "_blocks" in checkpoint:
            sizes = mxfp4.stored_parts(part.count, *piece.shape)
            return [(piece.name + ending, tensor) for ending, tensor in sizes.items()]
        return [(piece.name, StoredTensor(piece.stored_shape, tuple(FLOATS)))]
    if stored is None or not is_quantized(piece, checkpoint, stored):
        return [(piece.name, StoredTensor(piece.shape, tuple(FLOATS)))]
    module = piece.name.removesuffix("weight")
    return [(module + name, tensor) for name, tensor in stored.tensors(*piece.shape).items()]
