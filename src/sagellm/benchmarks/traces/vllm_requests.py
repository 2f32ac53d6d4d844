"""Per-request timings of a vLLM server, as LLMServingSim publishes them: lengths only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sagellm.benchmarks.traces._parsing import IdMap, json_object, number, whole
from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.core.types import Namespace, Tokens

TIMES = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")


class VllmRequestsFormat:
    """JSON Lines with `request_id`, `input_toks`, `output_toks` and `arrival_time` (s). `meta` keeps the
    id and those times of `TIMES` that a line has, on their own clock. `ids` stay empty."""

    block_tokens = 1
    title = None
    from_zero = True

    def recognises(self, line: str, record: Mapping[str, Any] | None) -> bool:
        return record is not None and {"input_toks", "output_toks", "arrival_time"} <= record.keys()

    def parse(self, line_number: int, line: str, ids: IdMap) -> Iterable[TraceRequest]:
        record = json_object(line)
        meta: dict[str, Any] = {name: number(record, name) for name in TIMES if name in record}
        if "request_id" in record:
            meta["request_id"] = str(record["request_id"])
        yield TraceRequest(
            time_s=number(record, "arrival_time"),
            ids=Tokens(),
            namespace=Namespace(),
            num_input_tokens=whole(record, "input_toks"),
            num_output_tokens=whole(record, "output_toks"),
            meta=meta,
        )


PLUGIN = VllmRequestsFormat
