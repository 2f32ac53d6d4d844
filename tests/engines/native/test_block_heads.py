"""Block drafters: what one pass proposes beside plain torch, training beside use, files that are refused."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from demo_head import AnyHead, DemoBlock, load_head
from demo_net import load_net
from demo_text import Row
from sagellm.core.errors import MissingWeightsError, ModelError, WeightShapeError
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.head_files import HEAD_KIND, TRAINED_FOR, head_mark
from tests.engines.native.random_heads import head_tensors, save_demo_head, save_head
from tests.engines.native.test_heads import WAYS, check_beside_twin, made
from tests.tiny_models import save_tiny
from train_demo_model import Progress, Run, make_optimizers
from train_draft_head import train_step


@torch.no_grad()
def outputs(tokens: Sequence[int], count: int, path: Path) -> torch.Tensor:
    """What the model's head reads for `count` tokens behind `tokens`, computed anew in plain torch."""
    net = load_net(DEMO_MODEL)
    head = load_head(path, net.config)
    assert isinstance(head, DemoBlock)
    hidden = net.hidden(torch.tensor([tokens[:-1]]))[0]
    known = torch.cat([torch.zeros(1, net.config.hidden_size), hidden])
    known = torch.cat([known, known[-1] + head.mask_embed[: count - 1]])
    text = torch.tensor([[*tokens, *[tokens[-1]] * (count - 1)]])
    found: torch.Tensor = head(net, text, known[None], [])[0, -count:]
    return found


def twin(tokens: Sequence[int], count: int, path: Path) -> list[int]:
    """What a block drafter proposes behind `tokens`."""
    return [
        int(token_id) for token_id in load_net(DEMO_MODEL).logits(outputs(tokens, count, path)).argmax(-1)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_one_pass_proposes_what_the_plain_twin_does(way: str, tmp_path: Path) -> None:
    check_beside_twin(save_demo_head(tmp_path / "head.safetensors", "block"), way, twin, 5)


def test_training_computes_what_use_does(tmp_path: Path) -> None:
    """All places of a text at once, as training does it, beside one place after the other."""
    path, net = save_demo_head(tmp_path / "head.safetensors", "block"), load_net(DEMO_MODEL)
    head, tokens = load_head(path, net.config), [1, *range(300, 312), 1, 76, 13, 400]
    with torch.no_grad():
        before = torch.nn.functional.pad(net.hidden(torch.tensor([tokens])), (0, 0, 1, 0))[:, :-1]
        guesses = head.guesses(net, torch.tensor([tokens]), before, 4)
        for start in (1, 5, 11):
            found = torch.stack([guess[0, start + number] for number, guess in enumerate(guesses)])
            torch.testing.assert_close(found, outputs(tokens[: start + 1], 4, path), atol=1e-4, rtol=1e-4)


def test_training_learns() -> None:
    net, batch = load_net(DEMO_MODEL).requires_grad_(False), [Row([*range(300, 324)], [True] * 24)]
    head = DemoBlock(net.config, 3)
    head.start_from(net)
    optimizers = make_optimizers(head, Namespace(rate=2e-3, matrix_rate=0.02))
    run: Run[AnyHead] = Run(head, optimizers, Progress(), head.forward)
    losses = [train_step(run, net, batch, 3) for _ in range(6)]
    assert losses[-1] < losses[0]
    assert head.mask_embed.abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("masks of another width", r"mask_embed: config.json implies shape \[6, 96\]"),
        ("no masks", r"lacks model\.layers\.3\.mask_embed"),
        (
            "medusa's tensors",
            r"has medusa\.0\.linear\.\w+, .* and 8 more and lacks model\.layers\.3\.\w+\.weight, ",
        ),
    ],
)
def test_a_file_that_is_no_block_drafter_of_the_model_is_refused(
    change: str, told: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, "llama")
    path, tensors = save_head(tmp_path, kind="block"), head_tensors(tmp_path, kind="block")
    masks = "model.layers.3.mask_embed"
    if change == "masks of another width":
        tensors[masks] = tensors[masks][:, :-1].clone()
    elif change == "no masks":
        del tensors[masks]
    else:
        tensors = head_tensors(tmp_path, kind="medusa")
    mark = head_mark(tmp_path, Checkpoint(tmp_path))
    save_file(tensors, path, {TRAINED_FOR: mark, HEAD_KIND: "block"})
    with pytest.raises((ModelError, WeightShapeError, MissingWeightsError), match=told):
        made(tmp_path)
