"""`approximate_reuse` over HTTP: asked for, counted apart, and refused where the server is exact."""

from __future__ import annotations

from typing import Any

from sagellm.engines.build import load
from tests.serving.live import Live, serving

COMPLETIONS = "/v1/completions"
TEXT = list(range(300, 380))


def usage(live: Live, prompt: list[int], **fields: Any) -> dict[str, Any]:
    answer = live.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["usage"]["prompt_tokens_details"]
    return found


def test_copied_tokens_are_counted_apart() -> None:
    with serving(load(None, {"kv.approximate_reuse": True})) as live:
        asks: dict[str, Any] = {"approximate_reuse": True, "cache_salt": "a"}
        assert usage(live, [200, 201, 202, *TEXT], **asks) == {"cached_tokens": 0}
        moved = [*range(210, 220), *TEXT, 221]
        assert usage(live, moved, **asks) == {"cached_tokens": 0, "approximate_tokens": 16}
        assert usage(live, moved, **{**asks, "cache_salt": "b"}) == {"cached_tokens": 0}
        assert (
            'sagellm_kv_approximate_tokens_total{model_name="sagellm-demo"} 16.0'
            in live.http.get("/metrics").text
        )
        other = [230, 231, *TEXT]
        stream = {"prompt": other, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
        assert '"approximate_tokens":' in live.http.post(COMPLETIONS, json={**stream, **asks}).text


def test_an_exact_server_says_how_to_allow_it() -> None:
    with serving(load()) as live:
        for stream in (False, True):
            body = {"prompt": TEXT, "max_tokens": 2, "approximate_reuse": True, "stream": stream}
            answer = live.http.post(COMPLETIONS, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "approximate_reuse")
            assert "kv.approximate_reuse" in error["message"]
        assert usage(live, TEXT, approximate_reuse=False) == {"cached_tokens": 0}
