"""`write_trace`: a trace as a file of any format that can be written."""

from __future__ import annotations

import contextlib
import gzip
import lzma
from pathlib import Path
from typing import Any, TextIO, cast

from sagellm.benchmarks.traces._parsing import TraceWriter
from sagellm.benchmarks.traces.reading import KIND
from sagellm.benchmarks.traces.record import Trace
from sagellm.core.errors import ConfigError
from sagellm.core.registry import registry


def writable_formats() -> list[str]:
    """The names that `write_trace` takes."""
    known = registry(KIND)
    return [name for name in known.names() if hasattr(known.get(name), "write")]


def write_trace(
    trace: Trace,
    path: str | Path,
    format: str = "sagellm",  # noqa: A002 - the field's word
    **options: Any,
) -> None:
    """Write `trace` to a file, compressed if its name ends in .xz or .gz; `options` are the format's.

    Raises `ConfigError` where the format cannot hold it or the file cannot be written; a file that was begun
    is removed then.
    """
    path, writer = Path(path), registry(KIND).create(format, **options)
    if not hasattr(writer, "write"):
        raise ConfigError(f"{format} is only read; write {' or '.join(writable_formats())}")
    try:
        out = _create(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    try:
        with out:
            cast("TraceWriter", writer).write(trace, out)
    except BaseException as error:
        with contextlib.suppress(OSError):
            path.unlink()
        if isinstance(error, OSError):
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        raise


def _create(path: Path) -> TextIO:
    if path.suffix == ".xz":
        return lzma.open(path, "wt", encoding="utf-8", newline="\n")
    if path.suffix == ".gz":
        return gzip.open(path, "wt", encoding="utf-8", newline="\n")
    return path.open("w", encoding="utf-8", newline="\n")
