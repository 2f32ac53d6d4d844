"""Ranges of sampling parameters: what is out of range names the parameter and what would have worked."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from sagellm.core.errors import RequestError
from sagellm.core.types import Request, SamplingParams, Tokens


@pytest.mark.parametrize(
    ("given", "param", "text"),
    [
        ({"temperature": -0.1}, "temperature", r"\[0.0, 100.0\]"),
        ({"temperature": math.nan}, "temperature", "got nan"),
        ({"temperature": math.inf}, "temperature", "got inf"),
        ({"top_p": 0.0}, "top_p", r"\(0.0, 1.0\]"),
        ({"top_k": 2**63 - 1}, "top_k", "top_k must be in"),
        ({"top_k": -2}, "top_k", r"\[-1, "),
        ({"min_p": 1.5}, "min_p", r"\[0.0, 1.0\]"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty", r"\[0.01, 100.0\]"),
        ({"presence_penalty": 3}, "presence_penalty", r"\[-2.0, 2.0\]"),
        ({"frequency_penalty": -3}, "frequency_penalty", r"\[-2.0, 2.0\]"),
        ({"n": 0}, "n", r"\[1, 128\]"),
        ({"logprobs": 21}, "logprobs", r"\[0, 20\]"),
        ({"max_tokens": -1}, "max_tokens", "must be at least 0, got -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "must not exceed max_tokens"),
        ({"stop": ("",)}, "stop", "must not be empty"),
        ({"stop": ("x" * 1025,)}, "stop", "at most 1024 characters"),
        ({"stop": tuple("abcdefghijklmnopq")}, "stop", "at most 16"),
        ({"logit_bias": {3: 101.0}}, "logit_bias", r"logit_bias\[3\]"),
    ],
)
def test_out_of_range(given: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        SamplingParams(**given)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"temperature": "x"}, "temperature must be a number, got 'x' (str)"),
        ({"temperature": None}, "temperature must be a number"),
        ({"top_p": True}, "top_p must be a number"),
        ({"top_k": 2.0}, "top_k must be an integer"),
        ({"n": "2"}, "n must be an integer"),
        ({"seed": "a"}, "seed must be an integer or None"),
        ({"max_tokens": 2.5}, "max_tokens must be an integer or None"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False"),
        ({"stop": 5}, "stop must be a string or several, got 5 (int)"),
        ({"stop": ["a", 5]}, "stop must be a string or several, got 5 (int)"),
        ({"stop_token_ids": 5}, "stop_token_ids must be several token ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be several token ids, got 'a'"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping from token ids to numbers"),
        ({"logit_bias": {"a": 1}}, "logit_bias must be a mapping from token ids to numbers"),
    ],
)
def test_another_type(given: dict[str, Any], wanted: str) -> None:
    with pytest.raises(RequestError, match=re.escape(wanted)) as caught:
        SamplingParams(**given)
    assert caught.value.param == next(iter(given))


def test_what_numpy_and_other_libraries_give_is_taken() -> None:
    given: dict[str, Any] = {"temperature": np.float32(0.5), "top_k": np.int64(3), "stop_token_ids": [1, 2]}
    params = SamplingParams(**given | {"stop": None, "logit_bias": None})
    assert (params.temperature, params.top_k, params.stop, params.logit_bias) == (0.5, 3, (), {})
    assert params.stop_token_ids == (1, 2)


def test_one_stop_string_is_one_stop_string() -> None:
    wanted: Any = "zen"
    assert SamplingParams(stop=wanted).stop == ("zen",)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        Request("r", Tokens())


def test_tokens_are_one_buffer_with_their_bytes() -> None:
    tokens = Tokens([1, 2, 3])
    before = tokens.tobytes()
    assert Tokens.frombytes(before) == tokens
    tokens.append(4)
    assert tokens.tobytes() == before + (4).to_bytes(4, "little")
    copy = Tokens(tokens)
    copy.extend([5, 6])
    assert (len(tokens), len(copy), list(copy.slice(3))) == (4, 6, [4, 5, 6])
    assert repr(Tokens(range(9))) == "Tokens([0, 1, 2, 3, 4, 5, 6, 7, ...], len=9)"
