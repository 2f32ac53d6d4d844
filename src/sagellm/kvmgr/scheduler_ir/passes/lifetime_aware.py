"""Serves the shortest predicted output first, and admits only what predicted memory holds.

Shortest predicted job first is the order of Qiu et al. (2024), "Efficient Interactive LLM Serving with Proxy
Model-based Sequence Length Prediction"; the reservation is that of `_reservation.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from typing import Any, cast

from sagellm.core.plan import Draft, RequestState
from sagellm.core.protocols.lifetime import LifetimePredictor, PredictionRequest
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.registry import registry
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir._queue import RankedQueue, StarvationGuard, ended_naturally, was_admitted
from sagellm.kvmgr.scheduler_ir._reservation import Reservation

STEPS_PER_OCTAVE = 2
"""Predictions in the same part of an octave are equal and keep their order."""


class LifetimeAwarePass:
    """Sorts the waiting requests by predicted output, and reserves memory for it.

    With `reserve`, a request is admitted only if memory holds all requests when each generates the `quantile`
    of its prediction; those that do not fit are taken out of `draft.waiting`. `predictor` is a predictor, its
    name, or a mapping with `name` and options. It predicts for at most `asks` requests per step and learns
    from each that ends. A request without a prediction is ranked as the median one. Requests change places
    only with others of the same priority. An overdue request goes first (`max_wait_s`, `share`: see
    `StarvationGuard`).
    """

    name = "lifetime_aware"

    def __init__(
        self,
        predictor: LifetimePredictor | str | Mapping[str, Any] = "statistical",
        quantile: float = 0.75,
        max_wait_s: float = 10.0,
        *,
        share: float = 0.1,
        asks: int = 8,
        reserve: bool = True,
        headroom: float = 0.02,
        max_defer_s: float = 10.0,
        default_output: int = 512,
    ) -> None:
        if isinstance(predictor, (str, Mapping)):
            predictor = cast(LifetimePredictor, registry("predictor").create_from(predictor))
        self.predictor = predictor
        self.quantile, self.asks, self.default_output = quantile, asks, default_output
        self._reservation = Reservation(headroom, max_defer_s) if reserve else None
        self._queue = RankedQueue()
        self._guard = StarvationGuard(max_wait_s, share)
        self._unpredicted: dict[RequestState, None] = {}
        self._expected: dict[RequestState, float] = {}  # output tokens in all
        self._median_rank = default_output.bit_length() * STEPS_PER_OCTAVE
        self._active: dict[RequestState, None] = {}  # admitted; the predictor learns from them
        self._num_running = 0

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        if draft.step.num_new_running or len(draft.running) != self._num_running:
            self._num_running = len(draft.running)
            self._teach(draft.step.now_s)
        waiting, queue = draft.waiting, self._queue
        if not waiting and not queue.ranks:
            return
        if queue.update(waiting):
            self._note()
        for state in list(self._unpredicted)[: self.asks] if self._unpredicted else ():
            self._predict(state)
        queue.sort(waiting)
        self._guard.note(queue.arrived, queue.left)
        self._guard.promote(waiting, draft.step.now_s)
        first = self._reservation.cut(draft, view, self.remaining) if self._reservation else None
        if first is not None:
            draft.record(self.name, first, "wait", "the memory reserved for all that run would not hold it")

    def remaining(self, state: RequestState) -> float:
        """The number of tokens reserved for the request from now on. Once it has generated more than
        predicted, half of what it has generated."""
        generated, limit = state.num_output_tokens, state.max_output_tokens
        expected = self._expected.get(state, float(self.default_output))
        if expected <= generated:
            expected = 1.5 * generated
        return max(1.0, (expected if limit is None else min(expected, limit)) - generated)

    # -- the predictor

    def _predict(self, state: RequestState) -> None:
        del self._unpredicted[state]
        if state.status is not RequestStatus.WAITING:
            return
        limit = state.max_output_tokens
        if limit is None:
            limit = max(self.default_output, 2 * state.num_output_tokens)
        prediction = self.predictor.predict(
            PredictionRequest(
                state.request_id,
                state.tokens.slice(0),
                current_length=len(state.tokens),
                max_length=state.num_prompt_tokens + limit,
                num_prompt_tokens=state.num_prompt_tokens,
                session_id=state.request.session_id,
                category=state.request.namespace.adapter or state.request.namespace.model,
            )
        )
        quantiles = prediction.quantiles
        level = min((level for level in quantiles if level >= self.quantile), default=None)
        remaining = prediction.remaining_tokens if level is None else quantiles[level]
        self._expected[state] = state.num_output_tokens + remaining
        step = round(STEPS_PER_OCTAVE * log2(1 + max(0.0, prediction.remaining_tokens)))
        self._median_rank += (step > self._median_rank) - (step < self._median_rank)
        self._queue.rerank(state, self._rank(state, step))

    def _teach(self, now_s: float) -> None:
        for state in [s for s in self._active if s.status is not RequestStatus.RUNNING]:
            del self._active[state]
            if state.status is RequestStatus.WAITING:  # preempted: it gets a new prediction
                continue
            self._expected.pop(state, None)
            if ended_naturally(state):
                began_s = state.first_token_s if state.first_token_s is not None else now_s
                self.predictor.update(state.request_id, len(state.tokens), now_s - began_s)

    # -- the queue

    def _note(self) -> None:
        for state in self._queue.arrived:
            self._queue.rerank(state, self._rank(state, self._median_rank))
            self._unpredicted[state] = None
        for state in self._queue.left:
            self._unpredicted.pop(state, None)
            if was_admitted(state):
                self._active[state] = None
            else:
                self._expected.pop(state, None)

    def _rank(self, state: RequestState, step: int) -> tuple[int, bool, int]:
        return (-state.request.priority, not state.resumes, step)


PLUGIN = LifetimeAwarePass
