"""LMCache's agent traces (JSON Lines): the text of every call, with its session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sagellm.benchmarks.traces._parsing import (
    BYTES,
    SHARED_NAMESPACE,
    Encode,
    IdMap,
    TextTokens,
    json_object,
    number,
    text,
)
from sagellm.benchmarks.traces.record import TraceRequest


class LmcacheAgentsFormat:
    """`timestamp` in µs, `input` (the whole prompt), `output`, `session_id` or `session_file`. Prompts are
    compared by content, so `ids` are tokens and there is one namespace. `tokenizer` is that of
    `TextTokens`."""

    block_tokens = 1
    title = None
    from_zero = True

    def __init__(self, tokenizer: str | Path | Encode = BYTES) -> None:
        self._texts = TextTokens(tokenizer)

    def recognises(self, line: str, record: Mapping[str, Any] | None) -> bool:
        return record is not None and {"timestamp", "input", "output"} <= record.keys()

    def parse(self, line_number: int, line: str, ids: IdMap) -> Iterable[TraceRequest]:
        record = json_object(line)
        tokens = self._texts.tokens(text(record, "input"), ids)
        yield TraceRequest(
            time_s=number(record, "timestamp") / 1e6,
            ids=tokens,
            namespace=SHARED_NAMESPACE,
            num_input_tokens=len(tokens),
            num_output_tokens=self._texts.count(text(record, "output")),
            session=_session(record),
        )


def _session(record: Mapping[str, Any]) -> str:
    return text(record, "session_id" if record.get("session_id") is not None else "session_file")


PLUGIN = LmcacheAgentsFormat
