"""What `sagellm` promises to keep: a name is added or removed here on purpose."""

from __future__ import annotations

import re

import pytest

import sagellm


def test_the_names() -> None:
    assert sagellm.__all__ == ["LLM", "Config", "SageError", "SamplingParams", "__version__", "load"]
    assert dir(sagellm) == sorted(sagellm.__all__)


@pytest.mark.parametrize("name", sagellm.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(sagellm, name) is not None


def test_an_unknown_name_is_answered_with_the_list() -> None:
    with pytest.raises(AttributeError, match="it has LLM, Config"):
        _ = sagellm.Engine


def test_the_version_has_three_numbers() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", sagellm.__version__)
