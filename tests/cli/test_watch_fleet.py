"""`sagellm watch --url` and `sagellm fleet status`, at a front that is played from a list."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.diagnostics.watch.test_fleet import LOST, READY, fleet

STARTING = (503, {"error": {"message": "the server is starting"}})


@contextmanager
def front(*answers: tuple[int, Any]) -> Iterator[str]:
    """The address of a server that gives these answers to GET /v1/fleet; the last one again and again."""
    left = list(answers)

    class Played(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = left[0]
            if len(left) > 1:
                del left[0]
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Played)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def watched(cli: Any, answers: Sequence[tuple[int, Any]], *options: str) -> Any:
    with front(*answers) as url:
        return cli("watch", "--url", url, "--duration", "0.3", "--interval", "0.05", *options)


def test_a_watch_shows_and_writes_the_fleet(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "seen.json"
    result = watched(cli, [(200, fleet(READY)), (200, fleet(READY, LOST))], "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "decode-0" in result.stdout
    assert "1 of 2 ready" in result.stdout
    assert "decode-1 is lost: nothing listens there" in result.stderr
    seen = json.loads(file.read_text(encoding="utf-8"))
    assert [each["name"] for each in seen["status"]["instances"]] == ["decode-0", "decode-1"]
    assert seen["watched"]["instances"][0]["num_placed"] == 0


def test_a_watch_waits_for_a_fleet_that_starts(cli: Any) -> None:
    result = watched(cli, [STARTING, STARTING, (200, fleet(READY))])
    assert result.exit_code == 0, result.output
    assert result.stderr.count("is starting") == 1
    assert "decode-0" in result.stdout


def test_a_fleet_that_never_serves(cli: Any) -> None:
    result = watched(cli, [STARTING])
    assert result.exit_code == 2
    assert "did not serve within 0.3 s" in result.output


def test_a_front_that_goes_is_shown_as_it_was(cli: Any) -> None:
    gone = (500, {"error": {"message": "the engine has failed"}})
    result = watched(cli, [(200, fleet(READY)), gone])
    assert result.exit_code == 0, result.output
    assert "the engine has failed" in result.stdout
    assert "decode-0" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--url", "http://127.0.0.1:9"], "name it with --url"),
        (["--url", "http://127.0.0.1:9", "tcp://h:1"], "--url shows a fleet"),
        (["--instance", "a-0", "--record", "x"], "--url shows a fleet"),
        (["--url", "http://127.0.0.1:9", "--interval", "0"], "more than 0 seconds"),
    ],
)
def test_what_is_refused(cli: Any, arguments: list[str], word: str) -> None:
    result = cli("watch", *arguments)
    assert result.exit_code == 2
    assert word in " ".join(result.output.split())


def test_a_server_of_one_engine_says_so(cli: Any) -> None:
    one = (404, {"error": {"message": "this server is one engine: start it with --prefill and --decode"}})
    result = watched(cli, [one])
    assert result.exit_code == 2
    assert "this server is one engine" in " ".join(result.output.split())


def test_status_of_a_fleet_and_of_one_that_starts(cli: Any) -> None:
    with front((200, fleet(READY, LOST))) as url:
        result = cli("fleet", "status", "--url", url)
    assert result.exit_code == 0, result.output
    assert "decode-1 is lost: nothing listens there" in result.stdout
    with front(STARTING) as url:
        result = cli("fleet", "status", "--url", url)
    assert result.exit_code == 2
    assert "is starting" in result.output
