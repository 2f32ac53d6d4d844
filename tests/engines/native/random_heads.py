"""Random draft heads for tiny models, and what they are asked."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sagellm.core.protocols.speculative import Asked
from sagellm.core.types import Request, Tokens
from sagellm.engines.native.architectures import read_config, read_spec
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.head_files import HEAD_FILE, TRAINED_FOR, head_mark
from sagellm.engines.native.weights import as_stored, head_parameters
from tests.engines.native.driver import Running


def head_tensors(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a head for a model folder, by their names in a checkpoint."""
    spec = as_stored(read_spec(read_config(folder)), Checkpoint(folder)).with_draft_layer()
    generator = torch.Generator().manual_seed(seed)
    shapes = {piece.name: piece.stored_shape for own in head_parameters(spec) for piece in own.pieces}
    return {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) > 1 else 0.3) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def save_head(folder: Path, seed: int = 0) -> Path:
    """Write a head beside a model; returns the file."""
    path = folder / HEAD_FILE
    save_file(head_tensors(folder, seed), path, {TRAINED_FOR: head_mark(folder, Checkpoint(folder))})
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
