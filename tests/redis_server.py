"""Debian's redis-server (or Valkey) for tests: one that uses no disk and no port."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def running_redis(folder: Path) -> Iterator[Path]:
    """The socket of a server that is killed at the end. Skips the test where none is installed."""
    command = shutil.which("redis-server") or shutil.which("valkey-server")
    if command is None:
        pytest.skip("needs redis-server: apt-get install redis-server")
    path = folder / "socket"
    arguments = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder)]
    with subprocess.Popen([command, *arguments], stdout=subprocess.DEVNULL) as process:
        for _ in range(500):
            if path.exists():
                break
            time.sleep(0.01)
        yield path
        process.kill()
    path.unlink(missing_ok=True)
