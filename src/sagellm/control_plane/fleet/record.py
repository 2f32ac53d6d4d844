"""`InstanceRecord`: what a front has seen of one instance, for its operators."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from sagellm.core.clock import Clock
from sagellm.core.protocols.fleet import (
    Connected,
    EngineClient,
    HandOverPart,
    HandOverReport,
    HandOverState,
    InstanceEvent,
    InstanceLost,
    RequestRefused,
)
from sagellm.core.protocols.prefix_cache import ReusedPrefix
from sagellm.core.types import FinishReason, RequestOutput

RATE_S = 5.0
"""`tokens_per_s` is the mean of so many last seconds."""
_BUCKET_S = 0.25


class InstanceRecord:
    """Kept by an `EngineClient`, which shows it each event that it gives. For one thread.

    Counts begin with the front and go on when the instance is lost. `num_prompt_tokens`: of requests whose
    first token came from there; `num_cached_tokens`: what of them was not computed. So a request counts at
    one instance alone, also if another one went on with it. `num_handed_over`, `num_failed`: hand-overs and
    fetches in which it took part. `hot_prefixes`: the last that were asked for; they came at `seen_s`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._began_s = clock, clock.now()
        self.connected_s: float | None = None
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self.num_handed_over = self.num_failed = 0
        self.last_failure = ""
        self.failed_s: float | None = None
        self._has_ended = False
        self.hot_prefixes: Sequence[ReusedPrefix] = ()
        self.seen_s: float | None = None
        self._answers: dict[str, int] = {}
        """Requests whose answer began there, with the cached tokens that were counted."""
        self._moving: dict[str, int] = {}
        """Requests whose KV comes or goes there, now or soon, and how many last reports will follow.

        Reports of others are late."""
        self._hand_overs: dict[str, HandOverPart] = {}
        self._drawn: deque[tuple[int, int]] = deque()
        """Tokens by bucket of time, for the rate."""

    @property
    def num_under_way(self) -> int:
        """Hand-overs and fetches that have begun and not ended, as it reports them."""
        return len(self._hand_overs)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers in the last `RATE_S`."""
        now_s = self._clock.now()
        self._forget(int(now_s / _BUCKET_S))
        return sum(count for _, count in self._drawn) / min(RATE_S, max(_BUCKET_S, now_s - self._began_s))

    def take(self, event: InstanceEvent) -> None:
        match event:
            case RequestOutput():
                self._on_output(event)
            case HandOverReport():
                self._on_report(event)
            case Connected():
                self.connected_s, self._has_ended = self._clock.now(), False
            case InstanceLost(reason):
                self.connected_s = None
                self._answers.clear()
                self._hand_overs.clear()
                self._moving.clear()
                if not self._has_ended:  # else the reason is known better
                    self.fail(f"lost: {reason}")
            case RequestRefused(request_id, error, again):
                self.drop(request_id)
                if again:  # else the request is at fault
                    self.fail(f"a request failed: {error}")

    def moves(self, request_id: str, num_parts: int = 1) -> None:
        """A request is submitted there with so many hand-overs: reports of it will follow."""
        self._moving[request_id] = num_parts

    def drop(self, request_id: str) -> None:
        """A request was aborted there: nothing more will be said of it."""
        self._answers.pop(request_id, None)
        self._hand_overs.pop(request_id, None)
        self._moving.pop(request_id, None)

    def fail(self, reason: str) -> None:
        """Remember it as the last failure."""
        self.last_failure, self.failed_s = reason, self._clock.now()

    def ended(self, reason: str) -> None:
        """Its process has ended, as its supervisor says before or after the connection's loss."""
        self._has_ended = True
        self.fail(reason)

    def seen(self, found: Sequence[ReusedPrefix]) -> None:
        self.hot_prefixes, self.seen_s = found, self._clock.now()

    def _on_output(self, output: RequestOutput) -> None:
        count, name = len(output.new_token_ids), output.request_id
        if count:
            self.num_output_tokens += count
            self._draw(count)
            if output.num_output_tokens == count:  # of a request that goes on, the first tokens came before
                self.num_prompt_tokens += output.num_prompt_tokens
                self._answers[name] = 0
                self._count_cached(output)
        if output.finish_reason is not None:
            self._count_cached(output)  # a plain server says it at the end
            self._answers.pop(name, None)
            if name in self._hand_overs:
                self._moving[name] = 1
            elif output.finish_reason is not FinishReason.MOVED:
                self._moving.pop(name, None)
        if output.error is not None:
            self.fail(f"a request failed: {output.error}")

    def _count_cached(self, output: RequestOutput) -> None:
        if self._answers.get(output.request_id) == 0:
            self._answers[output.request_id] = output.num_cached_tokens
            self.num_cached_tokens += min(output.num_cached_tokens, output.num_prompt_tokens)

    def _on_report(self, report: HandOverReport) -> None:
        if report.request_id not in self._moving:
            return
        if not report.is_last:
            self._hand_overs[report.request_id] = report.part
            return
        self._hand_overs.pop(report.request_id, None)
        self._moving[report.request_id] -= 1
        if not self._moving[report.request_id]:
            del self._moving[report.request_id]
        if report.state is HandOverState.READY:
            self.num_handed_over += 1
        else:
            self.num_failed += 1
            self.fail(f"a {report.part.value} of KV failed: {report.reason}")

    def _draw(self, count: int) -> None:
        bucket = int(self._clock.now() / _BUCKET_S)
        self._forget(bucket)
        if self._drawn and self._drawn[-1][0] == bucket:
            count += self._drawn.pop()[1]
        self._drawn.append((bucket, count))

    def _forget(self, bucket: int) -> None:
        while self._drawn and self._drawn[0][0] <= bucket - RATE_S / _BUCKET_S:
            self._drawn.popleft()


class RecordedClient(EngineClient, Protocol):
    """A client that keeps a record, as all of this package do. `fault`: why it is not connected."""

    endpoint: str
    fault: str
    record: InstanceRecord

    def look(self) -> bool:
        """Ask the instance for its hot prefixes, unless they are asked for already.

        They come into `record` later. False: they will not come."""
