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


def test_collection_goes_on_after_an_engine_that_could_not_be_built() -> None:
    config = load_config(cli={"model.name": "/no/such/folder"}, environ={}).config
    with pytest.raises(ModelError):
        build_backend(config)
    assert gc.isenabled()
