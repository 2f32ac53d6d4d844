"""What errors offer instead of an unknown name."""

from __future__ import annotations

import pytest

from sagellm.core.errors import nearest
from sagellm.engines.simulator.devices import DEVICES
from sagellm.engines.simulator.models import MODELS


@pytest.mark.parametrize(
    ("name", "meant"),
    [("h100", "h100-80g"), ("H100 SXM", "h100-80g"), ("a100", "a100-80g"), ("l40", "l40s"),
     ("4090", "rtx4090"), ("rtx 4080", "rtx4090"), ("ascend", "ascend-910b"),
     ("h100-81g", "h100-80g"), ("mi300", "mi300x")],
)  # fmt: skip
def test_a_device_of_the_same_family(name: str, meant: str) -> None:
    assert nearest(name, DEVICES) == f" Did you mean {meant!r}?"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("llama3-8b", "llama-3.1-8b"), ("Meta-Llama-3-70B-Instruct", "llama-3.1-70b"), ("qwen3-8", "qwen3-8b"),
     ("mistral", "mistral-7b"), ("llama-3.1-9b", "llama-3.1-8b"), ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
     ("qwen3-30b", "qwen3-30b-a3b")],
)  # fmt: skip
def test_a_model_of_the_same_family_and_size(name: str, meant: str) -> None:
    assert nearest(name, MODELS) == f" Did you mean {meant!r}?"


@pytest.mark.parametrize(
    ("name", "meant"), [("prioriti", "priority"), ("lur", "lru"), ("temp", "temperature")]
)
def test_a_misspelt_or_shortened_name(name: str, meant: str) -> None:
    assert nearest(name, ["lru", "priority", "temperature"]) == f" Did you mean {meant!r}?"


@pytest.mark.parametrize("name", ["", "?", "zzz", "x" * 10**6])
def test_a_name_like_none_lists_all(name: str) -> None:
    assert nearest(name, ["lru", "arc"]) == " Known: arc, lru."


def test_without_choices_nothing_is_offered() -> None:
    assert nearest("x", []) == ""
