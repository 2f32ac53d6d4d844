"""What the children of the tests of `ProcessGroup` do."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from sagellm.core.child_process import Inbox
from sagellm.core.errors import ConfigError
from sagellm.core.processes import ProcessGroup, Role

HERE = "tests.core.processes_entries"


def echo(options: dict[str, Any], inbox: Inbox) -> None:
    """Append each message to a file, and log what the environment says."""
    logging.getLogger("sagellm.test").warning("hello from %s", os.environ.get("SAGELLM_TEST_NAME", "nobody"))
    with Path(options["file"]).open("ab", buffering=0) as file:
        while (message := inbox.get()) is not None:
            file.write(message)
    Path(options["file"] + ".end").touch()


def fail(options: dict[str, Any], inbox: Inbox) -> None:
    inbox.get()
    raise ConfigError(options["reason"])


def fail_by_a_bug(options: dict[str, Any], inbox: Inbox) -> None:
    raise ZeroDivisionError("a bug")


def end(options: dict[str, Any], inbox: Inbox) -> None:
    """Return unasked."""


def wait(options: dict[str, Any], inbox: Inbox) -> None:
    """Return when asked to."""
    while inbox.get() is not None:
        pass


def sleep(options: dict[str, Any], inbox: Inbox) -> None:
    """Heed nothing, as a call that never returns."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def parent(options: dict[str, Any], inbox: Inbox) -> None:
    """Start children of its own, and write their process ids to a file."""
    group = ProcessGroup.start([Role(f"child {i}", f"{HERE}:sleep") for i in range(2)])
    Path(options["file"]).write_text(" ".join(map(str, group.pids)))
    inbox.get()
