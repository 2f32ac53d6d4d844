"""Random draft heads for tiny models, and what they are asked."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo_head import HEADS, load_head
from demo_net import load_net
from sagellm.core.protocols.speculative import Asked
from sagellm.core.types import Request, Tokens
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.architectures import read_config, read_spec
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.head_files import HEAD_FILE, HEAD_KIND, TRAINED_FOR, HeadKind, head_mark
from sagellm.engines.native.weights import MASKS, as_stored, head_parameters, head_root
from tests.engines.native.driver import Running
from train_draft_head import export

MEDUSA_BLOCKS, BLOCK_PLACES = 6, 7


def head_tensors(folder: Path, seed: int = 0, kind: HeadKind = "eagle") -> dict[str, torch.Tensor]:
    """The tensors of a head for a model folder, by their names in a checkpoint."""
    spec = as_stored(read_spec(read_config(folder)), Checkpoint(folder))
    generator = torch.Generator().manual_seed(seed)
    if kind == "medusa":
        size = spec.embed_dim
        blocks = [f"medusa.{block}.linear" for block in range(MEDUSA_BLOCKS)]
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size, size) for name in blocks}
        shapes |= {f"{name}.bias": (size,) for name in blocks}
    else:
        planned = head_parameters(spec.with_draft_layer())
        shapes = {piece.name: piece.stored_shape for own in planned for piece in own.pieces}
        if kind == "block":
            shapes[head_root(spec.with_draft_layer()) + MASKS] = (BLOCK_PLACES - 1, spec.hidden_size)
    return {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) > 1 else 0.3) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def save_head(folder: Path, seed: int = 0, kind: HeadKind = "eagle") -> Path:
    """Write a head beside a model; returns the file. One of the kind eagle does not say so."""
    path, metadata = folder / HEAD_FILE, {TRAINED_FOR: head_mark(folder, Checkpoint(folder))}
    save_file(
        head_tensors(folder, seed, kind), path, metadata | ({} if kind == "eagle" else {HEAD_KIND: kind})
    )
    return path


def add_mtp(folder: Path, seed: int = 0) -> None:
    """Write a head into the model's checkpoint, in its family's names."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()} | head_tensors(folder, seed)
    save_file(tensors, path, {"format": "pt"})


def asked(sequence: Running, count: int) -> Asked:
    """What the engine asks a head for `count` tokens behind a sequence."""
    request = Request(sequence.name, Tokens(sequence.tokens[: sequence.num_prompt]), sequence.params)
    return Asked(request, Tokens(sequence.tokens), count)


def save_demo_head(path: Path, kind: HeadKind, count: int = 5, scale: float = 0.2) -> Path:
    """Write a head of `count` tokens for the demo model.

    One that is a layer is the shipped one, with random masks; blocks of Medusa are random.
    """
    net = load_net(DEMO_MODEL)
    head = HEADS[kind](net.config, count)
    generator = torch.Generator().manual_seed(0)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=scale, generator=generator)
    if kind != "medusa":
        head.load_state_dict(load_head(DEMO_MODEL / HEAD_FILE, net.config).state_dict(), strict=False)
    export(head, DEMO_MODEL, path)
    return path
