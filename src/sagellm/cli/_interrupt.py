"""Ctrl-C that waits for the end of an engine step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C is noted and raises nothing, so that no step is cut in its middle; ask between
    steps whether there was one. A second Ctrl-C raises `KeyboardInterrupt` at once. Main thread only.
    """
    noted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        if noted:
            signal.default_int_handler(number, frame)
        noted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)
