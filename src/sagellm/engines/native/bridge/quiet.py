"""Silence for transformers' warnings and progress bars: what matters of them we say ourselves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """The library warns of nothing and draws no bars within this context."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
