"""Numbers at the edge of what a request may hold, over every engine: an answer or 4xx, never a dead loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine_choice import ENGINES, llm_of
from tests.serving.live import Live, serving


@pytest.fixture(scope="module", params=ENGINES)
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    with serving(llm_of(request.param)) as running:
        yield running


EDGES: list[dict[str, Any]] = [
    {"seed": 2**63 - 1, "n": 2},
    {"seed": -(2**63)},
    {"seed": -5},
    {"top_k": 2**62},
    {"top_k": -7},
    {"top_k": 1, "temperature": 2},
    {"temperature": 1e-30},
    {"temperature": 100},
    {"top_p": 1e-30},
    {"min_p": 1.0},
    {"repetition_penalty": 1e-6},
    {"repetition_penalty": 100},
    {"presence_penalty": 2, "frequency_penalty": -2},
    {"stop_token_ids": [2**40]},
    {"stop_token_ids": [-1]},
    {"logit_bias": {"20": 100}},
    {"logit_bias": {"20": -100, "21": -100}, "temperature": 0},
    {"logit_bias": {"99999999999999999999": 1}},
    {"min_tokens": 4},
    {"min_tokens": 2**40},
    {"max_tokens": 2**40},
    {"logprobs": 20},
    {"logprobs": 0},
    {"priority": 2**30},
    {"priority": 2**40},
    {"prompt": [2**40]},
    {"prompt": "\0\u202e\ufffd"},
    {"prompt": [[1], [2], [3]] * 30, "max_tokens": 1},
    {"stop": "x" * 100_000},
    {"n": 128, "max_tokens": 1},
    {"cache_salt": "s" * 10_000},
]


@pytest.mark.parametrize("fields", EDGES, ids=lambda fields: "-".join(fields))
def test_an_edge_is_served_or_refused(live: Live, fields: dict[str, Any]) -> None:
    body = {"prompt": "1 + 2", "max_tokens": 4, "temperature": 1} | fields
    response = live.http.post("/v1/completions", json=body)
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    again = live.http.post("/v1/completions", json={"prompt": "1 + 2", "max_tokens": 2})
    assert again.status_code == 200, f"after {fields}: {again.text}"
    assert live.http.get("/health").status_code == 200
