"""Bodies: bounded, UTF-8 throughout, and read without holding up others."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import RequestError
from sagellm.serving.errors import BodyTooLargeError
from sagellm.serving.reader import MAX_VALUES, _check_number_of_values, commas_outside_strings, json_object
from tests.scripted_engine import scripted_llm
from tests.serving.live import Live, serving

MAX_BODY_BYTES = 100_000
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(scripted_llm(), max_body_bytes=MAX_BODY_BYTES) as running:
        yield running


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_413(live: Live, path: str, *, chunked: bool) -> None:
    body = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    response = live.http.post(path, content=iter([body[:70_000], body[70_000:]]) if chunked else body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert str(MAX_BODY_BYTES) in response.json()["error"]["message"]
    assert live.http.get("/health").status_code == 200


def test_a_large_body_within_the_limit_is_read(live: Live) -> None:
    body = json.dumps({"prompt": "hi", "user": "x" * 90_000})
    assert live.http.post("/v1/completions", content=body).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"\xed\xa0\x80": 1, "prompt": "x"}',
        b'{"prompt": "\\ud800"}',
        b'{"\\udfff": 1}',
        '{"prompt": "x"}'.encode("utf-16"),
        '{"prompt": "\\ud800"}'.encode("utf-16-le"),
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "top_k": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 1000 + b"1" + b"}" * 1000,
        b'{"prompt": "x", "prompt": "y"}',
        b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}',
        b'{"prompt": "' + rb"\"" * 40_000,
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_no_utf8_json_is_400(live: Live, body: bytes) -> None:
    response = live.http.post("/v1/completions", content=body[:MAX_BODY_BYTES])
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "invalid_json"


def test_what_json_can_hold_is_read() -> None:
    assert json_object(b'{"a": "\\ud83d\\ude42", "b": [1, 2.5, null]}') == {"a": "🙂", "b": [1, 2.5, None]}
    with pytest.raises(RequestError, match="object"):
        json_object(b"[1]")


def test_too_many_values_are_refused_before_they_are_built() -> None:
    with pytest.raises(BodyTooLargeError, match=str(MAX_VALUES)):
        _check_number_of_values(b"[" + b"1," * MAX_VALUES + b"1]")
    _check_number_of_values(b"[" + b"1," * (MAX_VALUES - 1) + b"1]")


def test_commas_of_a_text_are_no_values() -> None:
    _check_number_of_values(b'{"prompt": "\\"' + b"a,\\\\" * MAX_VALUES + b'", "n": 1}')


def commas_by_pattern(body: bytes) -> int:
    """The slow twin: a pattern that begins anew at every quote of a string without an end."""
    return re.sub(rb'"[^"\\]*(?:\\.[^"\\]*)*"', b"", body, flags=re.DOTALL).count(b",")


WITHIN_STRING = [b'\\"', b"\\\\", b"\\n", b"\\u00e9", b",", b":", b"[", b"]", b"a", "é".encode(), b" ", b"\n"]
OUTSIDE = [b",", b",,", b":", b"[", b"]", b"{", b"}", b"1", b"-2.5e3", b"null", b" ", b"\n"]


def random_body(rng: random.Random) -> bytes:
    """Strings of escapes and commas, among what stands between strings; JSON now and then."""
    pieces = []
    for _ in range(rng.randrange(12)):
        pieces += rng.choices(OUTSIDE, k=rng.randrange(5))
        pieces += [b'"', *rng.choices(WITHIN_STRING, k=rng.randrange(8)), b'"']
    return b"".join(pieces + rng.choices(OUTSIDE, k=rng.randrange(5)))


@pytest.mark.parametrize("num_bodies", [500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_commas_are_counted_as_by_the_slow_twin(num_bodies: int) -> None:
    rng = random.Random(1)
    for _ in range(num_bodies):
        body = random_body(rng)
        assert commas_outside_strings(body) == commas_by_pattern(body), body


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(inner) | st.dictionaries(st.text(), inner)


@given(st.recursive(st.none() | st.text() | st.integers(), containers))
def test_commas_of_any_json_are_counted_as_by_the_slow_twin(content: object) -> None:
    body = json.dumps(content).encode()
    assert commas_outside_strings(body) == commas_by_pattern(body)


@pytest.mark.parametrize(
    "piece",
    [rb"\"", b'""', b'",', b",", rb"\\", rb"\n", b'"a"', b"[", b'{"a":', b"1,", b'"a":1,', b"\x00", b"9"],
    ids=repr,
)
@pytest.mark.parametrize("head", [b"", b'{"prompt": "', b'{"prompt": ['], ids=repr)
def test_a_body_costs_linear_time(head: bytes, piece: bytes) -> None:
    """Sixteen times the size takes far less than the 256 times as long that a quadratic cost would."""

    def seconds(size: int) -> float:
        body = head + b"," * MAX_VALUES + piece * (size // len(piece))
        began = time.thread_time()
        with suppress(RequestError):
            _check_number_of_values(body)
            json_object(body)
        return time.thread_time() - began

    small = min(seconds(2**14) for _ in range(3))
    assert seconds(2**18) < 64 * small
