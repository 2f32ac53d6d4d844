"""A model hub on loopback: the part of the Hugging Face HTTP API that its client needs to fetch a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Models by name, each with its files; `fetched` are the files whose content was sent, in order."""

    models: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    num_requests: int = 0
    endpoint: str = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content for a path: `/api/models/NAME[/revision/R]`, `/api/models/NAME/tree/R`
        or `/NAME/resolve/R/FILE`.
        """
        self.num_requests += 1
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        name, rest = "/".join(parts[2:4] if is_api else parts[:2]), parts[4:] if is_api else parts[2:]
        files = self.models.get(name)
        if files is None:
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            return 404, headers, b"{}"
        if is_api:
            listing = [_entry(one, content) for one, content in files.items()]
            described = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": one} for one in files]}
            return 200, {}, json.dumps(listing if rest[:1] == ["tree"] else described).encode()
        file = "/".join(rest[2:])
        if rest[:1] != ["resolve"] or file not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{_hash(files[file])}"'}, files[file]


def _hash(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": _hash(content)}


@contextmanager
def running_hub(**models: Mapping[str, bytes]) -> Iterator[FakeHub]:
    """Serve models of the organisation `org` until the end."""
    hub = FakeHub({f"org/{name}": files for name, files in models.items()})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._send(*hub.answer(self.path), with_content=False)

        def do_GET(self) -> None:
            status, headers, content = hub.answer(self.path)
            if "X-Repo-Commit" in headers and status == 200:
                hub.fetched.append(
                    unquote(urlsplit(self.path).path).partition("/resolve/")[2].partition("/")[2]
                )
            self._send(status, headers, content, with_content=True)

        def _send(
            self, status: int, headers: Mapping[str, str], content: bytes, *, with_content: bool
        ) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_content:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the library names it
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
