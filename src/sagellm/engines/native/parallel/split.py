"""`Split`: the part of a model that a rank has.

Tensor parallelism after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): a rank has some heads of each
attention and some columns of each MLP. Queries, keys, values and the first matrices of MLPs are divided by
outputs, the matrices behind them by inputs, so that a layer needs two sums over the ranks. Where there are
fewer KV heads than ranks, several ranks have the same one. The head is divided by tokens of the vocabulary.
The embedding is whole on every rank: a step reads a few rows of it, and dividing it would cost one more sum.

Experts are divided like MLPs, or dealt whole to the ranks (`whole_experts`). A pipeline deals the layers.

With `ffn` ranks the first rank has attention, embedding and head, and the others MLPs and experts, which are
divided among them as by tensor parallelism (MegaScale-Infer: Zhu et al. 2025, arXiv:2504.02263).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError, UnsupportedModelError
from sagellm.engines.native.experts import ExpertSpec
from sagellm.engines.native.layer_spec import LayerShape
from sagellm.engines.native.matrices import Quantization
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.weights import EMBEDDING, Kept, Parameter, WeightPiece

MOST_RANKS = 64
_OF_FFN = frozenset(
    {"up", "down", "router", "experts", "shared_gate", "router_norm", "expert_scale", "experts_norm",
     "experts_out_norm", "mlp_own_norm"}
)  # fmt: skip
"""The parameters of a layer's MLP and experts, by the first word of their names."""
Rows = Sequence[tuple[int, int]]
"""Ranges [begin, end)."""


@dataclass(frozen=True, slots=True)
class Split:
    """The part of rank `rank`.

    `tensor` ranks share each layer, or layers are dealt to `pipeline` ranks, or `ffn` ranks have the MLPs.
    """

    rank: int
    tensor: int = 1
    pipeline: int = 1
    whole_experts: bool = False
    ffn: int = 0

    @property
    def num_ranks(self) -> int:
        return self.num_kv_ranks + self.ffn

    @property
    def num_kv_ranks(self) -> int:
        """Ranks that attend: each has a part of the KV."""
        return self.tensor * self.pipeline

    def with_rank(self, rank: int) -> Split:
        return replace(self, rank=rank)

    @property
    def label(self) -> str:
        """A suffix for the fingerprint: a rank has a part of each token's KV. Empty where one has all."""
        return "" if self.ffn else f"-rank{self.rank}of{self.tensor}x{self.pipeline}"

    def share(self, count: int) -> tuple[int, int]:
        """This rank's range of `count` things, of which each has as many.

        Of fewer things than ranks it is the one that it shares with others.
        """
        if count < self.tensor:
            only = self.rank * count // self.tensor
            return only, only + 1
        return count * self.rank // self.tensor, count * (self.rank + 1) // self.tensor

    def vocabulary(self, size: int) -> tuple[int, int]:
        """The token ids of which this rank has the head. The last rank may have fewer than the others."""
        part = cdiv(size, self.tensor)
        return min(size, self.rank * part), min(size, (self.rank + 1) * part)

    def layers(self, count: int) -> tuple[int, int]:
        """The layers of this rank of `pipeline`."""
        return count * self.rank // self.pipeline, count * (self.rank + 1) // self.pipeline

    def check(self, spec: object) -> None:
        """Raise for a model that cannot be divided so. The message says what would do.

        `UnsupportedModelError` where no number of ranks would, `ConfigError` where another would.
        """
        if not isinstance(spec, ModelSpec):
            raise UnsupportedModelError(
                "a model that runs through transformers cannot be divided: set parallel.tensor and "
                "parallel.pipeline to 1, and parallel.ffn to 0"
            )
        key, count = ("tensor", self.tensor) if self.tensor > 1 else ("pipeline", self.pipeline)
        key, count = ("ffn", self.ffn) if self.ffn else (key, count)
        family = _family_obstacle(spec, key) if count > 1 else ""
        if family:
            raise UnsupportedModelError(
                f"{spec.architecture} cannot be divided by parallel.{key}: {family}; set it to 1"
            )
        if self.whole_experts and spec.experts is None:
            raise ConfigError(
                f"parallel.whole_experts: {spec.architecture} has no experts: leave it out, its layers are "
                "divided by parallel.tensor or parallel.ffn"
            )
        obstacle = self._obstacle(spec)
        if obstacle:
            changes: list[dict[str, Any]] = [{key: n} for n in range(1, MOST_RANKS + 1)]
            would_do = [str(c[key]) for c in changes if not replace(self, **c)._obstacle(spec)]
            raise ConfigError(f"parallel.{key} = {count}: {obstacle}; {', '.join(would_do)} would do")

    def _obstacle(self, spec: ModelSpec) -> str:
        """Why this number of ranks does not divide the model; empty if it does."""
        if self.pipeline > spec.num_layers:
            return f"the model has {spec.num_layers} layers"
        if self.ffn:
            return "; ".join(_wide_remainders(spec, self.ffn, whole_experts=self.whole_experts))
        return "; ".join(_remainders(spec, self.tensor, whole_experts=self.whole_experts))

    @property
    def _among_ffn(self) -> Split:
        """The part of this rank among those that have MLPs."""
        return Split(self.rank - 1, self.ffn, whole_experts=self.whole_experts)

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The shape of this rank's part."""
        if self.pipeline > 1:
            return self._stage(spec)
        if self.ffn:
            experts = spec.experts and self._among_ffn._experts(spec.experts)
            return spec if self.rank == 0 else replace(spec, experts=experts)
        return replace(
            spec,
            num_heads=spec.num_heads // self.tensor,
            num_kv_heads=max(1, spec.num_kv_heads // self.tensor),
            intermediate_size=max(1, spec.intermediate_size // self.tensor),
            shapes=tuple(self._shape(shape) for shape in spec.shapes),
            experts=spec.experts and self._experts(spec.experts),
        )

    def _shape(self, shape: LayerShape) -> LayerShape:
        return replace(
            shape,
            num_kv_heads=max(1, shape.num_kv_heads // self.tensor),
            intermediate_size=max(1, shape.intermediate_size // self.tensor),
        )

    def _experts(self, experts: ExpertSpec) -> ExpertSpec:
        shared = experts.shared_width // self.tensor
        if self.whole_experts:
            return replace(experts, shared_width=shared, held=self.share(experts.count))
        return replace(experts, shared_width=shared, width=experts.width // self.tensor)

    def _stage(self, spec: ModelSpec) -> ModelSpec:
        first, stop = self.layers(spec.num_layers)
        experts = spec.experts
        if experts is not None:
            experts = replace(experts, layers=experts.layers[first:stop])
        shapes = [replace(shape, kv_source=i) for i, shape in enumerate(spec.shapes[first:stop])]
        return replace(
            spec, num_layers=stop - first, windows=spec.windows[first:stop], ropes=spec.ropes[first:stop],
            shapes=tuple(shapes), experts=experts,
        )  # fmt: skip

    def parameters(self, plan: Sequence[Parameter], spec: ModelSpec) -> list[Parameter]:
        """This rank's part of the parameters `plan` of the whole model `spec`."""
        if self.pipeline > 1:
            return list(self._stage_parameters(plan, spec))
        if self.ffn:
            return list(self._separated(plan, spec))
        kept = [part for parameter in plan if (part := self._part(parameter, spec)) is not None]
        if spec.tied:  # the embedding stays whole, and the head is a matrix of its own
            [table] = (parameter for parameter in plan if parameter.name == EMBEDDING)
            kept = [replace(own, is_multiplied=own is not table and own.is_multiplied) for own in kept]
            head = replace(table, name="head.weight", is_multiplied=True)
            kept.append(_rows(head, [self.vocabulary(spec.vocab_size)]))
        return kept

    def _stage_parameters(self, plan: Sequence[Parameter], spec: ModelSpec) -> Iterator[Parameter]:
        first, stop = self.layers(spec.num_layers)
        at_the_ends = {EMBEDDING, "positions.weight", "project_in.weight", "head.weight"}
        for parameter in plan:
            layer, rest = _layer_of(parameter.name)
            if layer is None and (self.rank == 0 or parameter.name not in at_the_ends):
                yield parameter
            elif layer is not None and first <= layer < stop:
                yield replace(parameter, name=f"layers.{layer - first}.{rest}")

    def _separated(self, plan: Sequence[Parameter], spec: ModelSpec) -> Iterator[Parameter]:
        """This rank's parameters: all but MLPs and experts, or a part of these."""
        for parameter in plan:
            layer, rest = _layer_of(parameter.name)
            is_ffn = layer is not None and rest.partition(".")[0] in _OF_FFN
            if is_ffn != (self.rank > 0):
                continue
            part = self._among_ffn._part(parameter, spec) if is_ffn and self.ffn > 1 else parameter
            if part is not None:
                yield part

    def _part(self, parameter: Parameter, spec: ModelSpec) -> Parameter | None:
        """This rank's part of a parameter; None where another rank adds it."""
        if parameter.name == "head.weight":
            return _rows(parameter, [self.vocabulary(spec.vocab_size)])
        layer, rest = _layer_of(parameter.name)
        if layer is None:
            return parameter
        name, _, kind = rest.rpartition(".")
        if self.whole_experts and name.startswith("experts."):
            return self._held_experts(parameter, spec)
        if name in ("out", "down", "experts.down") and kind == "bias":
            return parameter if self.rank == 0 else None
        if name in ("out", "down", "experts.down"):
            return _columns(parameter, self._share_of(parameter.shape[1], spec, layer, name))
        rows = self._outputs(spec, layer, name or rest)
        return parameter if rows is None else _rows(parameter, rows)

    def _share_of(self, inputs: int, spec: ModelSpec, layer: int, name: str) -> tuple[int, int]:
        """The inputs of this rank's heads, or of its columns of an MLP."""
        if name != "out":
            return self.share(inputs)
        first, stop = self.share(spec.num_heads)
        dim = inputs // spec.num_heads
        return first * dim, stop * dim

    def _outputs(self, spec: ModelSpec, layer: int, name: str) -> Rows | None:
        """The rows that this rank has of a parameter; None: all."""
        shape, latent, (first, stop) = spec.shape(layer), spec.latent, self.share(spec.num_heads)
        experts = spec.experts
        if name == "sinks":
            return [(first, stop)]
        if latent is not None and name in ("qkv", "query_up", "kv_up"):
            dim = latent.nope_dim + latent.value_dim if name == "kv_up" else latent.key_dim
            heads, all_heads = (first * dim, stop * dim), spec.num_heads * dim
            if name != "qkv":
                return [heads]
            if latent.query_rank is not None:
                return None
            return [heads, (all_heads, all_heads + latent.width)]
        if name == "qkv":
            dim, offset = shape.head_dim, spec.num_heads * shape.head_dim
            rows = [(first * dim, stop * dim)]
            if spec.has_kv(layer):
                low, high = (head * dim for head in self.share(shape.num_kv_heads))
                rows += [(offset + at + low, offset + at + high) for at in (0, shape.kv_size)]
            return rows
        if name == "experts.up":
            assert experts is not None
            widths = [experts.width] * (2 * experts.count)
        elif name == "up":
            is_shared = spec.has_experts(layer) and not spec.has_experts_beside
            width = experts.shared_width if experts is not None and is_shared else shape.intermediate_size
            widths = [width] * (1 + (spec.gated_mlp or is_shared))
        else:
            return None
        low, high = self.share(widths[0])
        return [(i * width + low, i * width + high) for i, width in enumerate(widths)]

    def _held_experts(self, parameter: Parameter, spec: ModelSpec) -> Parameter:
        """The pieces of the experts that this rank has. There are as many for each."""
        assert spec.experts is not None
        each = len(parameter.pieces) // spec.experts.count
        first, stop = self.share(spec.experts.count)
        return replace(parameter, pieces=parameter.pieces[first * each : stop * each])


def check_stored(quantization: Quantization, split: Split) -> None:
    """Raise `UnsupportedModelError` for matrices that are stored quantized and would be divided."""
    if quantization.stored is not None and max(split.tensor, split.ffn) > 1:
        raise UnsupportedModelError(
            f"matrices that a checkpoint stores as {quantization.method} are not divided: set "
            "parallel.tensor to 1 (parallel.pipeline can be more) and parallel.ffn to at most 1, or take the "
            "unquantized checkpoint"
        )


def _family_obstacle(spec: ModelSpec, key: str) -> str:
    """Why no number above 1 divides such a model; empty if one may."""
    if key == "ffn":
        return "the sums of experts and of MLPs are normed one by one" if spec.has_experts_beside else ""
    if spec.recurrent is not None or spec.output_gate:
        return "recurrent states are not divided"
    if key == "tensor":
        together = spec.qk_norm == "all"
        return "queries and keys are normed over the heads of all ranks together" if together else ""
    if spec.layer_inputs is not None or any(shape.kv_source != i for i, shape in enumerate(spec.shapes)):
        return "its layers use the embedding, or the KV of other layers"
    return ""


def _remainders(spec: ModelSpec, num_ranks: int, *, whole_experts: bool) -> Iterator[str]:
    """What is not a multiple of the number of ranks."""
    if spec.num_heads % num_ranks:
        yield f"{spec.num_heads} heads are not divisible by it"
    layers = range(spec.num_layers)
    for heads in sorted({spec.shape(i).num_kv_heads for i in layers}):
        if heads % num_ranks and num_ranks % heads:
            yield f"{heads} KV heads are neither a multiple nor a divisor of it"
    yield from _wide_remainders(spec, num_ranks, whole_experts=whole_experts)
    if (num_ranks - 1) * cdiv(spec.vocab_size, num_ranks) >= spec.vocab_size:
        yield f"the vocabulary has {spec.vocab_size} tokens"


def _wide_remainders(spec: ModelSpec, num_ranks: int, *, whole_experts: bool) -> Iterator[str]:
    """What of MLPs and experts is not a multiple of the number of ranks."""
    layers = range(spec.num_layers)
    dense = [i for i in layers if not spec.has_experts(i) or spec.has_experts_beside]
    widths = {spec.shape(i).intermediate_size for i in dense}
    experts = spec.experts
    if experts is not None:
        widths |= {experts.shared_width} | (set() if whole_experts else {experts.width})
        if whole_experts and experts.count % num_ranks:
            yield f"{experts.count} experts are not divisible by it"
    for width in sorted(widths):
        if width % num_ranks:
            yield f"MLPs of width {width} are not divisible by it"


def _layer_of(name: str) -> tuple[int | None, str]:
    """The layer of a parameter, if it is of one, and its name within."""
    if not name.startswith("layers."):
        return None, name
    _, number, rest = name.split(".", 2)
    return int(number), rest


def _columns(parameter: Parameter, columns: tuple[int, int]) -> Parameter:
    pieces = tuple(replace(piece, kept=Kept(((0, piece.shape[0]),), columns)) for piece in parameter.pieces)
    return replace(parameter, pieces=pieces)


def _rows(parameter: Parameter, rows: Rows) -> Parameter:
    """The parameter with ascending ranges of its rows only."""
    pieces: list[WeightPiece] = []
    begin = 0
    for piece in parameter.pieces:
        end = begin + piece.shape[0]
        own = tuple((max(a, begin) - begin, min(b, end) - begin) for a, b in rows if a < end and b > begin)
        if own:
            pieces.append(replace(piece, kept=Kept(own)))
        begin = end
    return replace(parameter, pieces=tuple(pieces))
