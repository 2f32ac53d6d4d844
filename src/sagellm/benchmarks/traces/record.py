"""What every trace becomes: requests with an arrival time, ids of their prompt's blocks, and lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sagellm.core.types import Namespace, Tokens


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    `time_s`: arrival, seconds since the trace's start. `ids`: one per block of the trace's `block_tokens`
    prompt tokens, or the tokens themselves where that is 1; empty where the format has lengths only. Ids are
    comparable within `namespace` alone. `meta`: what else the format says of the request.
    """

    time_s: float
    ids: Tokens
    namespace: Namespace
    num_input_tokens: int
    num_output_tokens: int
    session: str | None = None
    tenant: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that was skipped: its number in the (decompressed) file, from 1 on, and why."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time; those of one moment in the order of the file.

    `sha256`: of the file's decompressed bytes, in hexadecimal; empty for a trace that is no file.
    """

    name: str
    format: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    sha256: str = ""
    skipped: tuple[BadLine, ...] = ()
