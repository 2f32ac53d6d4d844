"""`PlainMeter`: the load of a plain server, from its figures and its answers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sagellm.control_plane.fleet.load import WINDOW_S, running_mean
from sagellm.control_plane.fleet.plain_kind import LoadReading
from sagellm.core.clock import Clock
from sagellm.core.protocols.fleet import InstanceFacts
from sagellm.core.protocols.router import ExecutionInstance


@dataclass(slots=True)
class _Open:
    """A request that is not answered yet. `token_s`: when its last token came; None before the first."""

    num_prompt_tokens: int
    token_s: float | None = None


class PlainMeter:
    """The requests of one connection.

    The time of a step is that between two tokens of an answer. That of a prompt token comes from the
    server's counters, which know what was computed and what was cached.
    """

    def __init__(self, facts: InstanceFacts, clock: Clock) -> None:
        self._facts, self._clock = facts, clock
        self._open: dict[str, _Open] = {}
        self._busy: deque[tuple[float, bool]] = deque()
        self._last: LoadReading | None = None
        self._prefill_token_s = self._step_s = 0.0

    def begin(self, request_id: str, num_prompt_tokens: int) -> None:
        self._open[request_id] = _Open(num_prompt_tokens)

    def token(self, request_id: str, num_tokens: int) -> None:
        now_s, entry = self._clock.now(), self._open[request_id]
        if entry.token_s is not None and num_tokens:
            self._step_s = running_mean(self._step_s, (now_s - entry.token_s) / num_tokens)
        entry.token_s = now_s

    def end(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def report(
        self, reading: LoadReading | None, read_s: float, *, is_fresh: bool, num_evicted: int
    ) -> ExecutionInstance:
        """The load of the server as it is known.

        `reading`: None where the server does not tell; then it has what was sent to it. `read_s`: when it was
        asked.
        """
        waiting = [each.num_prompt_tokens for each in self._open.values() if each.token_s is None]
        if reading is None:
            reading = LoadReading(len(self._open) - len(waiting), len(waiting), 0.0)
        else:
            self._learn(reading)
        queued = reading.num_queued_tokens
        usage, capability = min(1.0, max(0.0, reading.kv_cache_usage)), self._facts.capability
        return ExecutionInstance(
            self._facts.instance_id,
            self._facts.kind,
            num_waiting=reading.num_waiting,
            num_running=reading.num_running,
            num_queued_tokens=sum(waiting) if queued is None else queued,
            num_free_blocks=round((1.0 - usage) * capability.num_blocks),
            num_blocks=capability.num_blocks,
            max_num_seqs=capability.max_num_seqs,
            kv_cache_usage=usage,
            eviction_count=num_evicted,
            utilization=self._utilization(read_s, is_busy=reading.num_running > 0),
            prefill_token_s=self._prefill_token_s,
            step_s=self._step_s,
            is_fresh=is_fresh,
            reported_s=read_s,
        )

    def _learn(self, reading: LoadReading) -> None:
        """What prompts took between two readings. Counters that went back are of a new process."""
        last, self._last = self._last, reading
        if last is not None and reading.num_prefill_tokens > last.num_prefill_tokens:
            tokens = reading.num_prefill_tokens - last.num_prefill_tokens
            mean_s = (reading.prefill_s - last.prefill_s) / tokens
            self._prefill_token_s = running_mean(self._prefill_token_s, mean_s)

    def _utilization(self, now_s: float, *, is_busy: bool) -> float:
        """The share of the last readings in which it ran something."""
        self._busy.append((now_s, is_busy))
        while self._busy[0][0] < now_s - WINDOW_S:
            self._busy.popleft()
        return sum(busy for _, busy in self._busy) / len(self._busy)
