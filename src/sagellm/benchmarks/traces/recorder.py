"""Records the requests of a running engine as a sagellm trace."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.benchmarks.traces.sagellm import header_line, request_line
from sagellm.core.errors import ConfigError
from sagellm.core.events import EventBus, RequestFinished, RequestReceived
from sagellm.core.types import TOKEN_BYTES, Namespace, Request, Tokens
from sagellm.kvmgr.prefix_cache.fingerprint import chain

log = logging.getLogger("sagellm.trace")

KEPT_HASH_BYTES = 16


class TraceRecorder:
    """Writes a line for each request when it ends; `close` writes the unfinished ones.

    The file does not reveal prompts: blocks are numbered by their hash in order of appearance, and tenants
    are `tenant-1`, `tenant-2`. With `keep_tokens` it holds the prompts' tokens and the tenants' names. The
    recorder keeps a hash (about 150 bytes) per different block.
    """

    def __init__(
        self, path: str | Path, events: EventBus, *, block_tokens: int, keep_tokens: bool = False
    ) -> None:
        self.num_requests = 0
        self._block_tokens = 1 if keep_tokens else block_tokens
        self._ids: Callable[[Request], Tokens] = _tokens if keep_tokens else self._block_numbers
        self._keep_names = keep_tokens
        self._numbers: defaultdict[bytes, int] = defaultdict(count().__next__)
        self._tenants: defaultdict[str, int] = defaultdict(count(1).__next__)
        self._open: dict[str, TraceRequest] = {}
        self._start_s: float | None = None
        self._out = _create(Path(path))
        self._out.write(header_line(self._block_tokens, Path(path).stem))
        self._unsubscribe = [
            events.subscribe(RequestReceived, self._received),
            events.subscribe(RequestFinished, self._finished),
        ]

    def close(self) -> None:
        """Stops listening and writes unfinished requests with no output; safe to call twice."""
        self._stop_listening()
        unfinished, self._open = self._open, {}
        for request in unfinished.values():
            self._write(replace(request, meta={"finish_reason": "unfinished"}))
        with contextlib.suppress(OSError):  # logged when the write failed
            self._out.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stop_listening(self) -> None:
        listening, self._unsubscribe = self._unsubscribe, []
        for unsubscribe in listening:
            unsubscribe()

    def _received(self, event: RequestReceived) -> None:
        request = event.request
        if self._start_s is None:
            self._start_s = event.time_s
        namespace = self._namespace(request.namespace)
        self._open[request.request_id] = TraceRequest(
            time_s=round(event.time_s - self._start_s, 6),
            ids=self._ids(request),
            namespace=namespace,
            num_input_tokens=len(request.tokens),
            num_output_tokens=0,
            tenant=namespace.tenant,
        )

    def _finished(self, event: RequestFinished) -> None:
        request = self._open.pop(event.request_id, None)
        if request is None:  # received before the recording started
            return
        meta: dict[str, Any] = {"finish_reason": event.reason, "num_cached_tokens": event.num_cached_tokens}
        if event.first_token_s is not None:
            meta["ttft_s"] = round(event.first_token_s - event.queued_s, 6)
        self._write(replace(request, num_output_tokens=event.num_output_tokens, meta=meta))

    def _write(self, request: TraceRequest) -> None:
        """Writes a line; a full disk ends the recording, not the engine."""
        try:
            self._out.write(request_line(request))
        except OSError as error:
            log.error("recording ends after %d requests: %s", self.num_requests, error)
            self._open.clear()
            self._stop_listening()
        else:
            self.num_requests += 1

    def _block_numbers(self, request: Request) -> Tokens:
        """Returns a number per block. The last block may be partial, hashed by its content."""
        data, step = request.tokens.tobytes(), self._block_tokens * TOKEN_BYTES
        hashes = chain(data, step, request.namespace)
        tail = data[len(hashes) * step :]
        if tail:
            hashes += chain(tail, len(tail), request.namespace, hashes[-1] if hashes else None)
        return Tokens([self._numbers[block_hash[:KEPT_HASH_BYTES]] for block_hash in hashes])

    def _namespace(self, namespace: Namespace) -> Namespace:
        if self._keep_names or not namespace.tenant:
            return namespace
        return namespace._replace(tenant=f"tenant-{self._tenants[namespace.tenant]}")


def _tokens(request: Request) -> Tokens:
    return Tokens(request.tokens)


def _create(path: Path) -> TextIO:
    """Opens the file line-buffered, so that a killed process has written all finished requests."""
    try:
        return path.open("w", encoding="utf-8", newline="\n", buffering=1)
    except OSError as error:
        raise ConfigError(f"cannot record to {path}: {error.strerror}") from error
