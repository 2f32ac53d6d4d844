"""OPT, with LayerNorm, learned positions, ReLU and biases everywhere."""

from __future__ import annotations

from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native.families.values import (
    Config,
    dtype_of,
    number,
)
from sagellm.engines.native.model_spec import ModelSpec, TensorNames

_OPT_NAMES = TensorNames(
    "model.decoder.", "self_attn_layer_norm", attn_out="self_attn.out_proj", mlp_norm="final_layer_norm",
    up=("fc1",), down="fc2", final_norm="final_layer_norm",
)  # fmt: skip


def opt(name: str, config: Config) -> ModelSpec:
    """Zhang et al. 2022, arXiv:2205.01068: LayerNorm, learned positions, ReLU, biases everywhere."""
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    if hidden % heads:
        raise UnsupportedModelError(f"config.json: hidden_size {hidden} is not a multiple of {heads} heads")
    pre_norm = bool(config.get("do_layer_norm_before", True))
    bias = bool(config.get("enable_bias", True))
    positions = config.get("max_position_embeddings", 2048)
    layers = number(config, "num_hidden_layers")
    return ModelSpec(
        architecture=name,
        vocab_size=number(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=number(config, "ffn_dim"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=positions,
        max_model_len=positions,
        windows=(None,) * layers,
        ropes=(None,) * layers,
        learned_positions=True,
        names=_OPT_NAMES,
        embed_dim=config.get("word_embed_proj_dim") or hidden,
        activation=config.get("activation_function", "relu"),
        dtype=dtype_of(config),
        tied=bool(config.get("tie_word_embeddings", True)),
        norm_eps=1e-5,
        rms_norm=False,
        norm_affine=bool(config.get("layer_norm_elementwise_affine", True)),
        norm_place="input" if pre_norm else "residual",
        final_norm=pre_norm and not config.get("_remove_final_layer_norm", False),
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        position_offset=2,
    )
