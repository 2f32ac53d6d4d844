"""Mooncake's JSON Lines (Qin et al., FAST 2025).

An id per block stands for the prefix up to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from sagellm.benchmarks.traces._parsing import SHARED_NAMESPACE, IdMap, json_object, number, required, whole
from sagellm.benchmarks.traces.record import Trace, TraceRequest, block_ids
from sagellm.core.errors import ConfigError

BLOCK_TOKENS = 512


class MooncakeFormat:
    """One request per line: `timestamp` in ms, `input_length`, `output_length`, `hash_ids`. The format
    does not say how many tokens a block has: 512 in the traces that its authors published; other sizes are
    an option."""

    title = None
    from_zero = False

    def __init__(self, block_tokens: int | None = None) -> None:
        if block_tokens is not None and block_tokens < 1:
            raise ConfigError(f"block_tokens must be at least 1, got {block_tokens}")
        self._asked = block_tokens
        self.block_tokens = block_tokens or BLOCK_TOKENS

    def recognises(self, line: str, record: Mapping[str, Any] | None) -> bool:
        return record is not None and {"timestamp", "hash_ids"} <= record.keys()

    def parse(self, line_number: int, line: str, ids: IdMap) -> Iterable[TraceRequest]:
        record = json_object(line)
        yield TraceRequest(
            time_s=number(record, "timestamp") / 1000,
            ids=ids.tokens(required(record, "hash_ids"), SHARED_NAMESPACE),
            namespace=SHARED_NAMESPACE,
            num_input_tokens=whole(record, "input_length"),
            num_output_tokens=whole(record, "output_length"),
        )

    def write(self, trace: Trace, file: TextIO) -> None:
        """Writes one line per request, with times rounded to ms. Namespaces become disjoint ids; sessions,
        tenants and `meta` are lost. A trace of tokens is cut into blocks (512 tokens, or the option). A
        trace of blocks keeps its block size, which the file cannot say: its reader has to set it."""
        if not any(len(request.ids) for request in trace.requests):
            raise ConfigError(f"trace {trace.name!r} has lengths only: convert it to sagellm")
        size = self._asked or (BLOCK_TOKENS if trace.block_tokens == 1 else trace.block_tokens)
        for request, ids in zip(trace.requests, block_ids(trace, size), strict=True):
            record = {
                "timestamp": round(request.time_s * 1000),
                "input_length": request.num_input_tokens,
                "output_length": request.num_output_tokens,
                "hash_ids": ids,
            }
            file.write(json.dumps(record) + "\n")


PLUGIN = MooncakeFormat
