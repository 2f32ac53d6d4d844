"""What if so many instances computed only prompts? Replays requests on a fleet model.

The model is fluid: between two events an instance computes a prompt, or decodes all its rows at one speed. It
knows queues, KV memory, hand-overs and the goals of each request, and so it tells how many requests would
meet theirs. DistServe (Zhong et al., OSDI 2024) chooses placements by simulated goodput before it starts;
here the requests of the last minutes are the workload, and the answer is used at once.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

from sagellm.control_plane.router._step_fit import StepLine

LATE_WEIGHT = 4.0
"""As `CostRouter.late_weight`."""
JOIN_SHARE = 0.5
"""Of a decode step without context, what a step takes more in which handed-over requests join: their last
blocks are computed, all in the one step."""
DOUBTS = (0.92, 1.0, 1.08)
"""Multiples of the goals, since times of the model are wrong by some per cent. Where all requests have about
the same time, a share for one goal alone would fall from 1 to 0 at once."""
YIELD_EVERY = 8
"""Requests that are replayed between two yields."""


class Speeds(NamedTuple):
    """Of one instance, in seconds.

    A prompt token takes `token_s`, and `token_squared_s` more for each token before it; a step with prompt
    tokens, of which it has `chunk` at most, takes `chunk_s` besides. Decode steps take what `line` says.
    `kv_tokens` fit into memory.
    """

    token_s: float
    token_squared_s: float = 0.0
    line: StepLine = StepLine(0.01)
    kv_tokens: float = math.inf
    chunk: int = 8192
    chunk_s: float = 0.0
    transfer_s: float = 0.0
    transfer_token_s: float = 0.0

    def prompt_s(self, num_tokens: int, num_uncached: int) -> float:
        """Seconds to compute the last `num_uncached` of a prompt's tokens, without rows beside it."""
        before = num_tokens - num_uncached + num_uncached / 2
        return num_uncached * (self.token_s + before * self.token_squared_s)


class PastRequest(NamedTuple):
    """A request that was placed. Goals in seconds, infinite where there is none."""

    arrival_s: float
    num_tokens: int
    num_uncached: int
    num_output: int
    ttft_s: float = math.inf
    tpot_s: float = math.inf

    @property
    def has_goal(self) -> bool:
        return min(self.ttft_s, self.tpot_s) < math.inf

    def goals_met(self, ttft_s: float, tpot_s: float) -> float:
        """1.0 if these times meet its goals, 0.0 if not. Between them if in doubt."""
        worst = max(ttft_s / self.ttft_s, tpot_s / self.tpot_s)
        return sum(worst <= scale for scale in DOUBTS) / len(DOUBTS)


class FleetForm(NamedTuple):
    """How instances are used.

    `num_prefill` of them compute only prompts. `rescues`: a request whose first token would be late there is
    served whole by another instance, where its prompt delays answers.
    """

    num_prefill: int
    rescues: bool


def goes_apart(
    num_uncached: int, apart_s: float, whole_s: float, slack_s: float, tokens: int, *, rescues: bool
) -> bool:
    """Whether a request's prompt is computed on a prefill instance, where there are some.

    Not if it has fewer than `tokens` tokens to compute; nor, with `rescues`, if its first token would be late
    there (after `apart_s` seconds, with `slack_s` left) and comes earlier on an instance that decodes
    (`whole_s`).
    """
    return num_uncached >= tokens and (not rescues or apart_s <= slack_s or apart_s <= whole_s)


class _Modelled:
    """One instance.

    `drawn`: tokens that each row has drawn since the beginning. `rows`: a heap of (`drawn`
    at the end, request). `prompts`: those that wait. `heads`: those that are computed, in steps of a chunk.
    `context`: tokens of KV in use."""

    __slots__ = (
        "arrivals", "at_s", "coming", "context", "drawn", "ends_s", "firsts_s", "handed", "heads",
        "heads_end_s", "heads_rate", "is_prefill", "joined_s", "prompts", "requests", "rows", "speeds",
        "work_s",
    )  # fmt: skip

    def __init__(self, fleet: _Fleet, *, is_prefill: bool) -> None:
        self.speeds, self.requests = fleet.speeds, fleet.requests
        self.firsts_s, self.ends_s, self.handed = fleet.firsts_s, fleet.ends_s, fleet.handed
        self.is_prefill = is_prefill
        self.at_s = self.drawn = self.context = self.coming = self.work_s = 0.0
        self.rows: list[tuple[float, int]] = []
        self.prompts: deque[tuple[int, float]] = deque()
        self.arrivals: deque[int] = deque()
        self.heads: list[int] = []
        self.heads_end_s = self.heads_rate = 0.0
        self.joined_s = -math.inf

    @property
    def queue_s(self) -> float:
        """Until a prompt that comes now is begun."""
        return self.work_s + (self.heads_end_s - self.at_s if self.heads else 0.0)

    @property
    def step_s(self) -> float:
        return self.speeds.line.of(len(self.rows), self.context + self.coming)

    def cost_s(self, request: PastRequest, seconds: float) -> float:
        """As `CostRouter`: waiting of this request and of those there, nothing cached."""
        num_rows, num_output = len(self.rows) + len(self.heads) + len(self.prompts), request.num_output
        context = self.context + self.coming
        line, first_s = self.speeds.line, self.queue_s + seconds
        longer_s = line.row_s + (request.num_tokens + num_output / 2) * line.context_token_s
        step_s = line.of(num_rows, context) + longer_s
        late_s = max(0.0, first_s - request.ttft_s) + num_output * max(0.0, step_s - request.tpot_s)
        delay_s = seconds + longer_s * num_output / 2
        return first_s + num_output * step_s + num_rows * delay_s + LATE_WEIGHT * late_s

    def add_prompt(self, number: int, seconds: float) -> None:
        self.prompts.append((number, seconds))
        self.work_s += seconds

    def advance(self, until_s: float) -> None:
        """Let it work until then, or until it has nothing to do."""
        while self.at_s < until_s:
            rows, now_s = self.rows, self.at_s
            if self.prompts and not self.heads:
                self._begin_prompts()
            if self.heads:
                rate, event_s = self.heads_rate, self.heads_end_s
            elif rows:
                rate = 1 / self.speeds.line.of(len(rows), self.context)
                event_s = math.inf
            else:
                self.at_s = until_s if until_s < math.inf else now_s
                return
            row_s = now_s + (rows[0][0] - self.drawn) / rate if rows else math.inf
            next_s = min(event_s, row_s, until_s)
            tokens = (next_s - now_s) * rate
            self.drawn += tokens
            self.context += tokens * len(rows)
            self.at_s = next_s
            if next_s == row_s:
                self._end_row()
            elif next_s == event_s:
                self._end_prompts()

    def _begin_prompts(self) -> None:
        """As many as fit into one step and into memory, or a long one."""
        speeds, context, room = self.speeds, self.context, self.speeds.chunk
        num_uncached, seconds, held = 0, 0.0, context
        while self.prompts:
            number, prompt_s = self.prompts[0]
            request = self.requests[number]
            fits = held + request.num_tokens <= speeds.kv_tokens or not (self.rows or self.heads)
            if not fits or (self.heads and request.num_uncached > room):
                break
            self.prompts.popleft()
            self.heads.append(number)
            held += request.num_tokens
            room -= request.num_uncached
            num_uncached += request.num_uncached
            seconds += prompt_s
        if self.heads:
            self.work_s -= seconds
            num_steps = max(1.0, num_uncached / speeds.chunk)
            rows_s = speeds.line.of(len(self.rows), context) - speeds.line.step_s
            seconds += num_steps * (speeds.chunk_s + rows_s)
            self.heads_end_s, self.heads_rate = self.at_s + seconds, num_steps / seconds
            if not self.is_prefill:
                self.context = held

    def _end_prompts(self) -> None:
        heads, self.heads = self.heads, []
        for number in heads:
            self.firsts_s[number] = self.at_s
            if self.is_prefill:
                speeds, num_tokens = self.speeds, self.requests[number].num_tokens
                ready_s = self.at_s + speeds.transfer_s + num_tokens * speeds.transfer_token_s
                heapq.heappush(self.handed, (ready_s, number))
            else:
                self._add_row(number)

    def _add_row(self, number: int) -> None:
        heapq.heappush(self.rows, (self.drawn + max(1, self.requests[number].num_output - 1), number))

    def _end_row(self) -> None:
        _, number = heapq.heappop(self.rows)
        request = self.requests[number]
        self.ends_s[number] = self.at_s
        self.context = max(0.0, self.context - request.num_tokens - request.num_output) if self.rows else 0.0
        self._take_arrivals()

    def arrive(self, number: int) -> None:
        """The KV of a prompt is there. Its row waits for memory."""
        self.coming -= self.requests[number].num_tokens
        self.arrivals.append(number)
        self._take_arrivals()

    def _take_arrivals(self) -> None:
        while self.arrivals:
            num_tokens = self.requests[self.arrivals[0]].num_tokens
            if self.rows and self.context + num_tokens > self.speeds.kv_tokens:
                return
            self.context += num_tokens
            self._add_row(self.arrivals.popleft())
            self._join()

    def _join(self) -> None:
        """A step is longer for all rows, once for all that join in it."""
        line = self.speeds.line
        step_s = line.of(len(self.rows), self.context)
        if self.at_s >= self.joined_s + step_s:
            self.joined_s = self.at_s
            self.drawn -= JOIN_SHARE * line.step_s / step_s


class _Fleet:
    """Equal instances, the first `num_prefill` of which compute only prompts."""

    def __init__(
        self,
        requests: Sequence[PastRequest],
        speeds: Speeds,
        num_instances: int,
        form: FleetForm,
        tokens: int,
        margin: float,
    ) -> None:
        self.requests, self.speeds, self.tokens, self.margin = requests, speeds, tokens, margin
        self._rescues, num_prefill = form.rescues, form.num_prefill
        self.firsts_s = [math.inf] * len(requests)
        self.ends_s = [math.inf] * len(requests)
        self.handed: list[tuple[float, int]] = []
        self._target_of: dict[int, _Modelled] = {}
        self._prefill = [_Modelled(self, is_prefill=True) for _ in range(num_prefill)]
        self._decode = [_Modelled(self, is_prefill=False) for _ in range(num_instances - num_prefill)]

    def advance(self, until_s: float) -> None:
        for each in self._prefill:
            each.advance(until_s)
        while self.handed and self.handed[0][0] <= until_s:
            time_s, number = heapq.heappop(self.handed)
            target = self._target_of.pop(number)
            target.advance(time_s)
            target.at_s = max(target.at_s, time_s)
            target.arrive(number)
        for each in self._decode:
            each.advance(until_s)

    def place(self, number: int) -> None:
        """The request arrives now."""
        request = self.requests[number]
        seconds = self.speeds.prompt_s(request.num_tokens, request.num_uncached)
        whole = min(self._decode, key=lambda each: each.cost_s(request, seconds))
        if self._prefill:
            prefill = min(self._prefill, key=lambda each: each.queue_s)
            apart_s, whole_s = prefill.queue_s + seconds, whole.queue_s + seconds
            slack_s = self.margin * request.ttft_s
            if goes_apart(
                request.num_uncached, apart_s, whole_s, slack_s, self.tokens, rescues=self._rescues
            ):
                target = min(self._decode, key=lambda each: each.step_s)
                target.coming += request.num_tokens
                self._target_of[number] = target
                prefill.add_prompt(number, seconds)
                return
        whole.add_prompt(number, seconds)

    def goals_met(self, number: int) -> float:
        request, first_s = self.requests[number], self.firsts_s[number]
        tpot_s = (self.ends_s[number] - first_s) / max(1, request.num_output - 1)
        return request.goals_met(first_s - request.arrival_s, tpot_s)


def replay(
    requests: Sequence[PastRequest],
    speeds: Speeds,
    num_instances: int,
    form: FleetForm,
    *,
    tokens: int = 0,
    margin: float = 1.0,
    warm_up: int = 0,
) -> Generator[None, None, float]:
    """Works in pieces, and returns the share of the requests that meet their goals.

    `requests` by arrival; the first `warm_up` of them fill the fleet and are not counted. `tokens`: prompts
    with fewer to compute are not separated.
    """
    fleet = _Fleet(requests, speeds, num_instances, form, tokens, margin)
    for number, request in enumerate(requests):
        fleet.advance(request.arrival_s)
        fleet.place(number)
        if number % YIELD_EVERY == YIELD_EVERY - 1:
            yield
    fleet.advance(math.inf)
    counted = range(warm_up, len(requests))
    return sum(map(fleet.goals_met, counted)) / max(1, len(counted))
