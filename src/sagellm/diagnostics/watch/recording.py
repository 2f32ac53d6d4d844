"""`WatchRecording`: the requests of a watch as a sagellm trace."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.benchmarks.traces.sagellm import header_line, request_line
from sagellm.core.errors import ConfigError
from sagellm.core.types import Namespace
from sagellm.diagnostics.watch.accesses import CacheAccess


class WatchRecording:
    """A line for each whole request, written when the request has ended.

    `sagellm replay` and `sagellm simulate` read the file.
    Blocks are numbered; no token and no text is written. Prompts are counted in whole blocks. `num_requests`
    were written; `num_left_out` came from servers with another block size than the first. `error` is why the
    recording ended early, if it did: the watch goes on. Raises `ConfigError` if the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.num_requests = self.num_left_out = 0
        self.error: OSError | None = None
        self._path = path
        self._first_s: float | None = None
        try:
            self._out: TextIO = path.open("w", encoding="utf-8", newline="\n", buffering=1)
        except OSError as error:
            raise ConfigError(f"cannot record to {path}: {error.strerror}") from error

    def write(self, access: CacheAccess, block_size: int) -> None:
        """Append a request, in the order in which requests end. Other block sizes are left out."""
        if self.error is not None:
            return
        try:
            self._write(access, block_size)
        except OSError as error:  # a full disk does not end the watch
            self.error = error

    def _write(self, access: CacheAccess, block_size: int) -> None:
        if self._first_s is None:
            self._first_s = access.time_s
            self._block_size = block_size
            self._out.write(header_line(block_size, self._path.stem))
        if block_size != self._block_size:
            self.num_left_out += 1
            return
        prompt = access.blocks.slice(0, access.num_queried)
        request = TraceRequest(
            time_s=round(max(0.0, access.time_s - self._first_s), 6),
            ids=type(access.blocks)(prompt),
            namespace=Namespace(),
            num_input_tokens=access.num_queried * block_size,
            num_output_tokens=(len(access.blocks) - access.num_queried) * block_size,
        )
        self._out.write(request_line(request))
        self.num_requests += 1

    def summary(self) -> str:
        """What was written, and what was not, for people."""
        text = f"{self._path}: {self.num_requests:,} requests"
        if not self.num_requests and self.error is None:
            text += "; a recording needs requests that report their hits, as those through --proxy do"
        if self.num_left_out:
            text += f"; {self.num_left_out:,} of servers with another block size are left out"
        if self.error is not None:
            text += f"; ended early: {self.error}"
        return text

    def close(self) -> None:
        try:
            self._out.close()
        except OSError as error:
            self.error = self.error or error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
