"""Files that others wrote, opened and read within limits."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_TEXT_BYTES = 64 << 20


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read. Raises `OSError` for a folder, a pipe or a device, without waiting."""
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 - the caller closes it
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    return file


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The UTF-8 text of a regular file. Raises `OSError`, also for a file of more than `max_bytes`, and
    `UnicodeDecodeError`."""
    with open_regular(path) as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes", str(path))
    return raw.decode("utf-8")


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
