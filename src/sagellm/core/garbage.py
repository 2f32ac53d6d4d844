"""Garbage collection put off while what is made is kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_collected() -> Iterator[None]:
    """No search for garbage meanwhile. Modules keep all that they make as they are imported, and looking
    through it again and again is a fifth of the time that importing torch takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
