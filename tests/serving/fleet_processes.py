"""A real fleet for tests: `sagellm serve` with its processes, asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

START_S = 120.0


class Fleet:
    """The processes of one `sagellm serve`, by name. `log` has what they have written."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.log: list[str] = []
        self.url = ""
        self._clients = threading.local()
        self._all_clients: list[httpx2.Client] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = raw.decode(errors="replace").rstrip()
            self.log.append(line)
            if "listening on http://" in line:
                self.url = "http://" + line.partition("listening on http://")[2].partition(";")[0]

    def wait_until_listening(self, within_s: float = START_S) -> None:
        until_s = time.monotonic() + within_s
        while not self.url:
            if time.monotonic() > until_s or self.process.poll() is not None:
                raise AssertionError("the fleet did not start:\n" + "\n".join(self.log[-40:]))
            time.sleep(0.02)

    @property
    def client(self) -> httpx2.Client:
        """One for each thread: making one takes much longer than a request."""
        if not hasattr(self._clients, "client"):
            self._clients.client = httpx2.Client()
            self._all_clients.append(self._clients.client)
        client: httpx2.Client = self._clients.client
        return client

    def status(self) -> dict[str, Any]:
        answer = self.client.get(f"{self.url}/v1/fleet", timeout=20.0)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def is_healthy(self) -> bool:
        try:
            return all(each["state"] == "ready" for each in self.status()["instances"])
        except (httpx2.HTTPError, KeyError):
            return False

    def wait_until_healthy(self, within_s: float) -> float:
        """Seconds until every instance is ready."""
        began_s = time.monotonic()
        while not self.is_healthy():
            if time.monotonic() > began_s + within_s:
                raise AssertionError(f"not healthy within {within_s} s:\n" + "\n".join(self.log[-40:]))
            time.sleep(0.05)
        return time.monotonic() - began_s

    def children(self) -> dict[str, int]:
        """The process id of each child of the supervisor, by its name in the log or the status."""
        found: dict[str, int] = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[1]) == self.process.pid:
                        found[folder.name] = int(folder.name)
                except (OSError, IndexError, ValueError):
                    continue
        return found

    def complete(self, tokens: Sequence[int], max_tokens: int, **given: Any) -> dict[str, Any]:
        body = {
            "model": "sagellm-demo",
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            **given,
        }
        answer = self.client.post(f"{self.url}/v1/completions", json=body, timeout=120.0)
        found: dict[str, Any] = answer.json() | {"status": answer.status_code}
        return found


@contextmanager
def running_fleet(
    *arguments: str, settings: Mapping[str, Any] | None = None, start_s: float = START_S
) -> Iterator[Fleet]:
    """A fleet on a free port, ended at the end. `settings`: keys of the configuration."""
    given = [
        f"--set={key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in (settings or {}).items()
    ]
    command = [sys.executable, "-m", "sagellm", "serve", "--port", "0", *arguments, *given]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment
    ) as process:
        fleet = Fleet(process)
        try:
            fleet.wait_until_listening(start_s)
            yield fleet
        finally:
            for client in fleet._all_clients:
                client.close()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
