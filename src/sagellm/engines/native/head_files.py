"""Where the weights of a draft head are.

In a file beside the model, or in the checkpoint itself (MTP).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from sagellm.core.errors import ModelError, UnsupportedModelError
from sagellm.core.protocols.quantization import WeightFormat
from sagellm.engines.native.architectures import read_config
from sagellm.engines.native.checkpoint import Checkpoint, read_header
from sagellm.engines.native.implementations import described
from sagellm.engines.native.model_fingerprint import model_fingerprint
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.weights import (
    Parameter,
    block_parameters,
    few,
    head_parameters,
    head_projection,
    medusa_parameters,
    stored_tensors,
)

HEAD_FILE = "draft_head.safetensors"
"""In the folder of the model."""
TRAINED_FOR = "sagellm.trained_for"
"""In the file's metadata: the mark of its model."""

HEAD_KIND = "sagellm.head_kind"
"""In the file's metadata: one of `HeadKind`; files without it are of the kind eagle."""
HeadKind = Literal["eagle", "medusa", "block"]
MOST_LISTED = 16
"""Names in an error of the tensors that a head reads."""


def kind_of(path: Path, metadata: Mapping[str, str]) -> HeadKind:
    """The kind of a head's file with this metadata. Raises `ModelError` for an unknown one."""
    found, known = metadata.get(HEAD_KIND, "eagle"), get_args(HeadKind)
    if found not in known:
        raise ModelError(
            f"{path} is a draft head of the kind {found!r} ({HEAD_KIND}); known are {', '.join(known)}"
        )
    return cast(HeadKind, found)


def head_mark(folder: Path, checkpoint: Checkpoint) -> str:
    """The fingerprint by which a head's file names its model: weights, tokenizer, config.json."""
    return model_fingerprint(folder, checkpoint, "as stored")


@dataclass(frozen=True, slots=True)
class PlannedHead:
    """A draft head whose tensors are among its checkpoint's.

    `layout` describes the layers that have KV: those of the model, and that of the head if it is one.
    """

    kind: HeadKind
    layout: ModelSpec
    parameters: Sequence[Parameter]


def has_draft_head(folder: Path, implementation: str) -> bool:
    """Whether a model's folder has a draft head that our code can run."""
    spec = described(read_config(folder), implementation)
    if not isinstance(spec, ModelSpec):
        return False
    path = folder / HEAD_FILE
    kind = kind_of(path, read_header(path)[1]) if path.exists() else None
    try:
        layout = head_layout(spec, kind or "eagle")
    except UnsupportedModelError:
        return False
    return kind is not None or _has_mtp(layout, Checkpoint(folder))


def head_layout(spec: ModelSpec, kind: HeadKind) -> ModelSpec:
    """The layers of the model and of its head that have KV.

    Raises `UnsupportedModelError` for a model that takes no head of the kind.
    """
    if kind != "medusa":
        return spec.with_draft_layer()
    if spec.recurrent is not None:
        raise UnsupportedModelError(
            f"{spec.architecture} takes no draft head: the states of recurrent layers do not go back"
        )
    return spec


def _has_mtp(layout: ModelSpec, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has an MTP layer in the names of its family."""
    return head_projection(layout) in checkpoint


def add_head(
    checkpoint: Checkpoint, spec: ModelSpec, source: Path, stored: WeightFormat | None
) -> PlannedHead:
    """Add the tensors of a head to those of its model, of shape `spec`.

    `source` is a file, or a folder with a `HEAD_FILE`; the model's own folder needs none if the checkpoint
    has a head. `stored`: how quantized weights are stored. Raises `ModelError` where there is no head, for
    one of another model, and for a file with tensors that its kind does not read.
    """
    path = source / HEAD_FILE if source.is_dir() else source
    if not path.exists():
        layout = head_layout(spec, "eagle")
        if source == checkpoint.folder and _has_mtp(layout, checkpoint):
            return PlannedHead("eagle", layout, head_parameters(layout))
        raise ModelError(
            f"there is no draft head: neither {path} nor an MTP layer in the checkpoint; "
            "tools/train_draft_head.py trains one, and speculative.method suffix needs none"
        )
    entries, metadata = read_header(path)
    kind = kind_of(path, metadata)
    layout = head_layout(spec, kind)
    mark = metadata.get(TRAINED_FOR)
    if mark != head_mark(checkpoint.folder, checkpoint):
        whose = "of another model" if mark else f"without a mark of its model ({TRAINED_FOR})"
        raise ModelError(
            f"{path} is a draft head {whose}; this one, {checkpoint.folder}, needs one that was trained for "
            "it (tools/train_draft_head.py)"
        )
    checkpoint.entries.update((entry.name, entry) for entry in entries)
    planned = {
        "eagle": lambda: head_parameters(layout),
        "block": lambda: block_parameters(layout, checkpoint),
        "medusa": lambda: medusa_parameters(checkpoint, spec.embed_dim),
    }
    head = PlannedHead(kind, layout, planned[kind]())
    _check_all_read(path, head, [entry.name for entry in entries], checkpoint, stored)
    return head


def _check_all_read(
    path: Path, head: PlannedHead, names: Iterable[str], checkpoint: Checkpoint, stored: WeightFormat | None
) -> None:
    """Raise `ModelError` for tensors of a head that nothing reads, such as misspelt ones."""
    pieces = [piece for parameter in head.parameters for piece in parameter.pieces]
    read = dict(pair for piece in pieces for pair in stored_tensors(piece, checkpoint, stored))
    unread = [name for name in names if name not in read]
    if unread:
        missing = [name for name, each in read.items() if not each.optional and name not in checkpoint]
        lacks = f" and lacks {few(missing)}" if missing else ""
        raise ModelError(
            f"{path} has {few(unread)}{lacks}; a head of the kind {head.kind} ({HEAD_KIND}) reads "
            f"{few(list(read), MOST_LISTED)} and nothing else"
        )
