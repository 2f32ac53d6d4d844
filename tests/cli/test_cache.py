"""`sagellm cache explain` against a live server, and what it refuses."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sagellm.engines.build import load
from tests.serving.live import serving


def test_the_spans_of_a_prompt_are_shown(cli: Any, tmp_path: Path) -> None:
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": "What is 17 + 25, and what is 18 + 26?"}]))
    text = "1 + 1 = 2, 1 + 2 = 3, 1 + 3 = 4, 1 + 4 = 5"
    with serving(load(None, {"kv.miss_attribution": True})) as live:
        body = {"prompt": text, "max_tokens": 1, "session_id": "s", "cache_salt": "t"}
        live.http.post("/v1/completions", json=body)
        known = cli("cache", "explain", text + " 9", "--url", live.url, "--cache-salt", "t")
        changed = text.replace("1 + 3", "2 + 3")
        session = cli(
            "cache", "explain", changed, "--url", live.url, "--cache-salt", "t", "--session-id", "s"
        )
        chat = cli("cache", "explain", "--messages", str(messages), "--url", live.url)
        api = cli("cache", "explain", text, "--url", f"{live.url}/v1/")
        empty = cli("cache", "explain", "", "--url", live.url)
    assert known.exit_code == 0, known.output
    assert "hit" in known.output
    assert "device" in known.output
    assert "differs from token" in session.output
    assert "never seen" in chat.output
    assert api.exit_code == 0, api.output
    assert empty.exit_code == 2
    assert "either prompt or messages" in empty.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--url", "http://127.0.0.1:1"], "no sageLLM server answers"),
        (["--messages", "/nowhere.json"], "is no JSON list of messages"),
        ([], "name a PROMPT, or --messages FILE"),
        (["x", "--messages", "/nowhere.json"], "name a PROMPT, or --messages FILE"),
    ],
)
def test_what_is_refused(cli: Any, arguments: list[str], message: str) -> None:
    result = cli("cache", "explain", *arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"[]", "name a sageLLM server"),
        (200, b"{}", "name a sageLLM server"),
        (200, b'{"num_tokens": 1, "block_size": 16, "spans": [{}], "session": null}', "explains nothing"),
        (404, b'{"detail": "Not Found"}', "status 404: is this a sageLLM server?"),
        (404, b'{"error": "File Not Found"}', "status 404"),
        (500, b"broken", "status 500"),
        (400, b'{"error": {"message": "too long"}}', "too long"),
    ],
)
def test_answers_of_other_servers(cli: Any, status: int, body: bytes, message: str) -> None:
    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = cli("cache", "explain", "x", "--url", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert result.exit_code == 2
    assert message in result.output
