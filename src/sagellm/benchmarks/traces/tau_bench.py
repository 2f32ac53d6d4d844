"""tau-bench's trajectories (Yao et al., 2024): an agent with tools and a simulated user."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from sagellm.benchmarks.traces._parsing import (
    BYTES,
    SHARED_NAMESPACE,
    Encode,
    IdMap,
    TextTokens,
    json_object,
    objects,
    text,
    whole,
)
from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.core.errors import ConfigError


class TauBenchFormat:
    """A line is a trajectory: `task_id`, `trial` and `traj`, a list of messages.

    A message has `role`, `content`, `tool_calls`. Each message of the assistant is a request, whose prompt is
    all messages before it. The file has no times: a trajectory starts at a moment drawn uniformly over
    `span_s` seconds, and its requests follow `gap_s` seconds apart. Prompts are compared by content, so `ids`
    are tokens and there is one namespace. `tokenizer` is that of `TextTokens`.
    """

    block_tokens = 1
    title = None
    from_zero = True

    def __init__(
        self,
        tokenizer: str | Path | Encode = BYTES,
        span_s: float = 3600.0,
        gap_s: float = 10.0,
        seed: int = 0,
    ) -> None:
        if not (span_s >= 0 and gap_s >= 0):
            raise ConfigError(f"span_s and gap_s must be at least 0, got {span_s} and {gap_s}")
        self._texts = TextTokens(tokenizer)
        self._span_s, self._gap_s = span_s, gap_s
        self._random = Random(seed)

    def recognises(self, line: str, record: Mapping[str, Any] | None) -> bool:
        return record is not None and {"task_id", "trial", "traj"} <= record.keys()

    def parse(self, line_number: int, line: str, ids: IdMap) -> Iterable[TraceRequest]:
        start_s = self._random.uniform(0.0, self._span_s)
        record = json_object(line)
        session = f"task {whole(record, 'task_id')}, trial {whole(record, 'trial')}"
        requests: list[TraceRequest] = []
        prompt = ""
        for role, content in map(_message, objects(record, "traj", "messages")):
            if role == "assistant":
                tokens = self._texts.tokens(prompt, ids)
                requests.append(
                    TraceRequest(
                        time_s=start_s + len(requests) * self._gap_s,
                        ids=tokens,
                        namespace=SHARED_NAMESPACE,
                        num_input_tokens=len(tokens),
                        num_output_tokens=self._texts.count(content),
                        session=session,
                    )
                )
            prompt += f"<{role}>\n{content}\n"
        return requests


def _message(message: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the role and the text: the content, and the tool calls as JSON."""
    content = text(message, "content") if message.get("content") is not None else ""
    calls = message.get("tool_calls")
    return text(message, "role"), content + (json.dumps(calls) if calls else "")


PLUGIN = TauBenchFormat
