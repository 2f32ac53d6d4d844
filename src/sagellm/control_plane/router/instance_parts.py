"""`Parts`: which hybrid instances compute prompts, and which of them answers, for a while.

Arrow (Wu et al., 2025) lets the parts of stateless instances change at once, and so does this: an instance
ends what it has, while new requests go by its new part. TaiChi (Wang et al., 2025) shows that neither form
wins for all goals: here each possible number of prefill instances is tried on the requests of late.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import NamedTuple

from sagellm.control_plane.router._step_fit import StepFit, StepLine
from sagellm.control_plane.router._what_if import FleetForm, PastRequest, Speeds, replay
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.router import ExecutionInstance, InstanceType, RequestMetadata

MAX_MODELLED = 8
"""A larger fleet is modelled by so many instances and their share of the requests."""
MAX_AGE_S = 300.0
FEWEST = 32
"""Requests and answers before the first decision, at least."""
WORK_PER_S = 250.0
"""Pieces of a replay for each second that passes, of about 0.15 ms: a small share of one core."""
MOST_WORK = 16
"""Pieces that one placement may do."""
CHUNK_SHARE = 0.8
"""Of a decode step without context, what a step with prompt tokens takes besides them."""
LONG_PROMPT = 2048
"""Tokens by which that was divided in `prefill_token_s`."""
LIVES = 2.0
"""Mean times of a request for which the modelled fleet fills, before goals are counted."""
HOPELESS = 0.5
"""More prefill instances are not tried, once a number meets less than this part of what the best meets."""
USUAL_ERROR = 0.1
"""As far as the model is wrong about whole instances beyond this, more is asked of a form not yet tried."""
RARELY = 4
"""Replays of which only one tries forms that are hopeless, so that decisions come sooner."""
SHORTEST_S = 1e-9
"""Least goal, so that it can be a divisor."""
GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, cover 0 to 1 evenly."""
MANY = 40
"""Requests of the present form that must have ended, before the model is corrected by them."""
CORRECTION, MOST_CORRECTED = 0.3, 4.0
"""Part of the way that one correction goes, and how far in all."""
HALF_LIFE_S = 1800.0
"""Of the correction for the form that is not used."""


@dataclass(frozen=True, slots=True)
class PartsOptions:
    """As the options of the same names of `SeparateAdaptively`."""

    tokens: int
    margin: float
    gain: float
    rounds: int
    chunk: int
    window: int
    transfer_s: float
    transfer_token_s: float


class _Answer(NamedTuple):
    num_tokens: int
    e2e_s: float
    ended_s: float


class Parts:
    """The part of each hybrid instance. `kinds` is another object whenever one of them has changed.

    It tries every form, that is number of prefill instances, on a replay of the last requests, a little with
    each placement. Another form is taken once it was the best `rounds` times in a row, by `gain` of the goals
    met or more. Where no request has a goal, `kinds` is empty: every instance may do everything.

    The model is corrected by what is seen: `trust` has the goals that were met over those that were foretold,
    without prefill instances and with some. So a form that disappoints is left, and tried again much later.
    The more the model errs about whole instances, the more it must foretell for others to be tried at all.
    """

    def __init__(self, options: PartsOptions) -> None:
        self.kinds: Mapping[str, InstanceType] = {}
        self.form = FleetForm(0, rescues=True)
        self.shares: Mapping[FleetForm, float] = {}
        """The share of goals that each form would have met, by the last replay."""
        self._options = options
        self._requests: deque[PastRequest] = deque(maxlen=options.window)
        self._num_goals = 0
        self._answers: deque[_Answer] = deque(maxlen=options.window)
        self._began_s: float | None = None
        self._fit = StepFit()
        self._reported_s: dict[str, float] = {}
        self._hybrids: Sequence[ExecutionInstance] = ()
        self._num_instances = 0
        self._work = self._evaluations()
        self._credit, self._last_s = 0.0, -math.inf
        self._best, self._num_best = self.form, 0
        self.trust = [1.0, 1.0]
        self._is_tried = False
        self._since_s = self._decided_s = -math.inf
        self._met: deque[float] = deque(maxlen=options.window)

    # -- what is seen

    def place(
        self,
        request: RequestMetadata,
        num_uncached: int,
        instances: Sequence[ExecutionInstance],
        now_s: float,
    ) -> Mapping[str, InstanceType]:
        """A request is placed now. Returns the parts by which."""
        self._learn(instances)
        self._remember(request, num_uncached, now_s)
        hybrids = [each for each in instances if each.kind is InstanceType.HYBRID]
        changed = [each.instance_id for each in hybrids] != [each.instance_id for each in self._hybrids]
        self._hybrids, self._num_instances = hybrids, len(instances)
        before = self.form.num_prefill
        self.form = self.form._replace(num_prefill=max(0, min(before, len(hybrids) - 1)))
        self._credit = min(MOST_WORK, self._credit + (now_s - self._last_s) * WORK_PER_S)
        self._last_s = now_s
        while self._credit >= 1:
            self._credit -= 1
            next(self._work)
        has_parts = len(hybrids) > 1 and self._num_goals > 0
        if changed or self.form.num_prefill != before or has_parts != bool(self.kinds):
            self.kinds = self._assigned() if has_parts else {}
        return self.kinds

    def answered(self, num_tokens: int, e2e_s: float, ttft_s: float, tpot_s: float) -> None:
        """A request has ended, after `e2e_s`, with so many tokens. Its goals are taken to be those of one of
        the last requests."""
        self._answers.append(_Answer(num_tokens, e2e_s, self._last_s))
        if self._requests and self._last_s - e2e_s >= self._since_s:
            at = int(len(self._met) * GOLDEN % 1 * len(self._requests))
            self._met.append(self._requests[at].goals_met(ttft_s, tpot_s))

    def _learn(self, instances: Sequence[ExecutionInstance]) -> None:
        seen = self._reported_s
        for each in instances:
            if each.step_s and each.only_decodes and seen.get(each.instance_id) != each.reported_s:
                seen[each.instance_id] = each.reported_s
                self._fit.add(each.num_running, each.num_used_tokens, each.step_s)
        if len(seen) > 2 * len(instances) + 64:  # instances that are gone
            self._reported_s = {each.instance_id: each.reported_s for each in instances}

    def _remember(self, request: RequestMetadata, num_uncached: int, now_s: float) -> None:
        kept, slo, num_tokens = self._requests, request.slo, len(request.tokens)
        if self._began_s is None:
            self._began_s = now_s
        while kept and (len(kept) == kept.maxlen or kept[0].arrival_s < now_s - MAX_AGE_S):
            self._num_goals -= kept.popleft().has_goal
        ttft_s = math.inf if slo.ttft_s is None else max(slo.ttft_s, SHORTEST_S)
        tpot_s = math.inf if slo.tpot_s is None else max(slo.tpot_s, SHORTEST_S)
        asked = max(0, request.kv_cache_size_tokens - num_tokens)
        kept.append(PastRequest(now_s, num_tokens, num_uncached, asked, ttft_s, tpot_s))
        self._num_goals += kept[-1].has_goal

    # -- what would be better

    def _evaluations(self) -> Iterator[None]:
        """Tries all numbers again and again, a piece at each `next`."""
        hopeless, number_of = set[FleetForm](), count()
        while True:
            requests, speeds, num_modelled = self._sample(), self._speeds(), self._num_modelled
            if requests and speeds is not None and num_modelled > 1:
                before, shares = self._before(requests), dict[FleetForm, float]()
                if not next(number_of) % RARELY:
                    hopeless.clear()
                for number in range(num_modelled):
                    forms = (FleetForm(number, True), FleetForm(number, False))[: 1 + (number > 0)]
                    for form in (each for each in forms if each not in hopeless or not number):
                        shares[form] = yield from replay(
                            [*before, *requests],
                            speeds,
                            num_modelled,
                            form,
                            tokens=self._options.tokens,
                            margin=self._options.margin,
                            warm_up=len(before),
                        )
                    tried = [share for form, share in shares.items() if form.num_prefill == number]
                    if tried and max(tried) < HOPELESS * max(shares.values()):
                        more = range(number + 1, num_modelled)
                        hopeless |= {FleetForm(each, rescues) for each in more for rescues in (True, False)}
                        break
                self._decide(shares, num_modelled)
                least = HOPELESS * max(shares.values())
                hopeless |= {form for form, share in shares.items() if share < least}
                hopeless.discard(self._form_of(num_modelled))
            yield

    def _form_of(self, num_modelled: int) -> FleetForm:
        """The present form, of so many instances."""
        num_prefill = round(self.form.num_prefill * num_modelled / max(1, len(self._hybrids)))
        return self.form._replace(num_prefill=min(num_modelled - 1, num_prefill))

    @property
    def _num_modelled(self) -> int:
        return min(len(self._hybrids), MAX_MODELLED)

    def _sample(self) -> list[PastRequest]:
        """The requests that the modelled instances would have had. None while there are too few."""
        kept = self._requests
        if min(len(kept), len(self._answers)) < FEWEST or not self._num_goals or not self._num_instances:
            return []
        share, due, made, weights = self._num_modelled / self._num_instances, 0.0, [], self._weights()
        for number, request in enumerate(kept):
            due += share
            if due < 1:
                continue
            due -= 1
            num_output = request.num_output
            if not num_output:  # the client does not say
                at = bisect_right(weights, weights[-1] * (number * GOLDEN % 1))
                num_output = self._answers[min(at, len(weights) - 1)].num_tokens
            made.append(request._replace(num_output=num_output))
        return made

    def _weights(self) -> list[float]:
        """Sums of the weights of all answers up to each.

        Long answers are missing at first, since they have not ended: one of `e2e_s` ends in the time of these
        answers only if its request came after the first of all, so it weighs as many times as that is rare
        (Horvitz and Thompson, 1952)."""
        answers, began_s = self._answers, self._began_s or 0.0
        from_s = answers[0].ended_s if len(answers) == answers.maxlen else began_s
        seen_s = max(SHORTEST_S, self._last_s - from_s)
        alive_s = max(SHORTEST_S, self._last_s - began_s)
        return list(
            accumulate(seen_s / max(0.1 * seen_s, min(seen_s, alive_s - answer.e2e_s)) for answer in answers)
        )

    def _before(self, requests: Sequence[PastRequest]) -> list[PastRequest]:
        """What came before them, to fill the fleet. It is the last of them, for some lives of a request."""
        span_s = requests[-1].arrival_s - requests[0].arrival_s
        if span_s <= 0:
            return []
        mean_s = sum(answer.e2e_s for answer in self._answers) / len(self._answers)
        made: list[PastRequest] = []
        shift_s, first_s = span_s * (1 + 1 / len(requests)), requests[0].arrival_s - LIVES * mean_s
        while len(made) < self._options.window:
            for request in reversed(requests):
                if request.arrival_s - shift_s < first_s:
                    return made[::-1]
                made.append(request._replace(arrival_s=request.arrival_s - shift_s))
            shift_s += span_s * (1 + 1 / len(requests))
        return made[::-1]

    def _speeds(self) -> Speeds | None:
        """Those of the mean hybrid instance; None while no instance has measured any."""
        known = [each for each in self._hybrids if each.prefill_token_s]
        line = self._fit.line()
        if not any(line):  # no instance only decodes
            steps_s = [each.step_s for each in known if each.step_s]
            line = StepLine(sum(steps_s) / max(1, len(steps_s)))
        if not known or not any(line):
            return None
        room = [each.num_blocks * each.block_size for each in known]
        token_s, chunk_s = sum(each.prefill_token_s for each in known) / len(known), CHUNK_SHARE * line.step_s
        return Speeds(
            max(token_s / 2, token_s - chunk_s / LONG_PROMPT),
            sum(each.prefill_token_squared_s for each in known) / len(known),
            line,
            sum(room) / len(room) if all(room) else math.inf,
            self._options.chunk,
            chunk_s,
            self._options.transfer_s,
            self._options.transfer_token_s,
        )

    def _decide(self, shares: Mapping[FleetForm, float], num_modelled: int) -> None:
        """Take another form, if it was better for long enough."""
        if len(self._hybrids) < 2:
            return
        scale, current = len(self._hybrids) / num_modelled, self._form_of(num_modelled)
        self._correct(shares.get(current, 0.0))
        shares = {form: share * self.trust[form.num_prefill > 0] for form, share in shares.items()}
        best = max(shares, key=lambda form: (shares[form], form == current, -form.num_prefill))
        doubt = 0.0 if self._is_tried else max(0.0, abs(self.trust[False] - 1) - USUAL_ERROR)
        is_better = shares[best] > shares.get(current, 0.0) * (1 + self._options.gain + doubt)
        self._num_best = (self._num_best + 1 if best == self._best else 1) if is_better else 0
        self.shares, self._best = shares, best
        if self._num_best >= self._options.rounds:
            num_prefill = min(round(best.num_prefill * scale), len(self._hybrids) - 1)
            self.form, self._num_best = best._replace(num_prefill=num_prefill), 0
            self._since_s = self._last_s
            self._met.clear()

    def _correct(self, foretold: float) -> None:
        """Compare what the present form was to meet with what it has met."""
        used = self.form.num_prefill > 0
        self._is_tried |= used
        passed_s = self._last_s - max(self._decided_s, self._began_s or 0.0)
        self._decided_s = self._last_s
        self.trust[not used] = 1 + (self.trust[not used] - 1) * 0.5 ** (passed_s / HALF_LIFE_S)
        if len(self._met) >= MANY and foretold > 0:
            seen = sum(self._met) / len(self._met) / foretold
            seen = min(MOST_CORRECTED, max(1 / MOST_CORRECTED, seen))
            self.trust[used] += CORRECTION * (seen - self.trust[used])
        if not self._is_tried:  # what is wrong without prefill instances is as wrong with them
            self.trust[True] = min(1.0, self.trust[False])

    # -- the part of each

    def _assigned(self) -> Mapping[str, InstanceType]:
        """Prefill instances stay, those with most prompts first. New ones have least to do."""
        if not self.form.num_prefill:
            return {each.instance_id: InstanceType.GENERAL for each in self._hybrids}

        def rank(each: ExecutionInstance) -> tuple[bool, int, int]:
            is_prefill = self.kinds.get(each.instance_id) is InstanceType.PREFILLING
            return not is_prefill, -each.num_queued_tokens if is_prefill else 0, each.num_requests

        made = {each.instance_id: InstanceType.DECODING for each in self._hybrids}
        for each in sorted(self._hybrids, key=rank)[: self.form.num_prefill]:
            made[each.instance_id] = InstanceType.PREFILLING
        return made

    def check(self) -> None:
        """Raise `BookkeepingError` where parts and numbers contradict each other."""
        num_prefill = sum(kind is InstanceType.PREFILLING for kind in self.kinds.values())
        if self.kinds and num_prefill != self.form.num_prefill:
            raise BookkeepingError(f"{num_prefill} instances compute prompts, not {self.form.num_prefill}")
        if self._num_goals != sum(request.has_goal for request in self._requests):
            raise BookkeepingError("the requests with a goal are miscounted")
