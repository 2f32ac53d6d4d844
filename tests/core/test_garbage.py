from __future__ import annotations

import gc
from pathlib import Path

import pytest

from sagellm.core.config import Config
from sagellm.core.errors import ModelError
from sagellm.core.garbage import nothing_collected
from sagellm.engines import build
from sagellm.engines.native import from_config


def test_collection_goes_on_afterwards() -> None:
    assert gc.isenabled()
    with nothing_collected():
        assert not gc.isenabled()
        with nothing_collected():
            pass
        assert not gc.isenabled(), "the inner one found it off"
    assert gc.isenabled()


def test_collection_goes_on_when_the_last_of_two_has_left() -> None:
    """As in two threads that build an engine each; the first in leaves first."""
    first, second = nothing_collected(), nothing_collected()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with nothing_collected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nothing_is_collected_while_a_backend_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """And collection goes on after one that could not be built."""

    def refuse(config: Config) -> Path:
        assert not gc.isenabled()
        raise ModelError("no model")

    monkeypatch.setattr(from_config, "model_source", refuse)
    with pytest.raises(ModelError, match="no model"):
        build.build_backend(Config())
    assert gc.isenabled()
