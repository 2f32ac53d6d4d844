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
_PIECE, _POLL_S = 1 << 16, 0.01


class CommandError(Exception):
    """Why there is no output, in one line."""


def run_command(command: Sequence[str], limit_s: float = LIMIT_S) -> str:
    """What a command prints, errors included, in the C locale.

    Raises `CommandError` where it cannot be started, fails, takes longer, or prints more than `MAX_BYTES`.
    Its process group is killed at the end; a process that the kernel does not let die is left behind.
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
        output = _read(process, process.stdout.fileno(), limit_s)
    finally:
        process.stdout.close()
        _kill(process)
    text = output.decode(errors="replace")
    if process.returncode:
        said = next((line.strip() for line in text.splitlines() if line.strip()), "")
        raise CommandError(f"exit status {process.returncode}{': ' if said else ''}{said[:200]}")
    return text


def _read(process: subprocess.Popen[bytes], fd: int, limit_s: float) -> bytes:
    """All output until the process ends; a child may hold the pipe longer."""
    until_s = time.monotonic() + limit_s
    pieces: list[bytes] = []
    size, is_open = 0, True
    os.set_blocking(fd, False)
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while True:
            # Asked before the pipe is read: what it printed before its end is in the pipe.
            has_ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            piece = _piece(fd) if is_open else b""
            if piece:
                pieces.append(piece)
                size += len(piece)
                if size > MAX_BYTES:
                    raise CommandError(f"printed more than {MAX_BYTES >> 20} MB")
                continue
            is_open = is_open and piece is None
            if has_ended:
                return b"".join(pieces)
            if time.monotonic() >= until_s:
                raise CommandError(f"did not end within {limit_s:g} s")
            if is_open:
                selector.select(_POLL_S)
            else:
                time.sleep(_POLL_S)


def _piece(fd: int) -> bytes | None:
    """Bytes; none at the end; None if there are none yet."""
    try:
        return os.read(fd, _PIECE)
    except BlockingIOError:
        return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the group, then reap its first process.

    Until it is reaped, no other process has its id.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL  # no warning about it later: it cannot be reaped
