"""/openapi.json is complete and true: every route has its request, answers and errors, what it shows is
accepted, and values beside what it allows are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st

from sagellm.engines.build import load
from sagellm.engines.native import DEMO_MODEL
from sagellm.serving import create_app
from sagellm.serving.answers import ErrorAnswer
from sagellm.serving.openapi import ENDPOINTS, FOR_ALL, FOR_CLIENTS, FOR_OPERATORS, Endpoint
from sagellm.serving.schema import NEUTRAL
from sagellm.serving.schema_parts import numbers_below
from tests.scripted_engine import scripted_llm
from tests.serving.live import Live, serving

POSTS = {path: one for (_, path), one in FOR_CLIENTS.items() if one.request is not None}
ADMIN_EXAMPLES = [
    (method, path, name) for (method, path), one in FOR_OPERATORS.items() for name in one.examples
]
KEY, ADMIN_KEY = "a key", "an admin key"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(
        load(str(DEMO_MODEL), {"kv.miss_attribution": True}), api_key=KEY, admin_key=ADMIN_KEY
    ) as running:
        running.http.headers["Authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture(scope="module")
def described(live: Live) -> dict[str, Any]:
    found: dict[str, Any] = live.http.get("/openapi.json").json()
    return found


def test_every_route_is_described_and_no_other(described: dict[str, Any]) -> None:
    app: FastAPI = create_app(scripted_llm())
    routes = {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods or ()
    }
    assert routes == set(ENDPOINTS)
    shown = {(method.upper(), path) for path, item in described["paths"].items() for method in item}
    assert shown == routes


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_a_route_has_answers_errors_and_a_body(described: dict[str, Any], method: str, path: str) -> None:
    operation = described["paths"][path][method.lower()]
    assert operation["responses"]["200"]["content"]
    for status, response in operation["responses"].items():
        if status != "200":
            assert response["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorAnswer")
    request = ENDPOINTS[(method, path)].request
    if request is not None:
        schema = described["components"]["schemas"][request.__name__]
        assert schema["additionalProperties"] is False
        assert {"400", "401", "404", "408", "413"} <= operation["responses"].keys()
        assert operation["requestBody"]["content"]["application/json"]["examples"]
    is_open = (method, path) in FOR_ALL
    assert ("security" in operation) == ("401" in operation["responses"]) == (not is_open)


def test_every_reference_leads_somewhere_and_names_are_distinct(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    for name in re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(described)):
        assert name in schemas
    ids = [one["operationId"] for item in described["paths"].values() for one in item.values()]
    assert len(set(ids)) == len(ids) == len(ENDPOINTS)


def test_without_a_key_nothing_is_said_of_one() -> None:
    with serving(scripted_llm()) as live:
        described = live.http.get("/openapi.json").json()
    assert described["components"]["securitySchemes"].keys() == {"admin_key"}
    assert not any(
        "security" in one or "401" in one["responses"] for one in described["paths"]["/tokenize"].values()
    )


def schema_of(described: dict[str, Any], path: str) -> dict[str, Any]:
    operation = POSTS[path]
    assert operation.request is not None
    schema: dict[str, Any] = described["components"]["schemas"][operation.request.__name__]
    return schema


EXAMPLES = [(path, name) for path, operation in POSTS.items() for name in operation.examples]


@pytest.mark.parametrize(("path", "name"), EXAMPLES)
def test_what_it_shows_is_accepted_and_answered_as_it_says(live: Live, path: str, name: str) -> None:
    operation = POSTS[path]
    response = live.http.post(path, json=operation.examples[name])
    assert response.status_code == 200, response.text
    check_answer(operation, response.text, streamed=bool(operation.examples[name].get("stream")))


@pytest.mark.parametrize(("method", "path", "name"), ADMIN_EXAMPLES)
def test_what_it_shows_to_operators_is_accepted(live: Live, method: str, path: str, name: str) -> None:
    operation = ENDPOINTS[(method, path)]
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    response = live.http.request(method, path, json=operation.examples[name], headers=headers)
    if "/fleet/" in path:  # this server is one engine
        assert response.status_code in (404, 409)
        return
    assert response.status_code == 200, response.text
    check_answer(operation, response.text, streamed=False)


def check_answer(operation: Endpoint, text: str, *, streamed: bool) -> None:
    """Of the form that is described, and no other."""
    if not streamed:
        assert operation.answer is not None
        operation.answer.model_validate_json(text)
        return
    assert operation.chunk is not None
    *data, last = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert last == "[DONE]"
    for one in data:
        operation.chunk.model_validate_json(one)


@pytest.mark.parametrize(
    "path",
    [path for (method, path), one in {**FOR_ALL, **FOR_CLIENTS}.items() if method == "GET" and one.answer],
)
def test_what_is_read_is_answered_as_it_says(live: Live, path: str) -> None:
    answer = ENDPOINTS[("GET", path)].answer
    assert answer is not None
    response = live.http.get(path.replace("{model}", live.llm.model_name))
    if path == "/v1/fleet":  # this server is one engine
        assert response.status_code == 404
        return
    assert response.status_code == 200
    answer.model_validate_json(response.text)


def allowed_and_refused(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values at the borders of a field's schema and beside them, with whether they fit."""
    forms = schema.get("anyOf", [schema])
    for form in forms:
        if "enum" in form:
            yield from ((value, True) for value in form["enum"])
            yield ["none of them"], False
        if form.get("type") in ("integer", "number"):
            for name, step in (("minimum", -1), ("maximum", 1)):
                if name in form:
                    yield form[name], True
                    yield form[name] + step, False
            if "exclusiveMinimum" in form:
                yield form["exclusiveMinimum"], False
            yield "1", False
            yield True, False
        if form.get("type") == "boolean":
            yield from ((True, True), (False, True), (1, False), ("true", False))
        if form.get("type") == "string" and {"maxLength", "minLength"} & form.keys():
            yield "x" * form.get("maxLength", 5), True
            if "maxLength" in form:
                yield "x" * (form["maxLength"] + 1), False
            if form.get("minLength"):
                yield "", False
    if {"type": "null"} in forms:
        yield None, True


NEEDS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "min_tokens": {"max_tokens": 8},
    "soft_reasoning_slope": {"soft_reasoning_tokens": 1},
    "early_stop": {"n": 2},
}
"""What a field is sent with."""
BEYOND_SCHEMA = (
    "maximum context length",
    "must not exceed max_tokens",
    "differ: send one",
    "send either prompt or messages",
)


@pytest.mark.parametrize("path", POSTS)
def test_each_field_takes_what_it_allows_and_nothing_beside(
    live: Live, described: dict[str, Any], path: str
) -> None:
    schema, needs, tried = schema_of(described, path), dict(NEEDS), 0
    body = dict(next(iter(POSTS[path].examples.values())))
    if "max_tokens" in schema["properties"]:
        body["max_tokens"] = 2
    if path == "/v1/completions":
        needs["max_tokens"] = {"echo": True}
    for name, property_schema in schema["properties"].items():
        for value, fits in allowed_and_refused(property_schema):
            response = live.http.post(path, json=body | needs.get(name, {}) | {name: value})
            if response.status_code == 400 and any(one in response.text for one in BEYOND_SCHEMA):
                continue
            tried += 1
            said = f"{name}={str(value)[:40]!r}: {response.text[:300]}"
            assert response.status_code in ((200,) if fits else (400, 404)), said
            if response.status_code != 200:
                ErrorAnswer.model_validate_json(response.text)
    assert tried > len(NEUTRAL)


def test_all_other_fields_are_refused(live: Live) -> None:
    for path, operation in POSTS.items():
        body = next(iter(operation.examples.values()))
        response = live.http.post(path, json={**body, "no_such_field": 1})
        assert response.status_code == 400
        ErrorAnswer.model_validate_json(response.text)


@given(limit=st.integers(1, 200_000), data=st.data())
def test_a_pattern_of_numbers_takes_those_below_the_limit(limit: int, data: st.DataObject) -> None:
    pattern = re.compile(f"^({numbers_below(limit)})$")
    near = st.one_of(st.integers(0, 2 * limit), st.integers(max(0, limit - 3), limit + 3))
    number = data.draw(near)
    assert bool(pattern.match(str(number))) == (number < limit)
    assert not pattern.match(f"0{number}")
