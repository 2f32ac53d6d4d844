"""The server that `sagellm bench http` measures: our own, started for it, or one that runs already."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from urllib.parse import urlsplit

from sagellm.core.errors import ConfigError, SageError
from sagellm.core.ports import SagePorts

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


@contextmanager
def our_server(arguments: Sequence[str]) -> Iterator[str]:
    """`sagellm serve` with these arguments on a free port of loopback; yields its URL, stops it afterwards.

    Raises `SageError` with the server's last line where it does not start.
    """
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sagellm", "serve", "--host", LOOPBACK, "--port", str(port), *arguments]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://{LOOPBACK}:{port}"
            _wait_until_ready(process, url)
            yield url
        except _EndedError as error:
            log.seek(0)
            last = log.read().strip().splitlines()[-1:]
            raise SageError(f"the server did not start: {' '.join(last) or error}") from error
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _EndedError(Exception):
    """The server's process has ended, or takes too long."""


def _wait_until_ready(process: subprocess.Popen[bytes] | subprocess.Popen[str], url: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise _EndedError(f"exit status {process.returncode}")
        try:
            get(url, "/ready", {})
        except (OSError, http.client.HTTPException, ConfigError):
            time.sleep(0.1)
        else:
            return
    raise _EndedError(f"not ready after {START_TIMEOUT_S:g} s")


def get(url: str, path: str, headers: Mapping[str, str]) -> bytes:
    """The body of one GET. Raises `ConfigError` for another status than 200, else as `http.client` does."""
    parts = urlsplit(url)
    made = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = made(parts.hostname or "", parts.port, timeout=10)
    try:
        connection.request("GET", parts.path.rstrip("/") + path, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise ConfigError(f"{url}{path} answers {answer.status}: {body[:300].decode(errors='replace')}")
        return body
    finally:
        connection.close()


def served_model(url: str, headers: Mapping[str, str]) -> str:
    """The first model that a server lists; raises `ConfigError` where nothing there speaks OpenAI's API."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        example = f"http://{LOOPBACK}:{int(SagePorts.HTTP)}"
        raise ConfigError(f"--url {url!r}: write the address of a server, for example {example}")
    try:
        return str(json.loads(get(url, "/v1/models", headers))["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"no server answers at {url}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url}/v1/models lists no model: is it an OpenAI-compatible server?") from error
