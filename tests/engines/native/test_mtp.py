"""MTP layers of families, in the names of their checkpoints: against a plain twin, and unchanged outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.core.config import Config
from sagellm.core.errors import ModelError
from sagellm.engines.build import build_engine
from sagellm.engines.native.headed_backend import HeadedBackend
from tests.engines.native.driver import GREEDY, Driver, RecordingBackend, Running
from tests.engines.native.random_heads import asked
from tests.tiny_models import save_tiny

Tensors = dict[str, torch.Tensor]
NUM_LAYERS = 3
"""Of the tiny models."""


@dataclass(frozen=True)
class Family:
    """A tiny model, and its MTP layer as in the checkpoints of its family."""

    tiny: str
    root: str
    token_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    last_norm: str = "shared_head.norm"
    hidden_first: bool = False
    before_norm: bool = False
    config: tuple[tuple[str, Any], ...] = ()


FAMILIES = {
    "deepseek3": Family("deepseek3-moe-groups", "model.layers.3."),
    "glm4-moe": Family("glm4-moe", "model.layers.3."),
    "glm4-moe-lite": Family("glm4-moe-lite", "model.layers.3."),
    "mimo": Family(
        "qwen2", "model.mtp_layers.0.",
        "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
        hidden_first=True, before_norm=True,
        config=(("architectures", ["MiMoForCausalLM"]), ("model_type", "mimo")),
    ),
}  # fmt: skip


def head_of(family: Family, stored: Tensors) -> Tensors:
    """Random tensors of an MTP layer like the model's last layer, by their names in a checkpoint."""
    last, generator = f"model.layers.{NUM_LAYERS - 1}.", torch.Generator().manual_seed(7)
    size = stored["model.norm.weight"].shape[0]
    shapes = {family.root + n.removeprefix(last): t.shape for n, t in stored.items() if n.startswith(last)}
    norms = family.token_norm, family.hidden_norm, family.last_norm
    shapes |= {f"{family.root}{name}.weight": torch.Size([size]) for name in norms}
    shapes[f"{family.root}{family.projection}.weight"] = torch.Size([size, 2 * size])
    return {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
        + ("norm" in name)
        for name, shape in shapes.items()
    }


def save_family(folder: Path, family: Family) -> tuple[PreTrainedModel, Tensors]:
    """Write a model with its MTP layer. Returns the model, and the layer's tensors."""
    model, path = save_tiny(folder, family.tiny), folder / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in load_file(path).items()}
    head = head_of(family, stored)
    save_file(stored | head, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | dict(family.config)
    (folder / "config.json").write_text(json.dumps(config))
    return model, head


class Mtp(nn.Module):
    """The plain twin: a layer of transformers' model, and around it what MTP adds."""

    def __init__(self, family: Family, model: PreTrainedModel, tensors: Tensors) -> None:
        super().__init__()
        self.family, self.model, self.layer = family, model, deepcopy(model.model.layers[-1])
        own = {name.removeprefix(family.root): tensor.double() for name, tensor in tensors.items()}
        self.projection = own[family.projection + ".weight"]
        self.token_norm, self.hidden_norm, self.last_norm = (
            own[name + ".weight"] for name in (family.token_norm, family.hidden_norm, family.last_norm)
        )
        self.layer.load_state_dict({name: self._weights_of(name, own) for name in self.layer.state_dict()})

    @staticmethod
    def _weights_of(name: str, own: Tensors) -> torch.Tensor:
        """A tensor of the layer; the class has experts in one tensor each, which lie apart in checkpoints."""
        if name in own:
            return own[name]
        module, _, kind = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        return torch.stack(
            [torch.cat([own[f"{module}.{i}.{part}.weight"] for part in parts]) for i in range(8)]
        )

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.model.config.rms_norm_eps)

    def forward(self, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """What the layer gives its model's head [T, hidden], of all `tokens`."""
        embedded = self.norm(self.model.model.embed_tokens(torch.tensor(tokens)), self.token_norm)
        parts = [embedded, self.norm(hidden, self.hidden_norm)]
        joined = torch.cat(parts[::-1] if self.family.hidden_first else parts, dim=-1)
        x, positions = (joined @ self.projection.T)[None], torch.arange(len(tokens))[None]
        angles = self.model.model.rotary_emb(x, positions)
        done = self.layer(x, position_embeddings=angles, position_ids=positions, attention_mask=None)
        return self.norm(done[0], self.last_norm)

    @torch.no_grad()
    def proposal(self, tokens: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """Tokens behind `tokens`, and the probability of each, computed anew."""
        seen: list[torch.Tensor] = []
        norm = self.model.model.norm
        hook = norm.register_forward_hook(lambda _, given, found: seen.extend((given[0][0], found[0])))
        self.model(torch.tensor([tokens]))
        hook.remove()
        hidden = seen[0 if self.family.before_norm else 1]
        known, found, chances = [torch.zeros_like(hidden[0]), *hidden[:-1]], list(tokens), []
        for _ in range(count):
            known.append(self(found, torch.stack(known))[-1])
            probabilities = self.model.lm_head(known[-1]).softmax(-1)
            found.append(int(probabilities.argmax()))
            chances.append(float(probabilities.max()))
        return found[len(tokens) :], chances


class HeadedRecording(RecordingBackend, HeadedBackend):
    """A backend with a head that the driver can drive."""


def made(folder: Path, dtype: str = "float64", **options: Any) -> HeadedRecording:
    return HeadedRecording(
        folder, head=folder, num_blocks=64, max_num_seqs=4, block_size=4, threads=1, dtype=dtype, **options
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_mtp_layer_is_its_plain_twin(name: str, tmp_path: Path) -> None:
    """Prompts in chunks, and steps in decode, in float64."""
    family = FAMILIES[name]
    model, tensors = save_family(tmp_path, family)
    model.set_experts_implementation("eager")  # the default takes no float64
    twin, backend = Mtp(family, model.double(), tensors), made(tmp_path)
    driver = Driver(backend, (5,))
    sequence = driver.add(list(range(5, 20)), 30)
    compared = 0
    for _ in range(9):
        driver.step()
        if sequence.outputs:
            [found] = backend.drafter.draft([asked(sequence, 4)], 0.0)
            tokens, chances = twin.proposal(sequence.tokens, 4)
            assert list(found.token_ids) == tokens
            assert found.acceptance == pytest.approx(chances, rel=1e-5)  # the library norms in float32
            compared += 1
    assert compared == 7


@pytest.mark.parametrize("way", ["float64", "kernels"])
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_those_without_the_layer(name: str, way: str, tmp_path: Path) -> None:
    save_family(tmp_path, FAMILIES[name])
    options: dict[str, Any] = {"dtype": "float64"}
    if way == "kernels":
        options = {"dtype": "float32", "kernels": cpu_kernels, "capture": lambda _: None}
    backend = made(tmp_path, **options)

    def propose(sequence: Running) -> Sequence[int]:
        most = sequence.max_new - len(sequence.outputs) - 1
        return backend.drafter.draft([asked(sequence, 4)], 0.0)[0].token_ids[:most]

    def outputs(used: RecordingBackend, proposes: Any) -> list[list[int]]:
        driver = Driver(used, (9, 3), propose=proposes)
        done = [driver.add(list(range(3 + i, 12 + 5 * i)), 20, GREEDY, name=f"r{i}") for i in range(3)]
        driver.run()
        return [sequence.outputs for sequence in done]

    plain = RecordingBackend(tmp_path, num_blocks=64, max_num_seqs=4, block_size=4, threads=1, **options)
    assert outputs(backend, propose) == outputs(plain, lambda _: ())


def test_mimo_is_qwen2_without_the_layer(tmp_path: Path) -> None:
    """The architecture's name alone is new: tokens are those of the same weights as a Qwen2."""
    save_tiny(tmp_path / "qwen2", "qwen2")
    save_family(tmp_path / "mimo", FAMILIES["mimo"])

    def tokens(folder: Path) -> list[int]:
        driver = Driver(
            RecordingBackend(folder, num_blocks=64, max_num_seqs=4, block_size=4, threads=1, dtype="float64")
        )
        sequence = driver.add(list(range(5, 20)), 20)
        driver.run()
        return sequence.outputs

    assert tokens(tmp_path / "mimo") == tokens(tmp_path / "qwen2")


@pytest.mark.parametrize("name", FAMILIES)
def test_auto_takes_a_familys_layer(name: str, tmp_path: Path) -> None:
    def method() -> str:
        settings = {"model": {"name": str(tmp_path)}, "kv": {"num_blocks": 32}}
        engine = build_engine(Config.model_validate({"speculative": {"method": "auto"}} | settings))
        try:
            assert engine.speculation is not None
            return type(engine.speculation._proposer).__name__
        finally:
            engine.close()

    family = FAMILIES[name]
    save_family(tmp_path, family)
    assert method() == "Heads"
    path = tmp_path / "model.safetensors"
    stored = {key: value.clone() for key, value in load_file(path).items()}
    save_file({key: value for key, value in stored.items() if not key.startswith(family.root)}, path)
    assert method() == "Suffix"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("change", "told"), [("none", "there is no draft head"), ("lacks", "lacks "), ("shape", "implies shape")]
)
def test_a_layer_that_is_not_whole_is_refused(name: str, change: str, told: str, tmp_path: Path) -> None:
    family, path = FAMILIES[name], tmp_path / "model.safetensors"
    _, head = save_family(tmp_path, family)
    stored = {key: value.clone() for key, value in load_file(path).items()}
    if change == "none":
        stored = {key: value for key, value in stored.items() if key not in head}
    elif change == "lacks":
        del stored[f"{family.root}{family.last_norm}.weight"]
    else:
        key = f"{family.root}{family.projection}.weight"
        stored[key] = stored[key][:, :-1].clone()
    save_file(stored, path, {"format": "pt"})
    with pytest.raises(ModelError, match=told):
        made(tmp_path)


def test_models_that_take_no_head_say_why(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3-next")
    with pytest.raises(ModelError, match="recurrent states do not go back"):
        made(tmp_path, dtype="float32")
