"""What transformers makes of a config.json: a traced model, or a refusal.

The model is built on the meta device, which takes no memory, and computes three tokens there. Our function in
the attention interface records each call. So shapes, windows and projections are known from config.json
alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from sagellm.core.errors import UnsupportedModelError
from sagellm.core.protocols.fusion import Scores
from sagellm.engines.native.bridge.interface import TRACED, UNKNOWN_MASK, TracedCall, scores_of, traced
from sagellm.engines.native.bridge.quiet import quiet
from sagellm.engines.native.folder_files import MAX_POSITIONS
from sagellm.engines.native.model_spec import DTYPES
from sagellm.engines.native.weights import EMBEDDING, Parameter, WeightPiece

_TOKENS = 3
_UNSTATED_POSITIONS = 2048
_ROUTERS = ("gate", "router", "shared_expert_gate")
_HARMLESS = frozenset(
    {
        "cache_position", "dropout", "head_mask", "is_causal", "output_attentions", "output_hidden_states",
        "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict",
        "s_aux", "scaling", "sliding_window", "softcap", "use_cache",
    }
)  # fmt: skip
"""Options of the interface that change nothing, or that we read."""


@dataclass(frozen=True, slots=True)
class BridgedSpec:
    """A model of transformers as its trace shows it.

    `attention_modules` are those of layer 0, 1, ...; `linears` are the plain projections, which become our
    matrices. `plan` lists all parameters under the model's own names; a tied embedding is `EMBEDDING`.
    """

    architecture: str
    model_class: Any
    config: Any
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    windows: tuple[int | None, ...]
    dtype: str
    tied: bool
    scores: Scores | None
    attention_modules: tuple[str, ...]
    linears: tuple[str, ...]
    plan: tuple[Parameter, ...]
    value_dim: None = None
    latent: None = None
    recurrent: None = None
    kv_shapes: tuple[tuple[int, int], ...] = ()

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """The windows of the layers that attend: of all."""
        return self.windows

    @property
    def prompt_head_dims(self) -> int:
        """Dims of a head's key and value together."""
        return 2 * self.head_dim

    def for_length(self, length: int) -> Self:
        """The spec for sequences of up to `length` tokens."""
        return self


def describe(config: Mapping[str, Any]) -> BridgedSpec:
    """The model that a parsed config.json describes. Raises `UnsupportedModelError` with the reason."""
    model_class, parsed = _class_and_config(config)
    name = model_class.__name__
    with quiet():
        try:
            model = _on_meta(model_class, parsed)
        except Exception as error:
            raise refusal(name, f"transformers cannot build it: {_text(error)}") from error
        _check_form(name, model)
        seen = _watched_linears(model)
        calls = _trace(name, model)
    return _spec(name, model_class, parsed, model, calls, seen)


def refusal(name: str, reason: str) -> UnsupportedModelError:
    """The error for a model that the bridge does not run."""
    return UnsupportedModelError(
        f"{name} does not run through transformers {transformers.__version__}: {reason}. Through it run "
        "decoders whose layers all attend through the library's attention interface, each once and with a "
        "causal mask or window; docs/models.md lists them"
    )


def _text(error: Exception) -> str:
    [first, *_] = [*str(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {first.rstrip(' .:')}"


def _class_and_config(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The library's classes for a config.json. Code beside the checkpoint (`auto_map`) is never looked at."""
    model_type = str(config.get("model_type"))
    shown = ", ".join(map(str, config.get("architectures") or [config.get("model_type", "this model")]))
    if config.get("quantization_config") or config.get("compression_config"):
        raise refusal(shown, "quantized checkpoints run natively only; take the one in bfloat16 or float32")
    if config.get("model_type") is None:
        raise refusal(shown, "config.json has no model_type")
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if names is None or model_type not in CONFIG_MAPPING:
        custom = ", and code that comes with a checkpoint is never run" if config.get("auto_map") else ""
        raise refusal(shown, f"it has no causal language model of type {model_type!r}{custom}")
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    given = config.get("architectures") or [model_class.__name__]
    if model_class.__name__ not in given:
        raise refusal(shown, f"of type {model_type!r} it has {model_class.__name__} only")
    try:
        with quiet():
            return model_class, CONFIG_MAPPING[model_type].from_dict(dict(config))
    except Exception as error:
        raise refusal(shown, f"it refuses config.json: {_text(error)}") from error


def _on_meta(model_class: Any, parsed: Any) -> Any:
    config = copy.deepcopy(parsed)
    with torch.device("meta"), no_init_weights():
        model = model_class._from_config(config, attn_implementation=TRACED, dtype=torch.float32)
    model.tie_weights()
    for module in model.modules():
        held = getattr(module, "config", None)
        if held is not None and hasattr(held, "_experts_implementation"):
            held._experts_implementation = "batched_mm"  # the one without data-dependent shapes
        if str(getattr(module, "rope_type", "")) in _BY_LENGTH:
            module.rope_type = "default"  # its angles depend on positions, which a trace has not
    return model.eval()


_BY_LENGTH = ("dynamic", "longrope")


def _check_form(name: str, model: Any) -> None:
    base = model.base_model
    if base is model:
        raise refusal(name, "it has no decoder apart from its head")
    if getattr(model.config, "is_encoder_decoder", False) or hasattr(model.config, "vision_config"):
        raise refusal(name, "it is not a decoder of text alone")
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise refusal(name, "it takes no position_ids, so rows of a batch cannot have their own positions")
    if getattr(model.config, "num_kv_shared_layers", 0):
        raise refusal(name, "some of its layers read keys and values of other layers")
    if getattr(model, "_is_stateful", False):
        raise refusal(name, "its layers keep a state beside keys and values")


def weight_of(linear: nn.Module) -> torch.Tensor:
    """The weight [outputs, inputs] of a plain linear.

    That of a `Conv1D` is stored transposed.
    """
    weight = linear.get_parameter("weight").detach()
    return weight.t() if isinstance(linear, Conv1D) else weight


@dataclass(slots=True)
class _Uses:
    """What a trace has seen of the linears."""

    called: set[str]
    read: set[str]


def _watched_linears(model: nn.Module) -> _Uses:
    """Notes which plain linears the next forward passes call, or read."""
    seen = _Uses(set(), set())

    class Noted(nn.Module):
        """A linear that notes its uses."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (seen.called if x.dtype == torch.float32 else seen.read).add(self.name)
            return x.new_empty(*x.shape[:-1], self.num_outputs)

        def __getattr__(self, key: str) -> Any:
            if key == "weight":
                seen.read.add(self.name)
            return super().__getattr__(key)

    for name, module in model.named_modules():
        if type(module) in (nn.Linear, Conv1D):
            num_outputs = weight_of(module).shape[0]
            module.__class__ = Noted
            module.name, module.num_outputs = name, num_outputs
    return seen


def _trace(name: str, model: Any) -> list[TracedCall]:
    """The attention calls of a forward pass, head included."""
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    mask = torch.ones(1, _TOKENS, dtype=torch.bool, device="meta")
    given = {"input_ids": ids, "position_ids": ids, "attention_mask": mask, "use_cache": False}
    try:
        with torch.inference_mode():
            calls = traced(partial(model, **given))
    except Exception as error:
        kinds = sorted(set(getattr(model.config, "layer_types", None) or ()) - set(_ATTENDING))
        reason = f"its layers are {', '.join(kinds)}, too" if kinds else f"its trace fails: {_text(error)}"
        raise refusal(name, reason) from error
    layers = getattr(model.config, "num_hidden_layers", len(calls))
    modules = {id(call.module) for call in calls}
    if len(calls) != layers or len(modules) != len(calls):
        found = f"{len(calls)} calls of the attention interface by {len(modules)} modules"
        raise refusal(name, f"{found} for {layers} layers")
    for call in calls:
        _check_call(name, call, calls[0])
    return calls


_ATTENDING = ("full_attention", "sliding_attention")


def _check_call(name: str, call: TracedCall, first: TracedCall) -> None:
    strange = sorted(call.options.keys() - _HARMLESS)
    if strange:
        raise refusal(name, f"its attention takes {', '.join(strange)}")
    if call.window == UNKNOWN_MASK:
        raise refusal(name, "its attention mask is neither causal nor a causal window")
    if (call.query, call.key, call.value) != (first.query, first.key, first.value):
        raise refusal(name, "its layers have keys and values of different shapes")
    if call.value[3] > call.key[3] or call.key[2] != _TOKENS:
        raise refusal(name, f"its queries, keys and values are {call.query}, {call.key} and {call.value}")


def _spec(
    name: str, model_class: Any, parsed: Any, model: Any, calls: Sequence[TracedCall], seen: _Uses
) -> BridgedSpec:
    first = calls[0]
    names = {id(module): path for path, module in model.named_modules()}
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is table.weight
    head_name = names.get(id(head), "")
    read = seen.read - {head_name}  # we have just looked at it
    linears = [n for n in seen.called - read if n.rpartition(".")[2] not in _ROUTERS]
    is_ours = tied and head_name in linears
    scores = [scores_of(first.key[3], call.options) for call in calls]
    dtype = str(getattr(parsed, "dtype", None) or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise refusal(name, f"its dtype is {dtype}")
    return BridgedSpec(
        architecture=name,
        model_class=model_class,
        config=parsed,
        vocab_size=_vocabulary(name, model, head),
        num_layers=len(calls),
        num_heads=first.query[1],
        num_kv_heads=first.key[1],
        head_dim=first.key[3],
        max_model_len=_length(parsed),
        windows=tuple(call.window for call in calls),
        dtype=dtype,
        tied=is_ours,
        scores=next((s for s in scores if s is not None and not s.is_scaled_only), scores[0]),
        attention_modules=tuple(names[id(call.module)] for call in calls),
        linears=tuple(sorted(linears)),
        plan=tuple(_parameters(model, table, linears, is_ours=is_ours)),
    )


def _vocabulary(name: str, model: Any, head: Any) -> int:
    if head is None:
        raise refusal(name, "it has no output embedding")
    return int(head.weight.shape[0])


def _length(config: Any) -> int:
    """Positions of a sequence. Angles that change with the batch's longest sequence are not used: a prefix
    computed with other angles could not be reused.
    """
    positions = getattr(config, "max_position_embeddings", None) or _UNSTATED_POSITIONS
    for rope in _ropes(getattr(config, "rope_parameters", None) or {}):
        if rope.get("rope_type") in _BY_LENGTH:
            stated = rope.get("original_max_position_embeddings")
            stated = stated or getattr(config, "original_max_position_embeddings", None) or positions
            positions = min(positions, stated)
    return min(int(positions), MAX_POSITIONS)


def _ropes(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The RoPE parameters of all layers, or of each type of layers."""
    nested = [inner for inner in parameters.values() if isinstance(inner, Mapping)]
    yield from nested or [parameters]


def _parameters(
    model: nn.Module, table: Any, linears: Sequence[str], *, is_ours: bool
) -> Iterator[Parameter]:
    multiplied = {f"{name}.weight" for name in linears}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name in multiplied:
            noted: Any = model.get_submodule(name.removesuffix(".weight"))
            outputs: int = noted.num_outputs
            shape = outputs, parameter.numel() // outputs
        piece = (WeightPiece(name, shape),)
        if parameter is table.weight:
            yield Parameter(EMBEDDING, piece, is_multiplied=is_ours)
        else:
            yield Parameter(name, piece, is_multiplied=name in multiplied)
