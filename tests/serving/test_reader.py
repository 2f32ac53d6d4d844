"""Bodies: bounded, UTF-8 throughout, and read without holding up others."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from sagellm.core.errors import RequestError
from sagellm.serving.errors import BodyTooLargeError
from sagellm.serving.reader import MAX_VALUES, _check_number_of_values, json_object
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
