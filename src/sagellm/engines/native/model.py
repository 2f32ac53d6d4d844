"""The forward pass: a pre- or post-norm decoder over a flat batch of tokens.

Decode rows and prefill chunks lie in one [T, hidden] tensor, so every projection is one GEMM per step. There
are no torch modules: a layer is a record of tensors, and `ModelSpec` has what differs between families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn import functional as F

from sagellm.core.protocols.fusion import KernelSet, Scores
from sagellm.core.types import KVGroup
from sagellm.engines.native.attention import AttentionPlan, Span, attend
from sagellm.engines.native.feed_forward import ACTIVATION_OF, FeedForward, FeedForwardCompute, row_look_up
from sagellm.engines.native.kv_cache import LayerKind, PagedKV, layer_kinds
from sagellm.engines.native.latent_attention import LatentLayer, fewer_expanded
from sagellm.engines.native.layer_inputs import LayerInput, LayerInputs
from sagellm.engines.native.layer_parts import Linear, NormWeights, normed
from sagellm.engines.native.layer_spec import LayerShape
from sagellm.engines.native.loading import ModelWeights
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.parallel.tensor_ranks import TensorRanks
from sagellm.engines.native.recurrent.delta_layer import DeltaLayer
from sagellm.engines.native.recurrent.layer import RecurrentLayer
from sagellm.engines.native.recurrent.mamba_layer import MambaLayer
from sagellm.engines.native.recurrent.states import RecurrentRows
from sagellm.engines.native.recurrent_spec import MambaSpec
from sagellm.engines.native.rope import RopeSpec, RopeTable, apply_rope
from sagellm.engines.native.usable_kernels import usable_glue

NO_KERNELS = KernelSet()
Fresh = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""A step's new keys and values [T, kv_heads, head_dim] of layers whose KV others attend to."""
Angles = tuple[torch.Tensor, torch.Tensor]
"""The cos and sin of a step's positions, each [T, dim / 2]."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as tensors. `tokens`, `positions` and the KV `slots` of each group are [T]. The last layer's
    MLP and the head are computed for rows `sampled` [S], or for all (None). `attention` has one plan per kind
    of layers. `recurrent`: whose states the tokens continue, where the model has any.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    max_position: int
    slots: Sequence[torch.Tensor]
    sampled: torch.Tensor | None
    attention: Mapping[LayerKind, AttentionPlan]
    recurrent: RecurrentRows | None = None
    hidden: torch.Tensor | None = None
    """What a draft head reads beside each token [T, hidden]."""


Stream = tuple[torch.Tensor, torch.Tensor | None, NormWeights | None]
"""The residual stream [T, hidden], what is still to be added to it, and the norm of that, if any."""


@dataclass(slots=True)
class Batch:
    """Rows of a step on their way through the layers.

    `angles` are those of each RoPE. Queries of layers without RoPE are multiplied by `factors` [T, 1, 1].
    `inputs` [T, layers, width] are layers' own inputs. `fresh` has new K and V that later layers use too.
    """

    step: StepInputs
    kv: PagedKV
    stream: Stream
    angles: Sequence[Angles]
    factors: torch.Tensor | None
    inputs: torch.Tensor | None
    fresh: Fresh = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of one layer's attention. Its KV is that of layer `kv_layer` in the pool.

    `qkv` is fused, and begins with `gate_size` rows of an output gate; it has no keys and values where the
    KV is an earlier layer's (`has_kv` is False). `scores` is None where they are q k / sqrt(head_dim).
    """

    kind: LayerKind
    kv_layer: int
    has_kv: bool
    shape: LayerShape
    scores: Scores | None
    qkv: Linear
    gate_size: int
    q_norm: NormWeights
    k_norm: NormWeights
    output: Linear
    rope: int
    latent: LatentLayer | None = None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one decoder layer: a mixer of tokens, and an MLP.

    Behind them the layer may add an input of its own, and multiply the stream by `scale` [1]. The MLP,
    `feed_forward`, is None where other ranks have it.
    """

    attn_norm: NormWeights
    mixer: Attention | RecurrentLayer
    attn_out_norm: NormWeights
    mlp_norm: NormWeights
    feed_forward: FeedForward | None
    mlp_out_norm: NormWeights
    input: LayerInput | None
    input_norm: NormWeights
    scale: torch.Tensor | None


class DecoderModel:
    """Weights and forward pass, on one device, computed in `dtype`. `kernels` do what lies between the
    matrices, where they support this model. The residual stream `x` and the last sublayer's output, `delta`,
    are kept apart until the next norm, which takes both in one pass. `ranks` share each layer.
    """

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, dtype: torch.dtype, device: torch.device,
        kernels: KernelSet = NO_KERNELS, groups: Sequence[KVGroup] = (), ranks: TensorRanks | None = None,
    ) -> None:  # fmt: skip
        self.spec, self._ranks = spec, ranks
        self._dtype, self._wide = dtype, torch.promote_types(dtype, torch.float32)
        self._embed = weights.embedding
        self._positions = weights.tensors.get("positions.weight")
        self._project_in = weights.matrices.get("project_in")
        self._project_out = weights.matrices.get("project_out")
        self.kinds = layer_kinds(spec.kv_windows, groups)
        ropes = list(dict.fromkeys(rope for rope in spec.ropes if rope is not None))
        self._kernels = usable_glue(kernels, spec, dtype, device)
        glue = self._kernels
        make = partial(_layer, spec, weights, self.kinds, ropes, glue, device, ranks)
        self._layers = [make(i) for i in range(spec.num_layers)]
        self._final_norm = NormWeights.of(weights, "final_norm", spec.norm_offset, spec.logit_scale)
        self._head = weights.matrices.get("head")
        self._ropes = [RopeTable(rope, device, dtype, row_look_up(kernels, dtype)) for rope in ropes]
        self._feed_forward = FeedForwardCompute(spec, glue, dtype, ranks)
        self._inputs = _layer_inputs(spec, weights)
        mixers = (own.mixer for own in self._layers)
        self._shared_kv = {m.kv_layer for m in mixers if isinstance(m, Attention) and not m.has_kv}

    @property
    def waits_for_routes(self) -> bool:
        """Whether torch reads from the device how many rows experts have.

        Such steps cannot be recorded on a GPU.
        """
        kernels = self._kernels
        by_kernel = kernels.route is not None and kernels.combine is not None and kernels.grouped is not None
        return self.spec.experts is not None and not by_kernel

    def expert_rows(self) -> dict[int, list[int]]:
        """By layer with experts, how many rows each has computed.

        Padding of recorded steps is counted too.
        """
        parts = {i: own.feed_forward for i, own in enumerate(self._layers) if own.feed_forward is not None}
        mixtures = {i: part.mixture for i, part in parts.items() if part.mixture is not None}
        if not mixtures:
            return {}
        counts = torch.stack([mixture.counts for mixture in mixtures.values()]).tolist()
        return dict(zip(mixtures, counts, strict=True))

    def extend_to(self, max_position: int) -> None:
        """Make the tables for positions up to `max_position` now."""
        for rope in self._ropes:
            rope.extend_to(max_position)

    @property
    def scores(self) -> Scores | None:
        """The scores of the first attention; those of other layers differ in values only."""
        return next(own.mixer.scores for own in self._layers if isinstance(own.mixer, Attention))

    @property
    def expands(self) -> Callable[[Span], bool] | None:
        """Which prefill chunks latent attention computes in expanded form; None without."""
        latent = self.spec.latent
        return None if latent is None else partial(fewer_expanded, latent, self.spec.num_heads)

    @torch.inference_mode()
    def forward(
        self, step: StepInputs, kv: PagedKV, output: torch.Tensor | None = None, *, limited: bool = True
    ) -> torch.Tensor:
        """Logits [S, vocab] of the sampled rows, `limited` or not. Writes new K and V to `kv`."""
        hidden = self.hidden(step, kv)
        return self.head(hidden, output) if limited else self.product(hidden, output)

    def hidden(self, step: StepInputs, kv: PagedKV) -> torch.Tensor:
        """The head's input [S, hidden] for the sampled rows. Call it in inference mode. Writes the new K and
        V to `kv`.
        """
        return self._normed(self._through_layers(self._embedded(step), step, kv))

    def _through_layers(self, x: torch.Tensor, step: StepInputs, kv: PagedKV) -> Stream:
        """The stream behind the last layer, of the sampled rows, from `x` [T, hidden]."""
        batch = self._batch(x, step, kv)
        for i, layer in enumerate(self._layers):
            seen = self._attended(i, batch)
            assert layer.feed_forward is not None
            self._add(i, batch, self._feed_forward(layer.feed_forward, seen, batch.stream[0]))
        return batch.stream

    def _batch(self, x: torch.Tensor, step: StepInputs, kv: PagedKV) -> Batch:
        """The rows of a step before the first layer, from `x` [T, hidden]."""
        angles = [rope.cos_sin(step.positions, step.max_position) for rope in self._ropes]
        inputs = None if self._inputs is None else self._inputs.of(step.tokens, x)
        temperature = self.spec.temperature
        factors: torch.Tensor | None = None
        if temperature is not None:
            factors = temperature.of(step.positions, step.max_position, self._dtype)
        return Batch(step, kv, (x, None, None), angles, factors, inputs)

    def _attended(self, index: int, batch: Batch) -> torch.Tensor:
        """Let a layer attend. Returns the input [T, hidden] of its MLP, in the last layer [S, hidden]."""
        layer, step, stream = self._layers[index], batch.step, batch.stream
        seen = self._sublayer_input(stream, layer.attn_norm)
        if isinstance(layer.mixer, RecurrentLayer):
            assert step.recurrent is not None
            assert batch.kv.states is not None
            mixed = layer.mixer(seen, step.recurrent, batch.kv.states.of(index))
        else:
            mixed = self._attention(layer.mixer, seen, batch)
        stream = self._sublayer_output(stream[0], mixed, layer.attn_norm, layer.attn_out_norm)
        if index == len(self._layers) - 1 and step.sampled is not None:
            x, delta, weight = stream
            stream = x[step.sampled], None if delta is None else delta[step.sampled], weight
            batch.inputs = None if batch.inputs is None else batch.inputs[step.sampled]
        batch.stream = stream
        return self._sublayer_input(stream, layer.mlp_norm)

    def _add(self, index: int, batch: Batch, delta: torch.Tensor) -> None:
        """Add the output of a layer's MLP, and what follows it, to the stream."""
        layer = self._layers[index]
        stream = self._sublayer_output(batch.stream[0], delta, layer.mlp_norm, layer.mlp_out_norm)
        if layer.input is not None and batch.inputs is not None:
            x = self._add_norm(stream, None)
            stream = x, layer.input(x, batch.inputs[:, index]), layer.input_norm
        if layer.scale is not None:
            stream = self._add_norm(stream, None).mul_(layer.scale), None, None
        batch.stream = stream

    def _normed(self, stream: Stream) -> torch.Tensor:
        norms_now = self.spec.final_norm and not self.spec.norms_in_head
        x = self._add_norm(stream, self._final_norm if norms_now else None)
        return x if self._project_out is None else self._project_out.multiply(x)

    def head(self, hidden: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [S, vocab] of `hidden` rows, in inference mode. They are float32, or float64 for a float64
        model, and lie in `output` if that is given.
        """
        return self.limited(self.product(hidden, output))

    def limited(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits`, changed to lie within the model's limits."""
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def product(self, hidden: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        """As `head`, without the model's limits."""
        if output is None:
            output = hidden.new_empty(len(hidden), self.spec.vocab_size, dtype=self._wide)
        assert self._head is not None
        if self.spec.norms_in_head:
            hidden = self._add_norm((hidden, None, None), self._final_norm)
        if self._ranks is not None:
            return self._ranks.logits(self._head, hidden, output)
        logits: torch.Tensor = self._head.multiply(hidden, None, output)
        return logits

    def _embedded(self, step: StepInputs) -> torch.Tensor:
        assert self._embed is not None
        x: torch.Tensor = self._embed.rows(step.tokens, self._dtype, self.spec.embed_scale)
        if self._project_in is not None:
            x = self._project_in.multiply(x)
        if self._positions is not None:
            x = x + F.embedding(step.positions + self.spec.position_offset, self._positions)
        return x

    def _attention(self, own: Attention, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The output [T, hidden] of attention over `x` [T, hidden]."""
        spec, step, kv = self.spec, batch.step, batch.kv
        qkv, plan, slots = own.qkv(x), step.attention[own.kind], step.slots[own.kind[0]]
        angles = None if own.rope < 0 else batch.angles[own.rope]
        if own.latent is not None:
            assert angles is not None
            mixed = own.latent.attend(plan, kv, own.kv_layer, qkv, slots, angles, own.scores)
            return own.output(mixed.flatten(1))
        gate = qkv[:, : own.gate_size]
        heads = qkv[:, own.gate_size :].contiguous().view(len(qkv), -1, own.shape.head_dim)
        self._rope_to_cache(own, heads, angles, slots, kv)
        if own.has_kv:
            query, key, value = torch.split(heads, [spec.num_heads, *[own.shape.num_kv_heads] * 2], dim=1)
            if own.kv_layer in self._shared_kv:
                batch.fresh[own.kv_layer] = key, value
        else:
            query, (key, value) = heads, batch.fresh[own.kv_layer]
        if angles is None and batch.factors is not None:
            query = query * batch.factors
        mixed = attend(plan, kv, own.kv_layer, query, key, value, own.scores).flatten(1)
        return own.output(mixed * gate.sigmoid() if own.gate_size else mixed)

    def _sublayer_input(self, stream: Stream, norm: NormWeights) -> torch.Tensor:
        return self._add_norm(stream, norm if self.spec.norm_place in ("input", "both") else None)

    def _add_norm(self, stream: Stream, norm: NormWeights | None) -> torch.Tensor:
        """Brings the residual stream up to date. Returns its norm, or without one itself."""
        x, delta, out_norm = stream
        kernel = self._kernels.add_rms_norm
        if kernel is not None and (norm is not None or out_norm is not None):
            weight, own = norm and norm.weight, out_norm and out_norm.weight
            updated: torch.Tensor = kernel.apply(x, delta, weight, self.spec.norm_eps, own)
            return updated
        if delta is not None:
            x.add_(delta if out_norm is None else normed(self.spec, delta, out_norm))
        return x if norm is None else normed(self.spec, x, norm)

    def _sublayer_output(
        self, x: torch.Tensor, delta: torch.Tensor, norm: NormWeights, out_norm: NormWeights
    ) -> Stream:
        place = self.spec.norm_place
        if place == "residual":
            return normed(self.spec, x + delta, norm), None, None
        return x, delta, None if place == "input" else out_norm

    def _rope_to_cache(
        self, own: Attention, heads: torch.Tensor, angles: Angles | None, slots: torch.Tensor, kv: PagedKV
    ) -> None:
        """Norm and rotate queries and keys, in place, and store keys and values."""
        spec, norms, index = self.spec, (own.q_norm, own.k_norm), own.kv_layer
        if self._kernels.rope_to_cache is not None:
            cos, sin = angles or (None, None)
            cache = (slots, kv.keys[index], kv.values[index]) if own.has_kv else (None, None, None)
            self._kernels.rope_to_cache.apply(
                heads, cos, sin, *(norm.weight for norm in norms), spec.norm_eps, *cache, spec.value_eps
            )
            return
        num_kv_heads = own.shape.num_kv_heads if own.has_kv else 0
        query, key, value = torch.split(heads, [spec.num_heads, num_kv_heads, num_kv_heads], dim=1)
        parts = (query, key) if own.has_kv else (query,)
        for part, norm in zip(parts, norms, strict=False):
            if norm.weight is None:
                continue
            together = part.flatten(1) if spec.qk_norm == "all" else part
            part.copy_(normed(spec, together, norm).view(part.shape))
        if angles is not None:
            apply_rope(heads[:, : spec.num_heads + num_kv_heads], *angles)
        if spec.value_norm and own.has_kv:
            value.copy_(F.rms_norm(value, value.shape[2:], None, spec.norm_eps))
        if own.has_kv:
            kv.write(index, slots, key, value)


def _layer(
    spec: ModelSpec, weights: ModelWeights, kinds: Sequence[LayerKind], ropes: Sequence[RopeSpec],
    kernels: KernelSet, device: torch.device, ranks: TensorRanks | None, index: int,
) -> DecoderLayer:  # fmt: skip
    def norm(name: str) -> NormWeights:
        return NormWeights.of(weights, f"layers.{index}.{name}", spec.norm_offset)

    def linear(name: str, summed_over: TensorRanks | None = None) -> Linear:
        return Linear.of(weights, f"layers.{index}.{name}", summed_over)

    has_mlp = any(f"layers.{index}.{name}" in weights.matrices for name in ("up", "router"))
    feed_forward = FeedForward.of(spec, weights, device, ranks, index) if has_mlp else None
    mixer: Attention | RecurrentLayer
    if spec.attends(index):
        scores, own = _scores(spec, weights.tensors.get(f"layers.{index}.sinks")), spec.ropes[index]
        kv_layer = spec.kv_index(index)
        gate_size = spec.query_size if spec.output_gate else 0
        q_norm, k_norm = norm("q_norm"), norm("k_norm")
        if spec.qk_norm == "plain" and own is not None:
            q_norm = k_norm = NormWeights(weights.tensors["final_norm.weight"].new_ones(spec.head_dim), None)
        mixer = Attention(
            kinds[kv_layer], kv_layer, spec.has_kv(index), spec.shape(index), scores, linear("qkv"),
            gate_size, q_norm, k_norm, linear("out", ranks),
            -1 if own is None else ropes.index(own), _latent(spec, weights, index, kernels),
        )  # fmt: skip
    else:
        mixer = _recurrent_layer(spec, weights, index, linear, kernels)
    return DecoderLayer(
        norm("attn_norm"), mixer, norm("attn_out_norm"), norm("mlp_norm"), feed_forward,
        norm("mlp_out_norm"), _layer_input(spec, weights, index), norm("input_norm"),
        weights.tensors.get(f"layers.{index}.scale"),
    )  # fmt: skip


def _layer_inputs(spec: ModelSpec, weights: ModelWeights) -> LayerInputs | None:
    if spec.layer_inputs is None or weights.layer_table is None:
        return None
    norm = weights.tensors["layer_inputs_norm.weight"]
    projection = weights.matrices["layer_inputs"]
    return LayerInputs(spec.layer_inputs, weights.layer_table, projection, norm, spec.norm_eps)


def _layer_input(spec: ModelSpec, weights: ModelWeights, index: int) -> LayerInput | None:
    if spec.layer_inputs is None:
        return None
    gate, up = (weights.matrices[f"layers.{index}.input_{name}"] for name in ("gate", "up"))
    return LayerInput(gate, up, ACTIVATION_OF[spec.activation])


def _recurrent_layer(
    spec: ModelSpec, weights: ModelWeights, index: int, linear: Callable[[str], Linear], kernels: KernelSet
) -> RecurrentLayer:
    def tensor(name: str) -> torch.Tensor:
        return weights.tensors[f"layers.{index}.recurrent.{name}"]

    into, output = linear("recurrent.into"), linear("recurrent.out")
    conv, rates = tensor("conv").squeeze(1).T.contiguous(), (tensor("decay"), tensor("step_bias"))
    recurrent, norm = spec.recurrent, tensor("norm")
    if isinstance(recurrent, MambaSpec):
        bias = tensor("conv_bias") if recurrent.conv_bias else None
        skip, kernel = tensor("skip"), kernels.mamba_step
        return MambaLayer(into, output, conv, bias, recurrent, *rates, skip, norm, kernel)
    assert recurrent is not None
    gates = linear("recurrent.gates")
    return DeltaLayer(
        into, output, conv, None, recurrent, spec.norm_eps, gates, *rates, norm, kernels.delta_step
    )


def _latent(spec: ModelSpec, weights: ModelWeights, index: int, kernels: KernelSet) -> LatentLayer | None:
    if spec.latent is None:
        return None
    ours, tensors = f"layers.{index}.", weights.tensors
    return LatentLayer.of(
        spec.latent, kernels, tensors.get(ours + "query_norm.weight"),
        weights.matrices.get(ours + "query_up"), tensors[ours + "kv_norm.weight"],
        weights.matrices[ours + "kv_up"],
    )  # fmt: skip


def _scores(spec: ModelSpec, sinks: torch.Tensor | None) -> Scores | None:
    if spec.attention_scale is None and spec.score_softcap is None and sinks is None:
        return None
    scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
    if sinks is not None:
        sinks = sinks.to(torch.promote_types(sinks.dtype, torch.float32))
    return Scores(scale, spec.score_softcap, sinks)
