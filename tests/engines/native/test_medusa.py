"""Medusa: what its blocks propose beside plain torch, which models take it, which files are refused."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from demo_head import AnyHead, DemoMedusa, load_head
from demo_net import load_net
from demo_text import Row
from sagellm.core.errors import MissingWeightsError, ModelError, WeightShapeError
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.checkpoint import Checkpoint, read_header
from sagellm.engines.native.head_files import HEAD_KIND, TRAINED_FOR, has_draft_head, head_mark
from tests.engines.native.driver import Driver, RecordingBackend
from tests.engines.native.random_heads import head_tensors, save_demo_head, save_head
from tests.engines.native.test_heads import WAYS, check_beside_twin, made, proposals
from tests.tiny_models import save_tiny
from train_demo_model import Progress, Run, make_optimizers
from train_draft_head import held_out, train_step


@torch.no_grad()
def twin(tokens: list[int], count: int, path: Path) -> list[int]:
    """What the blocks of a file propose behind `tokens`, in plain torch."""
    net, stored = load_net(DEMO_MODEL), load_file(path)
    last = net.hidden(torch.tensor([tokens[:-1]]))[0, -1]
    found = []
    for block in range(count):
        weight, bias = (stored[f"medusa.{block}.linear.{ending}"].float() for ending in ("weight", "bias"))
        found.append(int(net.logits(last + torch.nn.functional.silu(weight @ last + bias)).argmax()))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_blocks_propose_what_their_plain_twin_does(way: str, tmp_path: Path) -> None:
    check_beside_twin(save_demo_head(tmp_path / "head.safetensors", "medusa"), way, twin, 4)


def test_training_puts_guesses_at_the_places_that_they_are_of(tmp_path: Path) -> None:
    path, net = save_demo_head(tmp_path / "head.safetensors", "medusa"), load_net(DEMO_MODEL)
    head, tokens = load_head(path, net.config), [1, *range(300, 312), 1, 76, 13, 400]
    with torch.no_grad():
        before = torch.nn.functional.pad(net.hidden(torch.tensor([tokens])), (0, 0, 1, 0))[:, :-1]
        guesses = head.guesses(net, torch.tensor([tokens]), before, 4)
        for start in (1, 5, 11):
            found = [int(net.logits(guess[0, start + n]).argmax()) for n, guess in enumerate(guesses)]
            assert found == twin(tokens[: start + 1], 4, path)


def test_training_learns_and_says_what_is_accepted(tmp_path: Path) -> None:
    net, batch = load_net(DEMO_MODEL).requires_grad_(False), [Row([*range(300, 324)], [True] * 24)]
    head = DemoMedusa(net.config, 3)
    head.start_from(net)
    optimizers = make_optimizers(head, Namespace(rate=2e-3, matrix_rate=0.02))
    run: Run[AnyHead] = Run(head, optimizers, Progress(), head.forward)
    losses = [train_step(run, net, batch, 3) for _ in range(6)]
    assert losses[-1] < losses[0]
    rates = held_out(net, head, Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")), 1, 3)
    assert len(rates) == 3
    assert 1 >= rates[0] >= rates[1] >= rates[2] >= 0


@pytest.mark.parametrize("name", ["gemma4", "opt-post-norm-projected", "mistral-window"])
def test_models_that_take_no_layer_take_medusa(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    plain = RecordingBackend(
        tmp_path, num_blocks=64, max_num_seqs=4, block_size=4, threads=1, dtype="float64"
    )
    save_head(tmp_path, kind="medusa")
    assert has_draft_head(tmp_path, "auto")
    backend = made(tmp_path, dtype="float64")
    driver = Driver(backend, propose=lambda s: proposals(backend, s, 5))
    alone = Driver(plain)
    sequences = [each.add(list(range(5, 15)), 20) for each in (driver, alone)]
    driver.run()
    alone.run()
    assert sequences[0].outputs == sequences[1].outputs
    schemas = [replace(each.get_kv_schema(), model_fingerprint="") for each in (backend, plain)]
    assert schemas[0] == schemas[1]  # Medusa has no KV


def test_recurrent_models_take_none(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3-next")
    save_head(tmp_path, kind="medusa")
    assert not has_draft_head(tmp_path, "auto")
    with pytest.raises(
        ModelError, match="takes no draft head: the states of recurrent layers do not go back"
    ):
        made(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("a shape", r"medusa\.1\.linear\.weight: config.json implies shape \[96, 96\]"),
        ("a gap", r"lacks medusa\.1\.linear\.weight"),
        ("no block", r"lacks medusa\.0\.linear\.weight"),
        (
            "a stranger",
            r"has model\.norm\.weight; a head of the kind medusa .* reads medusa\.0\.linear\.weight",
        ),
        ("a misspelt name", r"has medusa\.1\.liner\.bias and lacks medusa\.1\.linear\.bias; "),
        ("another model", "of another model"),
    ],
)
def test_a_file_that_is_no_medusa_of_the_model_is_refused(change: str, told: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    path, tensors = save_head(tmp_path, kind="medusa"), head_tensors(tmp_path, kind="medusa")
    name, mark = "medusa.1.linear.weight", head_mark(tmp_path, Checkpoint(tmp_path))
    if change == "a shape":
        tensors[name] = tensors[name][:-1].clone()
    elif change == "a gap":
        del tensors[name]
    elif change == "no block":
        tensors.clear()
    elif change == "a stranger":
        tensors["model.norm.weight"] = tensors[name].clone()
    elif change == "a misspelt name":
        tensors["medusa.1.liner.bias"] = tensors.pop("medusa.1.linear.bias")
    else:
        mark = "0" * 32
    save_file(tensors, path, {TRAINED_FOR: mark, HEAD_KIND: "medusa"})
    with pytest.raises((ModelError, WeightShapeError, MissingWeightsError), match=told):
        made(tmp_path)


def test_the_file_says_its_kind(tmp_path: Path) -> None:
    _, metadata = read_header(save_demo_head(tmp_path / "head.safetensors", "medusa"))
    assert metadata[HEAD_KIND] == "medusa"
