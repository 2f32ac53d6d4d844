"""A fingerprint of a model: equal where equal tokens have equal KV, so that KV may be shared or kept."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sagellm.core.errors import ModelError
from sagellm.core.files import open_regular
from sagellm.engines.native.checkpoint import Checkpoint

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")
WHOLE_BYTES = 256 << 10
"""Tensors up to this size (norms, biases) are read whole."""
PAGE_BYTES = 4096
LINE_BYTES = 64
"""Of each page of a larger tensor one line is read."""
_PART_BYTES = 64 << 20
_LINES_PER_PAGE = PAGE_BYTES // LINE_BYTES


class _Digest(Protocol):
    def update(self, data: Any, /) -> None: ...


def model_fingerprint(folder: Path, checkpoint: Checkpoint, dtype: str) -> str:
    """32 hexadecimal digits of all of config.json, the tokenizer's files, names, dtypes and shapes of all
    tensors, tensors of up to `WHOLE_BYTES`, a 64th of the bytes of the others, and the dtype to which weights
    are rounded.

    A larger tensor is read in lines of 64 bytes, one at a place drawn at random (and always the same) in each
    4 KiB, so a change of any 8 KiB in a row is always found. One of k values at random places is missed with
    probability (63/64)^k: 21 % of 100, 1 % of 300, 10^-7 of 1000. The chat template and the sampling defaults
    do not count. To read after loading, when the pages are in memory.
    """
    digest = hashlib.sha256()
    _add(digest, dtype.encode())
    for name in ("config.json", *TOKENIZER_FILES):
        _add(digest, _content(folder / name))
    for name, entry in sorted(checkpoint.entries.items()):
        _add(digest, f"{name} {entry.dtype} {entry.shape}".encode())
        _add_tensor(digest, checkpoint, name, entry.end - entry.begin)
    return digest.hexdigest()[:32]


def _add(digest: _Digest, data: bytes) -> None:
    """With its length, so that no two lists of values are the same bytes."""
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)


def _content(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _add_tensor(digest: _Digest, checkpoint: Checkpoint, name: str, size: int) -> None:
    draw = np.random.default_rng(size)
    for part in checkpoint.stored_bytes(name, _PART_BYTES):
        sampled = 0 if size <= WHOLE_BYTES else len(part) // PAGE_BYTES * PAGE_BYTES
        if sampled:
            lines = np.frombuffer(part, f"V{LINE_BYTES}", sampled // LINE_BYTES).reshape(-1, _LINES_PER_PAGE)
            chosen = draw.integers(0, _LINES_PER_PAGE, len(lines), np.uint8)
            digest.update(lines[np.arange(len(lines)), chosen].tobytes())
            del lines
        digest.update(part[sampled:])
