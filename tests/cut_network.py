"""A network namespace behind an interface that a test sets down and up. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class CutNetwork:
    """`here` and `there`: the addresses of both sides, in one network of 24 bits."""

    def __init__(self, here: str, there: str) -> None:
        self.here, self.there = here, there
        self._space, self._near, self._far = (f"{name}{os.getpid()}" for name in ("sagellm", "sgn", "sgf"))

    @contextmanager
    def made(self) -> Iterator[CutNetwork]:
        ip("netns", "add", self._space)
        try:
            ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self._space)
            ip("addr", "add", f"{self.here}/24", "dev", self._near)
            ip("-n", self._space, "addr", "add", f"{self.there}/24", "dev", self._far)
            ip("link", "set", self._near, "up")
            ip("-n", self._space, "link", "set", self._far, "up")
            yield self
        finally:
            ip("netns", "del", self._space)

    def command(self, *words: str) -> list[str]:
        """What runs these words on the other side, from `ROOT` with `environment`."""
        return ["ip", "netns", "exec", self._space, *words]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}

    def cut(self) -> None:
        ip("link", "set", self._near, "down")

    def heal(self) -> None:
        ip("link", "set", self._near, "up")
