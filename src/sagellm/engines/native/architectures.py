"""What a Hugging Face `config.json` describes, as one frozen `ModelSpec`.

There is one reader per family, in `families`. It reads both forms of the file: transformers 4 (`rope_theta`,
`rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`). A missing key has the default of that
family's own config class. A model that the engine cannot run is refused here, from the configuration alone,
before any memory is allocated.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sagellm.core.errors import ModelError, UnsupportedModelError
from sagellm.engines.native.families import (
    deepseek,
    gemma,
    gemma4,
    glm,
    llama,
    llama4,
    mixture,
    olmo,
    opt,
    recurrent,
)
from sagellm.engines.native.families.values import Config
from sagellm.engines.native.folder_files import ConfigJson, checked, read_object
from sagellm.engines.native.model_spec import ModelSpec

_NULL_HAS_A_MEANING = ("sliding_window", "final_logit_softcapping", "attn_logit_softcapping", "q_lora_rank")


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a model folder. Raises `ModelError` if it is missing, cannot be read, is
    not JSON or has a value of the wrong kind.
    """
    path = folder / "config.json"
    if not os.path.lexists(path):
        raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    config = read_object(path)
    checked(ConfigJson, config, path)
    return config


def read_spec(config: Config) -> ModelSpec:
    """The `ModelSpec` of a parsed config.json. A `sliding_window` of 0 is none: transformers writes it for
    models whose layers do not slide. `UnsupportedModelError` names what is not supported.
    """
    given = {key: value for key, value in config.items() if value is not None or key in _NULL_HAS_A_MEANING}
    if given.get("sliding_window") == 0:
        given["sliding_window"] = None
    names = config.get("architectures") or [_architecture_of_type(config)]
    for name in names:
        if name in _READERS:
            return _READERS[name](name, given)
    raise UnsupportedModelError(
        f"architecture {', '.join(map(str, names))} is not native (model.implementation auto tries "
        f"transformers): {native_families()}"
    )


def native_families() -> str:
    """What the native engine runs, in words for a refusal."""
    families = dict.fromkeys(name.partition("For")[0] for name in _READERS)
    return f"native are {', '.join(families)}"


def is_native(config: Config) -> bool:
    """Whether the native engine has a reader for this architecture."""
    return any(name in _READERS for name in config.get("architectures") or [_architecture_of_type(config)])


def _architecture_of_type(config: Config) -> str:
    """The architecture of a folder that gives only `model_type`."""
    by_type = {name.partition("For")[0].lower(): name for name in _READERS}
    by_type |= {f"gemma{number}_text": f"Gemma{number}ForCausalLM" for number in (3, 4)}
    model_type = str(config.get("model_type", "(config.json has neither architectures nor model_type)"))
    alone = model_type.removesuffix("_text").replace("_", "")
    return by_type.get(model_type) or by_type.get(alone, model_type)


_READERS: dict[str, Callable[[str, Config], ModelSpec]] = {
    "LlamaForCausalLM": llama.llama,
    "Llama4ForCausalLM": llama4.llama4,
    "Llama4ForConditionalGeneration": llama4.llama4_text_part,
    "MistralForCausalLM": llama.mistral,
    "Qwen2ForCausalLM": llama.qwen2,
    "MiMoForCausalLM": llama.mimo,
    "Qwen3ForCausalLM": llama.qwen3,
    "OPTForCausalLM": opt.opt,
    "MixtralForCausalLM": mixture.mixtral,
    "GptOssForCausalLM": mixture.gpt_oss,
    "Qwen3MoeForCausalLM": mixture.qwen3_moe,
    "Olmo2ForCausalLM": olmo.olmo2,
    "Olmo3ForCausalLM": olmo.olmo3,
    "Phi3ForCausalLM": llama.phi3,
    "SmolLM3ForCausalLM": llama.smollm3,
    "GlmForCausalLM": glm.glm,
    "Glm4ForCausalLM": glm.glm,
    "Glm4MoeForCausalLM": glm.glm4_moe,
    "Glm4MoeLiteForCausalLM": glm.glm4_moe_lite,
    "GraniteForCausalLM": llama.granite,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3,
    "Gemma3ForConditionalGeneration": gemma.gemma3_text_part,
    "Gemma4ForCausalLM": gemma4.gemma4,
    "Gemma4ForConditionalGeneration": gemma4.gemma4_text_part,
    "DeepseekV2ForCausalLM": deepseek.deepseek,
    "DeepseekV3ForCausalLM": deepseek.deepseek,
    "GraniteMoeHybridForCausalLM": recurrent.granite_hybrid,
    "Qwen3NextForCausalLM": recurrent.qwen3_next,
    "Qwen3_5ForCausalLM": recurrent.qwen3_5,
    "Qwen3_5ForConditionalGeneration": recurrent.qwen3_5_text_part,
    "Qwen3_5MoeForCausalLM": recurrent.qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": recurrent.qwen3_5_moe_text_part,
}
