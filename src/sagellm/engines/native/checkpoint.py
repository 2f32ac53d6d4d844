"""safetensors files as named, memory-mapped tensors: one file, or shards with an index.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, raw data
(https://github.com/huggingface/safetensors#format). Opening a checkpoint reads only headers. Data pages are
read when a tensor is copied, once, straight from the page cache, and released at once. So loading takes at
most the memory of the model, not twice that.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch

from sagellm.core.errors import MissingWeightsError, ModelError, UnsupportedModelError
from sagellm.core.files import open_regular
from sagellm.engines.native.folder_files import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20
_COPIED_BYTES = 32 << 20
CONVERT_PICKLES = (
    "pickled weights (pytorch_model.bin) are never loaded, since a pickle can run any program; transformers "
    "converts them: AutoModelForCausalLM.from_pretrained({0!r}).save_pretrained(FOLDER), and AutoTokenizer "
    "the tokenizer"
)
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8}
_DTYPES = FLOATS | _INTEGERS


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of one tensor: byte offsets `begin` and `end` in `path`."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Checkpoint:
    """All tensors of a model folder by name. Opening it checks that every file is whole. Raises
    `MissingWeightsError` for a missing file or shard, `ModelError` for one that cannot be read, is cut short
    or is not safetensors. A name also stands for the same name without its leading `model.`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, TensorEntry] = {}
        for path in _weight_files(folder):
            self.entries.update((entry.name, entry) for entry in read_header(path)[0])
        self._maps: dict[Path, mmap.mmap] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.entries or name.removeprefix("model.") in self.entries

    def __getitem__(self, name: str) -> TensorEntry:
        return self.entries[name if name in self.entries else name.removeprefix("model.")]

    def tensor(self, name: str) -> torch.Tensor:
        """The stored values of `name`, a view of the mapped file. Copy it; do not keep it or write to it."""
        entry = self[name]
        if entry.dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"tensor {entry.name} has dtype {entry.dtype}; supported are {', '.join(_DTYPES)}"
            )
        dtype = _DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self._map(entry.path), dtype=dtype, count=count, offset=entry.begin).view(
            entry.shape
        )

    def parts(
        self, name: str, dtype: torch.dtype, rows: Sequence[tuple[int, int]] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Iterator[torch.Tensor]:  # fmt: skip
        """The values of `name` in `dtype`, some rows at a time. Copy each part before the next is asked for.
        No memory of the whole tensor's size is taken. `rows`: ranges of the rows wanted; `columns`: the range
        of columns.
        """
        stored, entry = self.tensor(name), self[name]
        row_bytes = stored.nbytes // max(1, len(stored))
        most = max(1, _COPIED_BYTES // max(1, row_bytes))
        for first, stop in ((0, len(stored)),) if rows is None else rows:
            begin = entry.begin + first * row_bytes
            for part in torch.split(stored[first:stop], most):
                yield (part if columns is None else part[:, columns[0] : columns[1]]).to(dtype)
                self._release_pages(entry.path, begin, begin + part.nbytes)
                begin += part.nbytes

    def _release_pages(self, path: Path, begin: int, end: int) -> None:
        """Release the memory of bytes that have been copied."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = begin // mmap.PAGESIZE * mmap.PAGESIZE
            self._map(path).madvise(mmap.MADV_DONTNEED, first, end - first)

    def release_pages(self, name: str) -> None:
        """Release the memory of `name`, which has been read."""
        entry = self[name]
        self._release_pages(entry.path, entry.begin, entry.end)

    def stored_bytes(self, name: str, limit: int) -> Iterator[memoryview]:
        """The bytes of `name` in the file, at most `limit` at a time. Release each part before the next is
        asked for.
        """
        entry = self[name]
        for begin in range(entry.begin, entry.end, limit):
            end = min(begin + limit, entry.end)
            with memoryview(self._map(entry.path)) as whole, whole[begin:end] as part:
                yield part
            self._release_pages(entry.path, begin, end)

    def close(self) -> None:
        """Forget the mapped files; each is unmapped when its last tensor is gone."""
        self._maps.clear()

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                # A private copy-on-write map: torch warns about buffers that it may not write to.
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[path]


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if os.path.lexists(index):
        return _shards(index)
    if os.path.lexists(folder / SINGLE_FILE):
        return [folder / SINGLE_FILE]
    if any(folder.glob("model-*-of-*.safetensors")):
        hint = f": its shards are found by their index; fetch {INDEX_FILE}"
    elif any(folder.glob("*.bin")):
        hint = f": {CONVERT_PICKLES.format(str(folder))}"
    elif any(folder.glob("*.gguf")):
        hint = ": GGUF files are not read; fetch the model's safetensors files"
    else:
        hint = ": fetch the model's safetensors files"
    raise MissingWeightsError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")


def shard_names(index: Path) -> list[str]:
    """The weight files that an index names, sorted. Raises `ModelError`."""
    content = read_json(index)
    try:
        return sorted({_file_name(name) for name in content["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(
            f"{index} is not an index of shards ({error!r}): its weight_map has a file name for each tensor"
        ) from error


def _shards(index: Path) -> list[Path]:
    names = shard_names(index)
    missing = [name for name in names if not os.path.lexists(index.parent / name)]
    if missing:
        raise MissingWeightsError(
            f"{len(missing)} of {len(names)} weight files are missing in {index.parent}: "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}: fetch them again"
        )
    return [index.parent / name for name in names]


def _file_name(name: object) -> str:
    """A file in the model's folder. It may link to another folder, as in the hub's cache."""
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no file name")
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts or "\0" in name:
        raise ValueError(f"{name!r} is outside of the model's folder")
    return name


def read_header(path: Path) -> tuple[list[TensorEntry], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata. Raises `ModelError`."""
    try:
        with open_regular(path) as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(
                    f"{path} is cut short or not a safetensors file ({size} bytes): fetch it again"
                )
            raw = file.read(length)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}): it has to be a file that this user may read"
        ) from error
    try:
        header = json.loads(raw)
        metadata = dict(header.pop("__metadata__", None) or {})
        entries = [_entry(name, path, 8 + length, fields) for name, fields in header.items()]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} has a damaged safetensors header: {error!r}") from error
    end = max((entry.end for entry in entries), default=0)
    if end > size:
        raise ModelError(
            f"{path} is cut short: its header promises {end} bytes, it has {size}: fetch it again"
        )
    return entries, metadata


def _entry(name: str, path: Path, data_start: int, fields: dict[str, Any]) -> TensorEntry:
    (begin, end), shape, stored_as = fields["data_offsets"], fields["shape"], fields["dtype"]
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in (begin, end, *shape)):
        raise ValueError(f"data_offsets {begin!r}, {end!r} and shape {shape!r} must be whole numbers from 0")
    dtype = _DTYPES.get(stored_as)
    if begin > end or (dtype is not None and end - begin != math.prod(shape) * dtype.itemsize):
        raise ValueError(f"data_offsets {begin}, {end} do not fit shape {shape} of {stored_as}")
    return TensorEntry(name, path, stored_as, tuple(shape), data_start + begin, data_start + end)
