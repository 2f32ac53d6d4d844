"""The main program of a child of `ProcessGroup`.

Reads its role and then messages from standard input. When the input ends, the parent has closed it or is
gone: the entry is told so, and has `LAST_S` to return.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import signal
import sys
import threading
import traceback
from typing import BinaryIO

from sagellm.core.errors import SageError
from sagellm.core.log_lines import JsonLines
from sagellm.core.processes import LENGTH_BYTES

LAST_S = 2.0


class Inbox:
    """The messages of the parent, in order. A thread reads them, so that their end is seen at any time."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def get(self) -> bytes | None:
        """The next message; waits for it. None: there will be no more, return from the entry."""
        return self._messages.get()

    def _read(self) -> None:
        message = read_message(self._source)
        while message is not None:
            self._messages.put(message)
            message = read_message(self._source)
        self._messages.put(None)
        leave = threading.Timer(LAST_S, os._exit, [1])  # a call that never returns does not keep the process
        leave.daemon = True
        leave.start()


def read_message(source: BinaryIO) -> bytes | None:
    """The next message of a stream; None at its end."""
    size = source.read(LENGTH_BYTES)
    if len(size) < LENGTH_BYTES:
        return None
    length = int.from_bytes(size, "little")
    message = source.read(length)
    return message if len(message) == length else None


def main() -> int:
    """Run the entry; returns the exit status."""
    # They reach the parent too, which ends its children, at once or after it has served what runs.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    source = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a device
        os.dup2(nothing.fileno(), 0)
    first = read_message(source)
    if first is None:
        return 1
    start = json.loads(first)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())  # the parent reads them
    logging.basicConfig(level=start["log_level"], handlers=[handler])
    module, _, function = start["entry"].partition(":")
    try:
        getattr(importlib.import_module(module), function)(start["options"], Inbox(source))
    except SageError as error:
        logging.getLogger("sagellm.processes").error("%s", error)
        return 1
    except BaseException:  # noqa: BLE001 - it is the last thing that the parent reads of this process
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no thread, of torch say, keeps the process
