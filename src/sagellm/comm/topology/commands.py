"""Runs a command of the system within limits of time and output."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

LIMIT_S = 5.0
MAX_BYTES = 4 << 20
_PIECE = 1 << 16


class CommandError(Exception):
    """Why there is no output, in one line."""


def run_command(command: Sequence[str], limit_s: float = LIMIT_S) -> str:
    """What a command prints, errors included, in the C locale.

    Raises `CommandError` where it cannot be started, fails, takes longer, or prints more than `MAX_BYTES`.
    Then it is killed with all that it started; one that the kernel does not let die is left behind.
    """
    environment = {**os.environ, "LC_ALL": "C", "NO_COLOR": "1"}
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise CommandError(error.strerror or str(error)) from error
    assert process.stdout is not None
    try:
        output = _read(process.stdout.fileno(), time.monotonic() + limit_s, limit_s)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"did not end within {limit_s:g} s") from error
    finally:
        process.stdout.close()
        _kill(process)
    text = output.decode(errors="replace")
    if status:
        said = next((line.strip() for line in text.splitlines() if line.strip()), "")
        raise CommandError(f"exit status {status}{': ' if said else ''}{said[:200]}")
    return text


def _read(fd: int, until_s: float, limit_s: float) -> bytes:
    pieces: list[bytes] = []
    size = 0
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while True:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                raise CommandError(f"no end of its output within {limit_s:g} s")
            piece = os.read(fd, _PIECE)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BYTES:
                raise CommandError(f"printed more than {MAX_BYTES >> 20} MB")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL  # no warning about it later: it cannot be reaped
