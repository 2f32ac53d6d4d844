"""A fingerprint of a model: equal where equal tokens have equal KV."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from sagellm.core.errors import ModelError
from sagellm.core.files import open_regular
from sagellm.engines.native.checkpoint import Checkpoint

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")
WHOLE_BYTES = 256 << 10
"""Tensors up to this size (norms, biases) are read whole."""
PAGE_BYTES = 4096
LINE_BYTES = 64
"""One line is read of each page of a larger tensor."""
_PART_BYTES = 64 << 20
_LINES_PER_PAGE = PAGE_BYTES // LINE_BYTES
_THREADS = 4
"""Tensors hashed side by side; most of the time goes to page faults and hashing, without Python's lock."""


def model_fingerprint(folder: Path, checkpoint: Checkpoint, dtype: str) -> str:
    """32 hexadecimal digits that identify a model's KV.

    They hash all of config.json, the tokenizer's files, names, dtypes and shapes of all tensors, tensors of
    up to `WHOLE_BYTES`, a 64th of the bytes of the others, and the dtype to which weights are rounded. The
    chat template and the sampling defaults do not count.

    Of a larger tensor one line of 64 bytes is read at a random place (always the same) in each 4 KiB, so a
    change of any 8 KiB in a row is always found. A change of k values at random places is missed with
    probability (63/64)^k: 21 % for 100, 1 % for 300, 10^-7 for 1000. Call it after loading, when the pages
    are in memory.
    """
    digest = hashlib.sha256()
    _add(digest, dtype.encode())
    for name in ("config.json", *TOKENIZER_FILES):
        _add(digest, _content(folder / name))
    names = sorted(checkpoint.entries)
    with ThreadPoolExecutor(_THREADS) as threads:
        for name, of_values in zip(names, threads.map(partial(_hash, checkpoint), names), strict=True):
            entry = checkpoint.entries[name]
            _add(digest, f"{name} {entry.dtype} {entry.shape}".encode())
            digest.update(of_values)
    return digest.hexdigest()[:32]


def _add(digest: hashlib._Hash, data: bytes) -> None:
    """Add data with its length: no two lists give the same bytes."""
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


def _hash(checkpoint: Checkpoint, name: str) -> bytes:
    """A digest of the tensor's sampled bytes."""
    size = checkpoint.entries[name].nbytes
    digest, draw = hashlib.sha256(), np.random.default_rng(size)
    for part in checkpoint.stored_bytes(name, _PART_BYTES):
        sampled = 0 if size <= WHOLE_BYTES else len(part) // PAGE_BYTES * PAGE_BYTES
        if sampled:
            lines = np.frombuffer(part, f"V{LINE_BYTES}", sampled // LINE_BYTES).reshape(-1, _LINES_PER_PAGE)
            chosen = draw.integers(0, _LINES_PER_PAGE, len(lines), np.uint8)
            digest.update(lines[np.arange(len(lines)), chosen].tobytes())
            del lines
        digest.update(part[sampled:])
    return digest.digest()
