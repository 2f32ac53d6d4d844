"""`sagellm watch --url` and `sagellm fleet status`, at a front that is played from a list."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sagellm.cli.watch_fleet import FleetWatch, watch_fleet
from sagellm.core.errors import ConfigError
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


class Turns(threading.Event):
    """Is set after so many waits, none of which takes time."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self._left = num

    def wait(self, timeout: float | None = None) -> bool:
        self._left -= 1
        return self._left <= 0


def watch(*answers: tuple[int, Any], json_file: Path | None = None) -> None:
    """A look for each answer."""
    with front(*answers) as url:
        watch_fleet(FleetWatch(url), 1.0, 1e9, Turns(len(answers)), json_file)


def test_a_watch_shows_and_writes_the_fleet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "seen.json"
    watch((200, fleet(READY)), (200, fleet(READY, LOST)), json_file=file)
    shown = capsys.readouterr()
    assert "decode-0" in shown.out
    assert "1 of 2 ready" in " ".join(shown.out.split())
    assert "decode-1 is lost: nothing listens there" in shown.err
    seen = json.loads(file.read_text(encoding="utf-8"))
    assert [each["name"] for each in seen["status"]["instances"]] == ["decode-0", "decode-1"]
    assert seen["watched"]["instances"][0]["num_placed"] == 0


def test_a_watch_waits_for_a_fleet_that_starts(capsys: pytest.CaptureFixture[str]) -> None:
    watch(STARTING, STARTING, (200, fleet(READY)))
    shown = capsys.readouterr()
    assert shown.err.count("is starting") == 1
    assert "decode-0 is ready" in shown.err
    assert "decode-0" in shown.out


def test_a_fleet_that_never_serves() -> None:
    with pytest.raises(ConfigError, match=r"the fleet did not serve within .*is starting"):
        watch(STARTING, STARTING)


def test_a_front_that_goes_is_shown_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    watch((200, fleet(READY)), (500, {"error": {"message": "the engine has failed"}}))
    shown = capsys.readouterr()
    assert "the engine has failed" in shown.out
    assert "decode-0" in shown.out


def test_the_command_watches_for_a_while(cli: Any) -> None:
    with front((200, fleet(READY, LOST))) as url:
        result = cli("watch", "--url", url, "--duration", "0.2", "--interval", "0.05")
    assert result.exit_code == 0, result.output
    assert "decode-1 is lost: nothing listens there" in result.stdout


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
    with front(one) as url:
        result = cli("watch", "--url", url, "--duration", "0.2")
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
