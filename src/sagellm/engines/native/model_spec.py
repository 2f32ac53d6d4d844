"""Shape and wiring of a decoder-only transformer.

What differs between families is a field of `ModelSpec`; their readers are in `families`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sagellm.core.errors import UnsupportedModelError
from sagellm.core.types import Window
from sagellm.engines.native.experts import ExpertSpec
from sagellm.engines.native.folder_files import MAX_POSITIONS
from sagellm.engines.native.head_spec import DEEPSEEK_HEAD, HeadSpec
from sagellm.engines.native.latent_spec import LatentSpec
from sagellm.engines.native.layer_spec import LayerInputSpec, LayerShape, TemperatureSpec
from sagellm.engines.native.recurrent_spec import DeltaSpec, MambaSpec
from sagellm.engines.native.rope import RopeSpec

DTYPES = ("float32", "bfloat16", "float16", "float64")
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu")
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
)
_POSITIVE = ("attention_scale", "score_softcap", "embed_scale", "logit_scale", "logit_softcap")


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A family's names in its checkpoints.

    All but `head` are below `root`; those of a layer are below the layer. `qkv` and `up` are stacked. The
    output norms are there where `ModelSpec.norm_place` has them. `stacked_up` and `stacked_down` are tensors
    of all experts of a layer. The shared experts' matrices have the names of an expert's, if none are given.
    """

    root: str = "model."
    attn_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attn_out: str = "self_attn.o_proj"
    attn_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_out_norm: str = ""
    final_norm: str = "norm"
    head: str = "lm_head"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    stacked_up: str = "gate_up_proj"
    stacked_down: str = "down_proj"
    shared_experts: str = "mlp.shared_experts"
    shared_up: tuple[str, ...] = ()
    shared_down: str = ""
    recurrent: str = "linear_attn"


NORM_PLACES = ("input", "residual", "output", "both")
"""Of a sublayer f with residual x: x + f(norm(x)); norm(x + f(x)); x + norm(f(x)); x + norm(f(norm(x)))."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and wiring of a decoder-only transformer. `windows[i]` is what layer i sees; None means all.
    `ropes[i]` are the rotations of layer i, None for none; with `learned_positions` (OPT) a table of them
    begins with `position_offset` unused rows. `embed_dim` differs from `hidden_size` where the embedding is
    projected in and out.

    `norm_place` is one of `NORM_PLACES`; `norm_offset` is added to the weights of all norms. `qk_norm`:
    "head" norms each head of queries and keys, "all" the heads together, "plain" each head of layers with
    RoPE, without weights. Attention scores are scaled by `attention_scale`, None means 1/sqrt(head_dim), and
    limited to +-`score_softcap`; with `attention_sinks` each head has one more logit. Embeddings are
    multiplied by `embed_scale`, logits by `logit_scale`; they are limited to +-`logit_softcap`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    max_model_len: int
    windows: tuple[Window | None, ...]
    ropes: tuple[RopeSpec | None, ...]
    embed_dim: int
    activation: str
    dtype: str
    tied: bool
    norm_eps: float = 1e-6
    rms_norm: bool = True
    norm_affine: bool = True
    norm_place: str = "input"
    norm_offset: float = 0.0
    final_norm: bool = True
    gated_mlp: bool = True
    qk_norm: str = ""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    position_offset: int = 0
    attention_scale: float | None = None
    score_softcap: float | None = None
    attention_sinks: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    learned_positions: bool = False
    experts: ExpertSpec | None = None
    names: TensorNames = TensorNames()
    latent: LatentSpec | None = None
    """Latent attention: the cache has one KV head of `latent.width` numbers."""
    recurrent: DeltaSpec | MambaSpec | None = None
    """Layers with a recurrent state in the place of attention; they have no KV."""
    output_gate: bool = False
    """Attention's output is multiplied by the sigmoid of a gate, whose rows follow each head's query."""
    shapes: tuple[LayerShape, ...] = ()
    """Of each layer, where they differ."""
    value_norm: bool = False
    """Each value head is normed, without weights."""
    layer_inputs: LayerInputSpec | None = None
    temperature: TemperatureSpec | None = None
    layer_scale: bool = False
    """What a layer leaves in the residual stream is multiplied by one number."""
    draft_head: HeadSpec = DEEPSEEK_HEAD
    """The names of a draft head, and what it reads."""
    norms_in_head: bool = False
    """The last norm is part of the head, so that hidden states are those before it."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UnsupportedModelError(f"config.json: {name} must be a positive integer, got {value!r}")
        if self.max_model_len > MAX_POSITIONS:
            raise UnsupportedModelError(
                f"config.json: {self.max_model_len} positions; at most {MAX_POSITIONS} are supported"
            )
        for shape in self.shapes or (self.shape(0),):
            if self.num_heads % shape.num_kv_heads:
                raise UnsupportedModelError(
                    f"config.json: {self.num_heads} heads, not a multiple of {shape.num_kv_heads} KV heads"
                )
        for name in _POSITIVE:
            number = getattr(self, name)
            if number is not None and not 0 < number < float("inf"):
                raise UnsupportedModelError(f"config.json: {name} must be positive, got {number!r}")
        if self.activation not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"activation {self.activation!r} is not supported; these are: {', '.join(ACTIVATIONS)}"
            )
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(
                f"dtype {self.dtype!r} is not supported; these are: {', '.join(DTYPES)}"
            )

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def has_experts_beside(self) -> bool:
        """Whether layers have experts beside an MLP."""
        return self.experts is not None and self.experts.beside_mlp

    def attends(self, layer: int) -> bool:
        """Whether a layer attends."""
        return self.recurrent is None or not self.recurrent.layers[layer]

    def shape(self, layer: int) -> LayerShape:
        """Heads and MLP of a layer."""
        if self.shapes:
            return self.shapes[layer]
        return LayerShape(self.num_kv_heads, self.head_dim, self.intermediate_size, layer)

    def has_kv(self, layer: int) -> bool:
        """Whether a layer has KV of its own."""
        return self.attends(layer) and self.shape(layer).kv_source == layer

    def kv_index(self, layer: int) -> int:
        """Which of the layers with KV a layer attends to."""
        return sum(map(self.has_kv, range(self.shape(layer).kv_source)))

    @property
    def kv_windows(self) -> tuple[Window | None, ...]:
        """The windows of the layers that have KV."""
        return tuple(window for i, window in enumerate(self.windows) if self.has_kv(i))

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """KV heads and head dim of layers with KV; empty: all the same."""
        found = [(s.num_kv_heads, s.head_dim) for i, s in enumerate(self.shapes) if self.has_kv(i)]
        return () if set(found) <= {(self.num_kv_heads, self.head_dim)} else tuple(found)

    @property
    def value_eps(self) -> float | None:
        """The eps of the norm of values; None: they are not normed."""
        return self.norm_eps if self.value_norm else None

    @property
    def rope(self) -> RopeSpec | None:
        """The rotations of the first layer that has any."""
        return next((rope for rope in self.ropes if rope is not None), None)

    def for_length(self, max_length: int) -> ModelSpec:
        """The same for an engine whose sequences have at most so many tokens."""
        return replace(self, ropes=tuple(rope and rope.for_length(max_length) for rope in self.ropes))

    def with_draft_layer(self) -> ModelSpec:
        """With one layer more, like the last: that of a draft head.

        Raises `UnsupportedModelError` for a model that has no room for one.
        """
        if self.recurrent is not None:
            raise UnsupportedModelError(
                f"{self.architecture} takes no draft head, and its MTP layer is not read: recurrent states "
                "do not go back behind a refused token; set speculative.method to none"
            )
        others = self.shapes, self.layer_inputs, self.layer_scale, self.learned_positions
        if any(others) or self.embed_dim != self.hidden_size:
            raise UnsupportedModelError(
                f"{self.architecture} takes no draft head: its layers differ, or more than the token goes "
                "into the first"
            )
        experts = self.experts
        if experts is not None:
            experts = replace(experts, layers=(*experts.layers, experts.layers[-1]))
        return replace(
            self, num_layers=self.num_layers + 1, windows=(*self.windows, self.windows[-1]),
            ropes=(*self.ropes, self.ropes[-1]), experts=experts,
        )  # fmt: skip

    def with_layers(self, layers: Sequence[int]) -> ModelSpec:
        """With some of the layers alone.

        Raises `UnsupportedModelError` where a layer has a state or an input of its own, or attends to the KV
        of one that is left out.
        """
        if self.recurrent is not None or self.layer_inputs is not None:
            what = "recurrent layers" if self.recurrent is not None else "layers with inputs of their own"
            raise UnsupportedModelError(f"{self.architecture} has {what}: it runs with all of them alone")
        sources = {self.shape(index).kv_source for index in layers}
        if missing := sorted(sources - set(layers)):
            raise UnsupportedModelError(
                f"layers {', '.join(map(str, missing))} are left out, to whose KV others attend"
            )
        experts = self.experts
        if experts is not None:
            experts = replace(experts, layers=tuple(experts.layers[index] for index in layers))
        return replace(
            self, num_layers=len(layers), windows=tuple(self.windows[index] for index in layers),
            ropes=tuple(self.ropes[index] for index in layers), experts=experts,
            shapes=tuple(
                replace(self.shapes[index], kv_source=layers.index(self.shapes[index].kv_source))
                for index in (layers if self.shapes else ())
            ),
        )  # fmt: skip

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def prompt_head_dims(self) -> int:
        """Dims of a head's key and value together, as long prompts compute them."""
        return self.latent.key_dim + self.latent.value_dim if self.latent else 2 * self.head_dim

    @property
    def value_dim(self) -> int | None:
        """The leading numbers of a cached key that are its value. None: values lie elsewhere."""
        return self.latent.rank if self.latent else None

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
