"""Bodies: bounded, UTF-8 throughout, and read without holding up others."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import RequestError
from sagellm.serving.errors import BodyTooLargeError
from sagellm.serving.reader import (
    MAX_NAMES,
    MAX_VALUES,
    _check_number_of_values,
    json_object,
    without_strings,
)
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


def read(body: bytes) -> dict[str, Any]:
    structure = without_strings(body)
    _check_number_of_values(structure)
    return json_object(body, num_names=structure.count(b":"))


def test_what_json_can_hold_is_read() -> None:
    assert read(b'{"a": "\\ud83d\\ude42", "b": [1, 2.5, null]}') == {"a": "🙂", "b": [1, 2.5, None]}
    with pytest.raises(RequestError, match="object"):
        read(b"[1]")


@pytest.mark.parametrize(
    ("piece", "most", "limit"),
    [
        (b"1,", MAX_VALUES - 2, MAX_VALUES),
        (b"[[]],", (MAX_VALUES - 2) // 3, MAX_VALUES),
        (b"[" * 100 + b"]" * 100 + b",", (MAX_VALUES - 2) // 101, MAX_VALUES),
        (b'{"":1},', MAX_NAMES - 1, MAX_NAMES),
        (b'{"":1,"":1},', (MAX_NAMES - 1) // 2, MAX_NAMES),
    ],
    ids=["items", "lists", "nested", "objects", "names"],
)
def test_too_many_values_are_refused_before_they_are_built(piece: bytes, most: int, limit: int) -> None:
    """Items, lists, objects and names count: 32 MB of brackets took a minute."""
    _check_number_of_values(without_strings(b'{"a":[' + piece * most + b"1]}"))
    with pytest.raises(BodyTooLargeError, match=str(limit)):
        _check_number_of_values(without_strings(b'{"a":[' + piece * (most + 1) + b"1]}"))


def test_what_clients_send_is_within_the_limits() -> None:
    """A million tokens; a conversation of 20,000 tool calls with the schemas of 1,000 tools."""
    prompt = {"prompt": [*range(1_000_000)], "max_tokens": 16, "logit_bias": {"1": 2}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "1", "tool_call_id": "1"}]
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "description": "b"}},
        "required": ["a"],
    }
    tool = {"type": "function", "function": {"name": "f", "description": "c", "parameters": schema}}
    chat = {"messages": turns * 20_000, "tools": [tool] * 1000}
    for body in (prompt, chat):
        assert read(json.dumps(body).encode()) == body


def test_text_is_no_value() -> None:
    body = read(b'{"prompt": "\\"' + b"a,[{:\\\\" * MAX_VALUES + b'", "n": 1}')
    assert body == {"prompt": '"' + "a,[{:\\" * MAX_VALUES, "n": 1}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"a": 1, "b": [1, 2, 3], "a": 2}', "'a'"),
        (b'{"a": [{"b": 1}, {"c": {"d:": 1, "d:": 2}}]}', "'d:'"),
        (b'{"a": 1, "\\u0061": 2}', "'a'"),
        (b'{"": {"": {"": 1, "": 1}}}', "''"),
        (b'{"a": [' + b"1," * 1000 + b'{"b": {}, "b": {}}]}', "'b'"),
    ],
)
def test_a_name_given_twice_is_named(body: bytes, name: str) -> None:
    with pytest.raises(RequestError, match=f"has the name {name} twice"):
        read(body)


def read_twice(body: bytes) -> dict[str, Any]:
    """The slow twin: finds names given twice by parsing a second time."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise RequestError("twice")
        return found

    content: dict[str, Any] = json.loads(body, object_pairs_hook=unique)
    return content


def test_names_given_twice_are_found_as_by_the_slow_twin() -> None:
    rng = random.Random(2)
    num_refused = 0

    def value(depth: int) -> str:
        kind = rng.randrange(4) if depth else 3
        inner = [value(depth - 1) for _ in range(rng.randrange(4))] if kind < 2 else []
        if kind == 0:
            return "[" + ",".join(inner) + "]"
        if kind == 1:
            return (
                "{"
                + ",".join(f'"{rng.choice(["a", "b:", ",", chr(92) * 2, "{"])}":{one}' for one in inner)
                + "}"
            )
        return rng.choice(["1", "null", '"x:y"', '"\\":"'])

    for _ in range(2000):
        body = f'{{"x":{value(4)},"y":{value(4)}}}'.encode()
        try:
            wanted = read_twice(body)
        except RequestError:
            num_refused += 1
            with pytest.raises(RequestError, match="twice"):
                read(body)
        else:
            assert read(body) == wanted
    assert 100 < num_refused < 1900


def without_strings_by_pattern(body: bytes) -> bytes:
    """The slow twin: a pattern that begins anew at every quote of a string without an end."""
    return re.sub(rb'"[^"\\]*(?:\\.[^"\\]*)*"', b'"', body, flags=re.DOTALL)


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
def test_strings_are_left_out_as_by_the_slow_twin(num_bodies: int) -> None:
    rng = random.Random(1)
    for _ in range(num_bodies):
        body = random_body(rng)
        assert without_strings(body) == without_strings_by_pattern(body), body


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(inner) | st.dictionaries(st.text(), inner)


@given(st.recursive(st.none() | st.text() | st.integers(), containers))
def test_strings_of_any_json_are_left_out_as_by_the_slow_twin(content: object) -> None:
    body = json.dumps(content).encode()
    assert without_strings(body) == without_strings_by_pattern(body)


@pytest.mark.parametrize(
    "piece",
    [rb"\"", b'""', b'",', b",", rb"\\", rb"\n", b'"a"', b"[", b'{"a":', b"1,", b'"a":1,', b"\x00", b"9"],
    ids=repr,
)
@pytest.mark.parametrize("head", [b"", b'{"prompt": "', b'{"prompt": ['], ids=repr)
def test_a_body_costs_linear_time(head: bytes, piece: bytes) -> None:
    """Sixteen times the size takes far less than the 256 times as long that a quadratic cost would."""

    def seconds(size: int) -> float:
        body = head + piece * (size // len(piece))
        began = time.thread_time()
        with suppress(RequestError):
            read(body)
        return time.thread_time() - began

    small = min(seconds(2**14) for _ in range(3))
    assert seconds(2**18) < 64 * small
