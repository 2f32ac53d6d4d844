"""Prompt lookup beside a scan of all tokens, and through an engine."""

from __future__ import annotations

import random
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.accel.speculative.prompt_lookup import PromptLookup
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.protocols.speculative import Asked, Proposer
from sagellm.core.registry import registry
from sagellm.core.types import CapabilityDescriptor, Request, Tokens
from sagellm.engines.build import build_backend
from sagellm.engines.build_speculation import build_speculation

LOOKUP = {"method": "prompt_lookup"}
ABLE = CapabilityDescriptor("none", "int8", 97, 128, 64, 4, 8, features=frozenset({"speculative_decoding"}))


def asked(name: str = "a") -> Request:
    return Request(name, Tokens([1]))


def scanned(tokens: list[int], num_tokens: int, longest: int, shortest: int) -> list[int]:
    """The slow twin: looks for the last place of each n-gram in all tokens."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                copied = list(tokens)
                for i in range(num_tokens):
                    copied.append(copied[end + i])
                return copied[len(tokens) :]
    return []


@given(
    parts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12),
    num_tokens=st.integers(1, 7),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
)
def test_the_index_finds_what_a_scan_finds(
    parts: list[list[int]], num_tokens: int, lengths: list[int]
) -> None:
    shortest, longest = lengths
    proposer: Proposer = PromptLookup(longest, shortest)
    tokens = Tokens()
    for part in parts:
        tokens.extend(part)
        proposed = proposer.propose([Asked(asked(), tokens, num_tokens)])[0].token_ids
        assert list(proposed) == scanned(tokens.tolist(), num_tokens, longest, shortest)


def test_requests_are_apart_and_forgotten() -> None:
    lookup = PromptLookup(2, 2)
    text = Tokens([1, 2, 3, 1, 2])
    assert lookup.propose([Asked(asked(), text, 2)])[0].token_ids == (3, 1)
    assert lookup.propose([Asked(asked("b"), Tokens([7, 1, 2]), 2)])[0].token_ids == ()
    lookup.observe("a", 1)
    lookup.forget(asked(), text)
    lookup.forget(asked("never seen"), text)
    assert list(lookup._indexes) == ["b"]
    assert lookup.propose([Asked(asked(), Tokens([5, 5, 5]), 3)])[0].token_ids == (5, 5, 5)


def test_a_step_looks_at_new_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup, tokens = PromptLookup(), Tokens(random.Random(1).choices(range(50), k=20_000))
    lookup.propose([Asked(asked(), tokens, 4)])
    tokens.append(3)
    sliced: list[int] = []
    plain = Tokens.slice

    def slice_(self: Tokens, start: int, stop: int | None = None) -> object:
        sliced.append((stop or len(self)) - start)
        return plain(self, start, stop)

    monkeypatch.setattr(Tokens, "slice", slice_)
    lookup.propose([Asked(asked(), tokens, 4)])
    assert sum(sliced) < 20


def test_the_size_of_the_index_is_as_documented() -> None:
    lookup, tokens = PromptLookup(3, 3), Tokens(random.Random(1).choices(range(30_000), k=20_000))
    lookup.propose([Asked(asked(), tokens, 4)])
    places = lookup._indexes["a"].positions[3]
    size = sys.getsizeof(places) + sum(sys.getsizeof(key) + 4 * 28 for key in places)
    assert 150 < size / len(tokens) < 350


@pytest.mark.parametrize(("longest", "shortest"), [(3, 0), (2, 3), (0, 0)])
def test_lengths_that_make_no_sense(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match="min_ngram must be from 1 to max_ngram"):
        PromptLookup(longest, shortest)


def test_it_is_built_by_name() -> None:
    names = ["draft_model", "heads", "prompt_lookup", "self_draft", "suffix", "synthetic"]
    assert registry("proposer").names() == names
    assert build_speculation(Config(), ABLE, build_backend) is None
    made = build_speculation(
        Config.model_validate({"speculative": LOOKUP | {"num_tokens": 7}}), ABLE, build_backend
    )
    assert made is not None
    assert made.num_tokens == 7
    wrong = LOOKUP | {"method_options": {"min_ngram": 9}}
    with pytest.raises(ConfigError, match="min_ngram must be from 1"):
        build_speculation(Config.model_validate({"speculative": wrong}), ABLE, build_backend)
    for method, advice in (
        ("ngram", "Set it to prompt_lookup. Known: auto, "),
        ("sufix", "Did you mean 'suffix'?"),
    ):
        named = Config.model_validate({"speculative": {"method": method}})
        with pytest.raises(UnknownNameError, match=re.escape(advice)):
            build_speculation(named, ABLE, build_backend)
    with pytest.raises(ConfigError, match=r"do not go back\): set speculative\.method to none"):
        build_speculation(
            Config.model_validate({"speculative": LOOKUP}),
            CapabilityDescriptor("none", "int8", 97, 128, 64, 4, 8),
            build_backend,
        )
