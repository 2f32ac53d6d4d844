"""The JSON files of a model folder, checked where the engine reads them.

Values of other keys are not checked. Any fault is a `ModelError` that names the file and the key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sagellm.core.errors import ModelError
from sagellm.core.files import read_text

MAX_TOKEN_ID = (1 << 22) - 1
MAX_POSITIONS = 1 << 27
MAX_JSON_BYTES = 256 << 20
_SHOWN_CHARS = 60

Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
Positions = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]
Positive = Annotated[float, Field(gt=0, lt=1e12)]
TokenIds = int | list[int] | None


class _StrictModel(BaseModel):
    """A strict model: "5" is not 5, and null counts as absent."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class RopeJson(_StrictModel):
    """`rope_scaling` or `rope_parameters` of config.json."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[float, Field(gt=1, lt=1e12)] | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Annotated[float, Field(ge=0, lt=1e12)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0, lt=1e12)] | None = None
    partial_rotary_factor: Positive | None = None
    original_max_position_embeddings: Positions | None = None
    truncate: bool | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    full_attention: RopeJson | None = None
    sliding_attention: RopeJson | None = None


class LayerJson(_StrictModel):
    """What one layer has of its own, in `per_layer_config`."""

    model_config = ConfigDict(extra="forbid")
    head_dim: Size | None = None
    num_key_value_heads: Size | None = None


class ConfigJson(_StrictModel):
    """config.json."""

    architectures: list[str] | None = None
    model_type: str | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    vocab_size: Size | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    ffn_dim: Size | None = None
    word_embed_proj_dim: Size | None = None
    num_hidden_layers: Layers | None = None
    num_experts: Size | None = None
    num_local_experts: Annotated[int, Field(ge=0)] | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    intermediate_size_mlp: Size | None = None
    moe_layers: list[int] | None = None
    interleave_moe_layer_step: Size | None = None
    attention_chunk_size: Size | None = None
    use_qk_norm: bool | None = None
    attn_temperature_tuning: bool | int | None = None
    floor_scale: Positive | None = None
    attn_scale: Annotated[float, Field(ge=0)] | None = None
    decoder_sparse_step: Size | None = None
    mlp_only_layers: list[int] | None = None
    norm_topk_prob: bool | None = None
    n_routed_experts: Size | None = None
    n_shared_experts: Annotated[int, Field(ge=0)] | None = None
    n_group: Size | None = None
    topk_group: Size | None = None
    topk_method: str | None = None
    scoring_func: str | None = None
    moe_layer_freq: Size | None = None
    routed_scaling_factor: Positive | None = None
    swiglu_limit: Positive | None = None
    swiglu_alpha: Positive | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    global_head_dim: Size | None = None
    num_global_key_value_heads: Size | None = None
    per_layer_config: dict[str, LayerJson] | None = None
    num_kv_shared_layers: Annotated[int, Field(ge=0)] | None = None
    attention_k_eq_v: bool | None = None
    use_double_wide_mlp: bool | None = None
    hidden_size_per_layer_input: Annotated[int, Field(ge=0)] | None = None
    vocab_size_per_layer_input: Size | None = None
    enable_moe_block: bool | None = None
    top_k_experts: Size | None = None
    max_position_embeddings: Positions | None = None
    original_max_position_embeddings: Positions | None = None
    sliding_window: Annotated[int, Field(ge=0)] | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Field(ge=0)] | None = None
    layer_types: list[str] | None = None
    rope_theta: Annotated[float, Field(gt=1, lt=1e12)] | None = None
    rope_scaling: RopeJson | None = None
    rope_parameters: RopeJson | None = None
    rope_local_base_freq: Annotated[float, Field(gt=1, lt=1e12)] | None = None
    partial_rotary_factor: Positive | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Size | None = None
    sliding_window_pattern: Size | None = None
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    embedding_multiplier: Positive | None = None
    residual_multiplier: Positive | None = None
    attention_multiplier: Positive | None = None
    logits_scaling: Positive | None = None
    use_bidirectional_attention: bool | str | None = None
    kv_lora_rank: Size | None = None
    q_lora_rank: Size | None = None
    qk_rope_head_dim: Size | None = None
    qk_nope_head_dim: Size | None = None
    v_head_dim: Size | None = None
    rope_interleave: bool | None = None
    mamba_n_heads: Size | None = None
    mamba_d_head: Size | str | None = None
    mamba_expand: Size | None = None
    shared_intermediate_size: Annotated[int, Field(ge=0)] | None = None
    first_k_dense_replace: Annotated[int, Field(ge=0)] | None = None
    rms_norm_eps: Annotated[float, Field(ge=0, lt=1)] | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    activation_function: str | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    enable_bias: bool | None = None
    do_layer_norm_before: bool | None = None
    layer_norm_elementwise_affine: bool | None = None
    remove_final_layer_norm: bool | None = Field(default=None, alias="_remove_final_layer_norm")
    eos_token_id: TokenIds = None
    text_config: ConfigJson | None = None
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None


class GenerationJson(_StrictModel):
    """generation_config.json."""

    eos_token_id: TokenIds = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class NamedTemplate(_StrictModel):
    name: str
    template: str


class AddedTokenJson(_StrictModel):
    content: str


Token = TypeVar("Token")


class _SpecialTokens(_StrictModel, Generic[Token]):
    """Special tokens by name, in the order in which a vocabulary gets them."""

    bos_token: Token | None = None
    eos_token: Token | None = None
    unk_token: Token | None = None
    sep_token: Token | None = None
    pad_token: Token | None = None
    cls_token: Token | None = None
    mask_token: Token | None = None


SPECIAL_NAMES = tuple(_SpecialTokens.model_fields)


class TokenizerConfigJson(_SpecialTokens[str | AddedTokenJson]):
    """tokenizer_config.json and special_tokens_map.json."""

    chat_template: str | list[NamedTemplate] | None = None


class NewTokenJson(_StrictModel):
    """A token that is added to a vocabulary: an object, or its text alone."""

    content: Annotated[str, Field(min_length=1)]
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = False

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        return {"content": value} if isinstance(value, str) else value


class BpeConfigJson(_SpecialTokens[NewTokenJson]):
    """What tokenizer_config.json and special_tokens_map.json hold for a tokenizer in vocab.json."""

    add_prefix_space: bool | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    additional_special_tokens: list[NewTokenJson] | None = None
    extra_special_tokens: list[NewTokenJson] | None = None
    added_tokens_decoder: dict[str, NewTokenJson] | None = None


Checked = TypeVar("Checked", bound=BaseModel)


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises `ModelError` if it cannot be read or is not JSON."""
    try:
        return json.loads(read_text(path, MAX_JSON_BYTES))
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}): it has to be a file that this user may read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, as `read_json` reads it."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def read_model_text(path: Path) -> str:
    """The text of a file. Raises `ModelError` if it cannot be read."""
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def read_optional(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an absent file is an empty one."""
    return read_object(path) if os.path.lexists(path) else {}


def check_token_ids(ids: Iterable[Any], path: Path) -> None:
    """Raise `ModelError` for a value that is no token id. A large id makes tokenizers take gigabytes or end
    the process.
    """
    wrong = [token_id for token_id in ids if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID]
    if wrong:
        raise ModelError(
            f"{path}: a token has the id {wrong[0]!r}; ids are whole numbers up to {MAX_TOKEN_ID}"
        )


def read_checked(kind: type[Checked], path: Path) -> Checked:
    """An optional file as a `kind`; raises as `checked`."""
    return checked(kind, read_optional(path), path)


def checked(kind: type[Checked], value: Any, path: Path) -> Checked:
    """`value` as a `kind`. Raises `ModelError` that names the first wrong key."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        shown = repr(first["input"])[:_SHOWN_CHARS]
        raise ModelError(f"{path}: {key} is {shown}: {first['msg'].lower()}") from error
