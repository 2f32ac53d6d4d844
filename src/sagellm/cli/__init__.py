"""The program `sagellm`: its entry point `main`; the commands are in `commands.py`, one file each."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

EXIT_EXPLAINED = 2
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def main() -> None:
    """Run the command that the arguments name.

    Exit status: 0 done; 1 a check failed, or the reader of the output has gone; 2 an error that was explained
    in one line; 130 interrupted.
    """
    _replace_missing_streams()
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        # Ctrl-C while modules are imported ends the process silently: Python would print a traceback, or
        # lose the interrupt in a callback of the import system.
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
    """A standard stream that was closed by the parent process is the null device: otherwise the next file or
    socket that is opened takes its number, and `print` to stderr goes to stdout.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _discard_output() -> None:
    """What is still buffered for stdout goes nowhere, so that the interpreter's last flush does not fail."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.__stdout__.fileno() if sys.__stdout__ else 1)
