"""Where the weights of a draft head are.

In a file beside the model, or in the checkpoint itself (MTP).
"""

from __future__ import annotations

from pathlib import Path

from sagellm.core.errors import ModelError, UnsupportedModelError
from sagellm.engines.native.architectures import read_config
from sagellm.engines.native.checkpoint import Checkpoint, read_header
from sagellm.engines.native.implementations import described
from sagellm.engines.native.model_fingerprint import model_fingerprint
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.weights import head_projection, head_root

HEAD_FILE = "draft_head.safetensors"
"""In the folder of the model."""
TRAINED_FOR = "sagellm.trained_for"
"""In the file's metadata: the mark of its model."""


def head_mark(folder: Path, checkpoint: Checkpoint) -> str:
    """The fingerprint by which a head's file names its model: weights, tokenizer, config.json."""
    return model_fingerprint(folder, checkpoint, "as stored")


def has_draft_head(folder: Path, implementation: str) -> bool:
    """Whether a model's folder has a draft head that our code can run."""
    spec = described(read_config(folder), implementation)
    if not isinstance(spec, ModelSpec):
        return False
    try:
        layout = spec.with_draft_layer()
    except UnsupportedModelError:
        return False
    return (folder / HEAD_FILE).exists() or _has_mtp(layout, Checkpoint(folder))


def _has_mtp(layout: ModelSpec, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has an MTP layer in the names of its family."""
    return head_projection(layout) in checkpoint


def add_head(checkpoint: Checkpoint, spec: ModelSpec, source: Path) -> None:
    """Add the tensors of a head to those of its model. `spec` is that with a draft layer.

    `source` is a file, or a folder with a `HEAD_FILE`; the model's own folder needs none if the checkpoint
    has a head. Raises `ModelError` where there is none, and for a head of another model.
    """
    path = source / HEAD_FILE if source.is_dir() else source
    if not path.exists():
        if source == checkpoint.folder and _has_mtp(spec, checkpoint):
            return
        raise ModelError(
            f"there is no draft head: neither {path} nor an MTP layer in the checkpoint; "
            "tools/train_draft_head.py trains one, and speculative.method suffix needs none"
        )
    entries, metadata = read_header(path)
    mark = metadata.get(TRAINED_FOR)
    if mark != head_mark(checkpoint.folder, checkpoint):
        whose = "of another model" if mark else f"without a mark of its model ({TRAINED_FOR})"
        raise ModelError(
            f"{path} is a draft head {whose}; this one, {checkpoint.folder}, needs one that was trained for "
            "it (tools/train_draft_head.py)"
        )
    strangers = [entry.name for entry in entries if not entry.name.startswith(head_root(spec))]
    if strangers:
        raise ModelError(f"{path} has {strangers[0]}; all tensors of this head begin with {head_root(spec)}")
    checkpoint.entries.update((entry.name, entry) for entry in entries)
