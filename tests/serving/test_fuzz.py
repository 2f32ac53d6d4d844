"""Random bodies and random bytes: an answer of 200 or 4xx, or a closed connection, no internal error."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from copy import deepcopy
from typing import Any

import pytest

from tests.scripted_engine import scripted_llm
from tests.serving.live import Live, serving, wait_until
from tests.serving.test_connection import connected, rest

AT_ONCE = 50
REFUSED = {400, 404, 405, 408, 411, 413, 415, 431, 501, 505}
SEEDS: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": ["one", "two"],
        "max_tokens": 2,
        "temperature": 0.5,
        "stop": ["a", "b"],
        "logit_bias": {"5": 1.5},
        "stream": False,
        "n": 2,
        "seed": 3,
        "logprobs": 2,
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        "max_completion_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_logprobs": 1,
        "logprobs": True,
        "chat_template_kwargs": {"a": 1},
    },
    "/tokenize": {"prompt": "hello", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/kv/hints": {"kv_hints": {"version": 1, "actions": []}},
}
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    -(2**70),
    1e308,
    0.1,
    "",
    "\0",
    "é" * 50,
    "x" * 5000,
    [],
    {},
    [[]],
]
VALUES += [{"a": {"b": []}}, [None] * 20, [1, "a", None], "</s><|im_end|>", "true", "NaN", [2**40], {"": ""}]
TEXTS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\\",
    b",",
    b":",
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"1e999",
    b"-",
    b"NaN",
]
TEXTS += [
    b"[" * 300,
    b'{"a":' * 300,
    b"9" * 5000,
    rb"\ud800",
    rb"\u0000",
    rb"\"" * 2000,
    b"\n",
    b"//",
    b"\xef\xbb\xbf",
]
WIRE = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b":",
    b"\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 5\r\n",
]
WIRE += [
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"Expect: 100-continue\r\n",
    b"HTTP/1.1",
    b"HTTP/2.0",
    b"\x80",
    b"%00",
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(
        scripted_llm(), header_timeout_s=0.4, keep_alive_timeout_s=0.4, body_timeout_s=0.4
    ) as running:
        yield running


def inner_places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every container within, with each of its keys or indices."""
    items = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in items:
        yield content, key
        yield from inner_places(value)


def changed(rng: random.Random, seed: dict[str, Any]) -> bytes:
    """The JSON of a request with some values replaced, removed or added, then perhaps some bytes."""
    content = json.loads(json.dumps(seed))
    for _ in range(rng.randrange(3)):
        container, key = rng.choice(list(inner_places(content)) or [(content, "prompt")])
        if isinstance(container, dict) and rng.random() < 0.3:
            container.pop(key, None)
            container[rng.choice(["n", "echo", "best_of", "user", "é", ""])] = deepcopy(rng.choice(VALUES))
        else:
            container[key] = deepcopy(rng.choice(VALUES))
    return spliced(
        rng, json.dumps(content, ensure_ascii=rng.random() < 0.5).encode(), TEXTS, rng.randrange(3)
    )


def spliced(rng: random.Random, data: bytes, pieces: list[bytes], times: int) -> bytes:
    """Pieces put in place of short stretches."""
    for _ in range(times):
        start = rng.randrange(len(data) + 1)
        data = data[:start] + rng.choice(pieces) + data[start + rng.randrange(4) :]
    return data


def mangled(rng: random.Random, requests: list[Callable[[], bytes]]) -> bytes:
    """A few requests, one after the other, with pieces put in anywhere."""
    data = b"".join(rng.choice(requests)() for _ in range(rng.randrange(1, 4)))
    return spliced(rng, data, WIRE, rng.randrange(4))


def check_unharmed(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    assert live.http.get("/health").status_code == 200
    wait_until(lambda: live.gateway.num_open == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_body_is_served_or_refused(live: Live, caplog: pytest.LogCaptureFixture, number: int) -> None:
    rng = random.Random(3)
    for _ in range(number):
        path, seed = rng.choice(list(SEEDS.items()))
        body = changed(rng, seed)
        response = live.http.post(path, content=body)
        assert response.status_code in {200} | REFUSED, (path, body, response.text)
        if response.status_code != 200:
            assert response.json()["error"]["message"], (path, body)
    check_unharmed(live, caplog)


@pytest.mark.parametrize("number", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_any_bytes_are_answered_or_closed(live: Live, caplog: pytest.LogCaptureFixture, number: int) -> None:
    rng = random.Random(4)
    body = json.dumps(SEEDS["/tokenize"]).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    requests: list[Callable[[], bytes]] = [
        lambda: b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body),
        lambda: b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked,
        lambda: b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        lambda: rng.randbytes(50),
    ]
    for _ in range(0, number, AT_ONCE):
        sent = [mangled(rng, requests) for _ in range(AT_ONCE)]
        with ExitStack() as clients:
            open_ones = [clients.enter_context(connected(live)) for _ in sent]
            for client, data in zip(open_ones, sent, strict=True):
                with suppress(ConnectionError):
                    client.sendall(data)
            for client, data in zip(open_ones, sent, strict=True):
                received = rest(client)
                statuses = {int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", received)}
                assert statuses <= {100, 200} | REFUSED, (data, received)
    check_unharmed(live, caplog)
