"""Reads any trace file of a known format, compressed or not, and writes traces."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import io
import itertools
import lzma
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal, cast

from sagellm.benchmarks.traces._parsing import (
    BrokenLineError,
    IdMap,
    IdTooLargeError,
    TraceFormat,
    TraceWriter,
    json_object,
)
from sagellm.benchmarks.traces.record import BadLine, Trace, TraceRequest
from sagellm.core.errors import ConfigError
from sagellm.core.registry import registry

KIND = "trace_format"
OnError = Literal["skip", "fail"]
COMPRESSIONS: Mapping[str, bytes] = {
    ".xz": b"\xfd7zXZ\x00",
    ".gz": b"\x1f\x8b",
    ".zst": b"\x28\xb5\x2f\xfd",
}
"""Suffixes of compressed files, and their first bytes."""
DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error)
NUM_GUESSING_LINES = 5


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of bytes. With `damage` it is no line: the file cannot be read beyond it."""

    number: int
    data: bytes
    damage: str = ""


def read_trace(
    path: str | Path,
    format: str | None = None,  # noqa: A002 - the field's word
    *,
    on_error: OnError = "fail",
    fallback: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Trace:
    """Returns the requests of a file, in order of time.

    `format` is a registered name, by default the format that recognises the first lines; `options` are that
    format's, and `fallback` further ones for a format that has them. Files compressed with xz, gzip or zstd
    are read as they are. Empty lines are ignored. A broken line raises `ConfigError` with its number, or is
    skipped and listed in `skipped`. If an id does not fit into int32, all ids of the file are replaced by
    consecutive ints; equal ids stay equal.
    """
    if on_error not in ("skip", "fail"):
        raise ConfigError(f"on_error {on_error!r}: 'skip' or 'fail'")
    try:
        return _read(Path(path), format, options, fallback, IdMap(), skip=on_error == "skip")
    except IdTooLargeError:
        return _read(Path(path), format, options, fallback, IdMap(renumber=True), skip=on_error == "skip")


def _read(
    path: Path,
    name: str | None,
    options: Mapping[str, Any],
    fallback: Mapping[str, Any],
    ids: IdMap,
    *,
    skip: bool,
) -> Trace:
    sha = hashlib.sha256()
    with opened(path) as stream:
        lines: Iterable[_Line] = _lines(stream, sha)
        if name is None:
            first = list(itertools.islice(lines, NUM_GUESSING_LINES))
            name, lines = guess_format(path, first), itertools.chain(first, lines)
        known = registry(KIND)
        fitting = {key: value for key, value in fallback.items() if key in known.options(name)}
        reader: TraceFormat = known.create(name, **{**fitting, **options})
        requests, skipped = _parse(path, lines, reader, ids, skip=skip)
    if not requests:
        first_bad = f"line {skipped[0].number}: {skipped[0].reason}" if skipped else ""
        why = f", {len(skipped):,} lines are broken; {first_bad}" if skipped else ""
        raise ConfigError(f"{path} holds no request{why}")
    start_s = min(request.time_s for request in requests) if reader.from_zero else 0.0
    if start_s:
        requests = [replace(request, time_s=request.time_s - start_s) for request in requests]
    return Trace(
        name=reader.title or title(path),
        format=name,
        block_tokens=reader.block_tokens,
        requests=tuple(sorted(requests, key=lambda request: request.time_s)),
        sha256=sha.hexdigest(),
        skipped=tuple(skipped),
    )


def _parse(
    path: Path, lines: Iterable[_Line], reader: TraceFormat, ids: IdMap, *, skip: bool
) -> tuple[list[TraceRequest], list[BadLine]]:
    requests: list[TraceRequest] = []
    skipped: list[BadLine] = []
    for line in lines:
        try:
            requests += list(reader.parse(line.number, _text(line), ids))
        except BrokenLineError as error:
            if not skip:
                raise ConfigError(
                    f"{path}, line {line.number}: {error} (on_error 'skip' leaves such lines out)"
                ) from error
            skipped.append(BadLine(line.number, str(error)))
    return requests, skipped


def _text(line: _Line) -> str:
    if line.damage:
        raise BrokenLineError(line.damage)
    try:
        return line.data.decode("utf-8-sig" if line.number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise BrokenLineError(f"no UTF-8 text: {error.reason}") from error


def guess_format(path: Path, lines: Iterable[_Line]) -> str:
    """Returns the only format that recognises one of the lines. Raises `ConfigError` with the known names."""
    known, problem = registry(KIND), "no known format has such lines"
    for line in lines:
        try:
            content = _text(line)
        except BrokenLineError as error:
            problem = f"line {line.number}: {error}"
            continue
        record = None
        with contextlib.suppress(BrokenLineError):
            record = json_object(content)
        found = [name for name in known.names() if known.create(name).recognises(content, record)]
        if len(found) == 1:
            return found[0]
    raise ConfigError(f"{path}: {problem}; name the format, one of {', '.join(known.names())}")


def _lines(stream: Iterable[bytes], sha: Any) -> Iterator[_Line]:
    """Yields the lines that are not empty, numbered. The last may say that the file is damaged."""
    number = 0
    try:
        for number, data in enumerate(stream, 1):
            sha.update(data)
            if data.strip():
                yield _Line(number, data)
    except DAMAGE as error:
        yield _Line(number + 1, b"", f"the file cannot be read from here on: {error}")


@contextmanager
def opened(path: Path) -> Iterator[Iterable[bytes]]:
    """Yields the decompressed lines of a file, whose first bytes tell its compression. Raises
    `ConfigError` naming the file."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    with raw:
        head = raw.peek(6)
        if head.startswith(COMPRESSIONS[".xz"]):
            with lzma.open(raw) as unpacked:
                yield unpacked
        elif head.startswith(COMPRESSIONS[".gz"]):
            with gzip.open(raw) as unpacked_gzip:
                yield unpacked_gzip
        elif head.startswith(COMPRESSIONS[".zst"]):
            try:
                zstandard = importlib.import_module("zstandard")
            except ImportError as error:
                raise ConfigError(
                    f"{path} is compressed with zstd: pip install zstandard, or unpack it first"
                ) from error
            yield _zstd_lines(raw, zstandard)
        else:
            yield raw


def _zstd_lines(raw: IO[bytes], zstandard: Any) -> Iterator[bytes]:
    """Decompresses all at once: the package's own stream does not report a truncated file."""
    data, parts, ended = raw.read(), [], True
    try:
        while data:
            frame = zstandard.ZstdDecompressor().decompressobj()
            parts.append(frame.decompress(data))
            data, ended = frame.unused_data, frame.eof
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error
    yield from io.BytesIO(b"".join(parts))
    if not ended:
        raise EOFError("the compressed data end too early")


def title(path: Path) -> str:
    """Returns the file's name without the suffixes of compression and format."""
    name = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSIONS else path.name
    return name.removesuffix(Path(name).suffix) or path.name


def writable_formats() -> list[str]:
    """Returns the names that `write_trace` takes."""
    known = registry(KIND)
    return [name for name in known.names() if hasattr(known.get(name), "write")]


def write_trace(
    trace: Trace,
    path: str | Path,
    format: str = "sagellm",  # noqa: A002 - the field's word
    **options: Any,
) -> None:
    """Writes `trace` to a file, compressed if its name ends in .xz or .gz. `options` are the format's.
    Raises `ConfigError` if the format cannot hold the trace or the file cannot be written; an incomplete
    file is removed."""
    path, writer = Path(path), registry(KIND).create(format, **options)
    if not hasattr(writer, "write"):
        raise ConfigError(f"{format} is only read; write {' or '.join(writable_formats())}")
    created = False
    try:
        open_text: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
        with open_text(path, "wt", encoding="utf-8", newline="\n") as file:
            created = True
            cast("TraceWriter", writer).write(trace, file)
    except BaseException as error:
        if created:
            with contextlib.suppress(OSError):
                path.unlink()
        if isinstance(error, OSError):
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        raise
