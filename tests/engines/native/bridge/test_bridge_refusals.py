"""What the bridge refuses, from config.json alone, and what a loaded model must show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sagellm.core.errors import MissingWeightsError, UnsupportedModelError
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.bridge.description import BridgedSpec, describe
from sagellm.engines.native.implementations import described
from tests.bridged_models import BRIDGED_MODELS, save_bridged

quiet = pytest.mark.filterwarnings("ignore")

REFUSED = {
    "bloom": "takes no position_ids",
    "bert": "attention mask is neither causal nor a causal window",
    "diffllama": "32 calls of the attention interface by 16 modules",
    "falcon_h1": "keep a state beside keys and values",
    "mamba": "takes no position_ids",
    "gpt_neo": "cannot build it",
    "gemma4_text": "keys and values of different shapes",
    "deepseek_v32": "its attention takes indices",
    "doge": "attention mask is neither causal",
    "gemma3n_text": "keys and values of other layers",
    "recurrent_gemma": "keep a state",
}


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = CONFIG_MAPPING[model_type](**changes).to_dict()
    return values


@quiet
@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_cannot_run_is_refused_from_its_configuration(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[model_type]) as caught:
        describe(config_of(model_type))
    assert "docs/models.md lists them" in str(caught.value)


@quiet
def test_a_full_size_model_is_described_without_memory() -> None:
    spec = describe(config_of("cohere2"))
    assert (spec.num_layers, spec.num_heads, spec.head_dim) == (40, 64, 128)
    assert set(spec.windows) == {4096, None}
    assert len(spec.linears) == 281
    assert spec.tied


def test_code_of_a_checkpoint_is_never_run() -> None:
    custom = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
    with pytest.raises(UnsupportedModelError, match="code that comes with a checkpoint is never run"):
        describe({**custom, "architectures": ["Mine"]})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["Gpt2Other"]}, "of type 'gpt2' it has GPT2LMHeadModel only"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized checkpoints run natively only"),
        ({"n_head": 7}, "cannot build it"),
    ],
)
def test_a_wrong_configuration_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        describe({"model_type": "gpt2", **BRIDGED_MODELS["gpt2"], **changes})


def test_native_architectures_run_natively_unless_asked_otherwise() -> None:
    llama = config_of("llama")
    llama["architectures"] = ["LlamaForCausalLM"]
    assert not isinstance(described(llama), BridgedSpec)
    assert not isinstance(described(llama, "native"), BridgedSpec)
    assert isinstance(described(llama, "transformers"), BridgedSpec)


def test_other_architectures_are_bridged_unless_told_otherwise() -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **BRIDGED_MODELS["gpt2"]}
    assert isinstance(described(config), BridgedSpec)
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel is not native .*: native are Llama"):
        described(config, "native")


def test_without_the_extra_the_refusal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagellm.engines.native.implementations.find_spec", lambda name: None)
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    for implementation in ("auto", "transformers"):
        with pytest.raises(UnsupportedModelError, match=r"not installed: pip install .*\[transformers\]"):
            described(config, implementation)


def test_a_native_model_does_not_load_transformers() -> None:
    code = (
        "import sys; from sagellm.engines.native.from_config import model_footprint; "
        "from sagellm.engines.build import load_config; model_footprint(load_config(environ={}).config); "
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@quiet
def test_missing_tensors_are_named(tmp_path: Path) -> None:
    save_bridged(tmp_path, "gpt2")
    path = tmp_path / "config.json"
    path.write_text(
        path.read_text(encoding="utf-8").replace('"n_layer": 3', '"n_layer": 4'), encoding="utf-8"
    )
    with pytest.raises(MissingWeightsError, match=r"lacks transformer\.h\.3\."):
        NativeBackend(tmp_path, device="cpu", num_blocks=8, threads=1)


@quiet
def test_a_model_that_mixes_tokens_of_a_batch_is_found_after_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bridged(tmp_path, "starcoder2")
    from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2MLP

    forward = Starcoder2MLP.forward
    monkeypatch.setattr(Starcoder2MLP, "forward", lambda self, x: forward(self, x + x.mean(1, keepdim=True)))
    with pytest.raises(UnsupportedModelError, match="token by token beside another differs by"):
        NativeBackend(tmp_path, device="cpu", num_blocks=8, threads=1)


@quiet
def test_a_refusal_gives_the_reason_first_and_what_runs_behind_it() -> None:
    config = config_of("bloom") | {"architectures": ["BloomForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match=r"^BloomForCausalLM .*position_ids.*native are Llama"):
        described(config)
    with pytest.raises(UnsupportedModelError, match="has no model_type"):
        described({})
