"""sageLLM's own format (JSON Lines), which keeps all of a trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from sagellm.benchmarks.traces._parsing import (
    BrokenLineError,
    IdMap,
    brief,
    json_object,
    number,
    required,
    text,
    whole,
)
from sagellm.benchmarks.traces.record import Trace, TraceRequest
from sagellm.core.errors import ConfigError
from sagellm.core.types import Namespace

VERSION = 1
MARK = "sagellm_trace"
FIELDS = (
    "time_s", "ids", "num_input_tokens", "num_output_tokens", "namespace", "session", "tenant", "meta",
)  # fmt: skip
"""Fields of a request; those from `namespace` on are omitted if empty."""


class SagellmFormat:
    """A header `{"sagellm_trace": 1, "name": ..., "block_tokens": n}`, then one request per line. A
    request has `FIELDS`; `namespace` is an object of the fields of `Namespace` that are not empty. Unknown
    fields are errors."""

    from_zero = False

    def __init__(self) -> None:
        self.block_tokens = 0
        self.title: str | None = None

    def recognises(self, line: str, record: Mapping[str, Any] | None) -> bool:
        return record is not None and MARK in record

    def parse(self, line_number: int, line: str, ids: IdMap) -> Iterable[TraceRequest]:
        record = json_object(line)
        if not self.block_tokens:
            self._begin(record)
            return
        unknown = record.keys() - set(FIELDS)
        if unknown:
            raise BrokenLineError(f"unknown field {min(unknown)!r}; a request has {', '.join(FIELDS)}")
        namespace = _namespace(record.get("namespace", {}))
        yield TraceRequest(
            time_s=number(record, "time_s"),
            ids=ids.tokens(required(record, "ids"), namespace, "ids"),
            namespace=namespace,
            num_input_tokens=whole(record, "num_input_tokens"),
            num_output_tokens=whole(record, "num_output_tokens"),
            session=text(record, "session") if "session" in record else None,
            tenant=text(record, "tenant") if "tenant" in record else "",
            meta=_mapping("meta", record.get("meta", {})),
        )

    def _begin(self, header: Mapping[str, Any]) -> None:
        """Reads the header; it cannot be skipped, since the other lines depend on it."""
        version, block_tokens = header.get(MARK), header.get("block_tokens")
        if version != VERSION:
            raise ConfigError(
                f'a sagellm trace begins with {{"{MARK}": {VERSION}, "block_tokens": ...}}; this one with '
                f"{brief(dict(header))}"
            )
        if type(block_tokens) is not int or block_tokens < 1:
            raise ConfigError(f"block_tokens of the header must be at least 1, got {brief(block_tokens)}")
        self.block_tokens = block_tokens
        self.title = str(header["name"]) if header.get("name") else None

    def write(self, trace: Trace, file: TextIO) -> None:
        """Writes everything but the source's format, which the header names beside its hash."""
        source = {"format": trace.format, "sha256": trace.sha256} if trace.sha256 else None
        file.write(header_line(trace.block_tokens, trace.name, source))
        file.writelines(map(request_line, trace.requests))


def header_line(block_tokens: int, name: str | None = None, source: Mapping[str, str] | None = None) -> str:
    """Returns the first line of a file. `source` is the format and hash of the original."""
    header: dict[str, Any] = {MARK: VERSION, "block_tokens": block_tokens}
    if name:
        header["name"] = name
    if source:
        header["source"] = dict(source)
    return json.dumps(header) + "\n"


def request_line(request: TraceRequest) -> str:
    """Returns the line of one request; raises `ConfigError` if JSON cannot hold its `meta`."""
    record: dict[str, Any] = {
        "time_s": request.time_s,
        "ids": request.ids.tolist(),
        "num_input_tokens": request.num_input_tokens,
        "num_output_tokens": request.num_output_tokens,
    }
    namespace = {name: value for name, value in request.namespace._asdict().items() if value}
    if namespace:
        record["namespace"] = namespace
    if request.session is not None:
        record["session"] = request.session
    if request.tenant:
        record["tenant"] = request.tenant
    if request.meta:
        record["meta"] = dict(request.meta)
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a request at {request.time_s} s cannot be written as JSON: {error}") from error


def _namespace(value: Any) -> Namespace:
    fields = _mapping("namespace", value)
    unknown = fields.keys() - set(Namespace._fields)
    if unknown or not all(isinstance(text_value, str) for text_value in fields.values()):
        raise BrokenLineError(
            f"namespace must hold texts named {', '.join(Namespace._fields)}, got {brief(value)}"
        )
    return Namespace(**fields)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BrokenLineError(f"{name} must be a JSON object, got {brief(value)}")
    return value


PLUGIN = SagellmFormat
