"""A list of prompts (JSON Lines): bodies of requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sagellm.benchmarks.traces._parsing import BYTES, Encode, IdMap, TextTokens, json_object, objects, text
from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.core.types import Namespace


class PromptsFormat:
    """`prompt` (a text) or `messages`; also `cache_salt` (the tenant) and `session_id`.

    Request number n arrives in second n. Prompts are compared by content, so `ids` are tokens; there is a
    namespace for each tenant. Roles stand before their messages as in no particular model's chat template.
    `tokenizer` is that of `TextTokens`.
    """

    block_tokens = 1
    title = None
    from_zero = True

    def __init__(self, tokenizer: str | Path | Encode = BYTES) -> None:
        self._texts = TextTokens(tokenizer)

    def recognises(self, line: str, record: Mapping[str, Any] | None) -> bool:
        return record is not None and not {"prompt", "messages"}.isdisjoint(record)

    def parse(self, line_number: int, line: str, ids: IdMap) -> Iterable[TraceRequest]:
        record = json_object(line)
        if "prompt" in record:
            prompt = text(record, "prompt")
        else:
            parts = objects(record, "messages")
            prompt = "".join(f"<{text(part, 'role')}>\n{text(part, 'content')}\n" for part in parts)
        tokens = self._texts.tokens(prompt, ids)
        tenant = text(record, "cache_salt") if record.get("cache_salt") is not None else ""
        yield TraceRequest(
            time_s=float(line_number),
            ids=tokens,
            namespace=Namespace(tenant),
            num_input_tokens=len(tokens),
            num_output_tokens=0,
            session=text(record, "session_id") if record.get("session_id") is not None else None,
            tenant=tenant,
        )


PLUGIN = PromptsFormat
