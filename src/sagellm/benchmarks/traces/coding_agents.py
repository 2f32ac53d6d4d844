"""Coding-agent sessions recorded through a proxy: a session per line, with nested sub-agents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sagellm.benchmarks.traces._parsing import (
    BrokenLineError,
    IdMap,
    json_object,
    number,
    objects,
    required,
    whole,
)
from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.core.errors import ConfigError
from sagellm.core.types import Namespace

META = ("type", "model", "input_types", "output_types", "stop", "think_time", "api_time", "ttft")


class CodingAgentsFormat:
    """A line is a session, whose sub-agents are nested in it.

    Sessions have no absolute time: they are placed uniformly over `span_s` seconds. Their start is drawn once
    per line, in the order of the file (`numpy.random.default_rng(seed)`), also for a broken line. Each
    `every`-th block id is kept (the last of each `every`), so that a block stands for `every` times the
    file's size. A sub-agent starts `duration_ms` before its `t`; without it, as long before as its last
    nested `t` says. Ids have local scope: a session is a namespace.
    """

    title = None
    from_zero = False

    def __init__(self, every: int = 8, span_s: float = 14_400.0, seed: int = 0) -> None:
        if every < 1 or not span_s >= 0 or seed < 0:
            problem = (
                f"every must be at least 1, span_s and seed at least 0; got {every}, {span_s} and {seed}"
            )
            raise ConfigError(problem)
        self.block_tokens = 0
        self._every = every
        self._span_s = span_s
        self._seed = seed
        self._random: Any = None
        self._sessions: set[str] = set()

    def recognises(self, line: str, record: Mapping[str, Any] | None) -> bool:
        return record is not None and {"block_size", "requests", "hash_id_scope"} <= record.keys()

    def parse(self, line_number: int, line: str, ids: IdMap) -> Iterable[TraceRequest]:
        if self._random is None:
            import numpy as np

            self._random = np.random.default_rng(self._seed)
        start_s = float(self._random.uniform(0.0, self._span_s))
        record = json_object(line)
        block_size = whole(record, "block_size")
        size = block_size * self._every
        if size < 1 or size != (self.block_tokens or size):
            raise BrokenLineError(f"block_size {block_size}: all lines have the same, from 1 on")
        self.block_tokens = size
        session = str(required(record, "id"))
        if session in self._sessions:  # two lines are two sessions even with the same id
            session = f"{session} (line {line_number})"
        self._sessions.add(session)
        local = record.get("hash_id_scope", "local") == "local"
        namespace = Namespace(tenant=session if local else "")
        return list(self._requests(record, start_s, session, namespace, ids))

    def _requests(
        self, record: Mapping[str, Any], start_s: float, session: str, namespace: Namespace, ids: IdMap
    ) -> Iterator[TraceRequest]:
        for item in objects(record, "requests"):
            if item.get("type") == "subagent":
                yield from self._requests(item, _start_of(item, start_s), session, namespace, ids)
                continue
            kept = required(item, "hash_ids")
            if isinstance(kept, list):
                kept = kept[self._every - 1 :: self._every]
            yield TraceRequest(
                time_s=start_s + number(item, "t"),
                ids=ids.tokens(kept, namespace),
                namespace=namespace,
                num_input_tokens=whole(item, "in"),
                num_output_tokens=whole(item, "out"),
                session=session,
                meta={name: item[name] for name in META if name in item}
                | ({"subagent": True} if record.get("type") == "subagent" else {}),
            )


def _start_of(subagent: Mapping[str, Any], start_s: float) -> float:
    """Returns the start of a sub-agent in a session that began at `start_s`."""
    end_s = start_s + number(subagent, "t")
    if subagent.get("duration_ms") is not None:
        return end_s - number(subagent, "duration_ms") / 1000
    nested = objects(subagent, "requests")
    return end_s - (number(nested[-1], "t") if nested else 0.0)


PLUGIN = CodingAgentsFormat
