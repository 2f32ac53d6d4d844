"""Entries of ranks that fail between their start and the first barrier, and of one that joins."""

from __future__ import annotations

import os
import signal
from typing import Any

from torch._C._distributed_c10d import FileStore

from sagellm.core.child_process import Inbox
from sagellm.core.errors import ConfigError
from sagellm.engines.native.parallel import launch
from sagellm.engines.native.parallel.split import Split

HERE = "tests.engines.native.parallel.entries"


def _say_ready(given: dict[str, Any]) -> None:
    split = Split(**given["split"])
    FileStore(given["store"], split.num_ranks).set(launch._ready(split.rank), "")


def die_while_joining(given: dict[str, Any], inbox: Inbox) -> None:
    _say_ready(given)
    os.kill(os.getpid(), signal.SIGKILL)


def fail_while_joining(given: dict[str, Any], inbox: Inbox) -> None:
    _say_ready(given)
    raise ConfigError("no heads for this rank")


def stop_while_joining(given: dict[str, Any], inbox: Inbox) -> None:
    """Alive, and does nothing more."""
    _say_ready(given)
    os.kill(os.getpid(), signal.SIGSTOP)


def follow(given: dict[str, Any], inbox: Inbox) -> None:
    """Join, and stay until asked to go."""
    ranks = launch.join(Split(**given["split"]), given["store"], given["collectives"])
    while inbox.get() is not None:
        pass
    ranks.close()
