from __future__ import annotations

import gc

import pytest

from sagellm.core.errors import ModelError
from sagellm.core.garbage import nothing_collected
from sagellm.engines.build import build_backend, load_config


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


def test_collection_goes_on_after_an_engine_that_could_not_be_built() -> None:
    config = load_config(cli={"model.name": "/no/such/folder"}, environ={}).config
    with pytest.raises(ModelError):
        build_backend(config)
    assert gc.isenabled()
