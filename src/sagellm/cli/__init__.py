"""The program `sagellm`: `main` is its entry point, `commands.py` lists the commands."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

EXIT_EXPLAINED = 2
AUTOLOAD, NO_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD", "0, by sagellm"
"""Torch imports packages of vendors when it is imported, and fails with a broken one. We import that of a
chip when its device is used. `1` leaves it to torch."""
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def main() -> None:
    """Run the command that the arguments name.

    Exit status: 0 done; 1 a check failed, or the reader of the output has closed it; 2 an error that one line
    explains; 130 interrupted.
    """
    _replace_missing_streams()
    os.environ.setdefault(AUTOLOAD, NO_AUTOLOAD)
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        # During imports Ctrl-C ends the process silently. Python would print a traceback, or lose the
        # interrupt in a callback of the import system.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sagellm.cli.commands import app

    signal.signal(signal.SIGINT, handler)
    try:
        try:
            app(prog_name="sagellm")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _CANNOT_WRITE or error.filename or "--debug" in sys.argv:
            raise
        _discard_output()
        print(f"sagellm: cannot write the output: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_EXPLAINED)


def _replace_missing_streams() -> None:
    """Open the null device for standard streams that the parent process closed.

    Otherwise the next file or socket takes the number of the stream, and `print` to stderr goes to it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _discard_output() -> None:
    """Drop what is buffered for stdout, so that the last flush does not fail."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.__stdout__.fileno() if sys.__stdout__ else 1)
