"""`ReasoningDrafts`: steps of reasoning that a small model writes and the served model judges.

A choice with `speculative_reasoning` is computed by one request at a time. Within reasoning these take turns:
a draft in the small model's engine, up to the end of a line; a judge in the served model's engine, whose
prompt is all so far, the step, and a text that asks for a score, which it draws in one token (without such a
text the prompt is scored); and, where the step is rejected, a request of the choice itself that writes one
step. All but the drafts find the KV of the
tokens so far by their prefix. The answer, and the end of reasoning before it, are always the served model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum

from sagellm.accel.cot.judged_steps import StepBounds, likelihood_score, score_of
from sagellm.accel.cot.reasoning import ReasoningTracker
from sagellm.core.errors import BookkeepingError, RequestError
from sagellm.core.protocols.acceleration import AccelController
from sagellm.core.protocols.cot import (
    CoTAccelerator,
    CoTPlan,
    ReasoningStep,
    SpeculativeReasoning,
    StepAction,
)
from sagellm.core.protocols.engine import EngineCore
from sagellm.core.protocols.tokenizer import TextTokenizer
from sagellm.core.types import MAX_LOGPROBS, FinishReason, Request, RequestOutput, SamplingParams, Tokens
from sagellm.engines.llm.accelerations import SPECULATIVE_REASONING
from sagellm.engines.llm.completion import DraftedSteps
from sagellm.engines.llm.probes import split_output

MAX_DRAFT_S = 5.0
"""A step that the small model has not written by then is dropped: the served model writes it."""


class DraftPhase(Enum):
    """What computes a choice now. WRITE: the served model, up to the end of a step; REST: to the end."""

    WRITE = "write"
    DRAFT = "draft"
    JUDGE = "judge"
    REST = "rest"


class DraftedReasoning:
    """The tokens of one choice and the step that is being written.

    `engine_id`: the request that computes it now, in the small model's engine in phase DRAFT; `began_s`: when
    that was added. The served model always draws the first token within reasoning.
    """

    def __init__(
        self,
        request: Request,
        rule: SpeculativeReasoning,
        policy: CoTAccelerator,
        reasoning: ReasoningTracker,
        tokenizer: TextTokenizer,
    ) -> None:
        self.request = request
        self.phase = DraftPhase.WRITE
        self.engine_id = request.request_id
        self.began_s = 0.0
        self._rule = rule
        self._policy = policy
        self._reasoning = reasoning
        self._tokenizer = tokenizer
        self._judge = tokenizer.encode(rule.judge, add_special_tokens=False).slice(0)
        stops = request.params.stop_token_ids
        self._closing = {reasoning.start_id, reasoning.end_id, *request.eos_token_ids, *stops}
        self._tokens = Tokens(request.tokens)  # with what is drawn
        self._drawn: list[int] = []
        self._has_begun = False
        self._bounds = StepBounds(rule.max_step_tokens)
        self._step: list[int] = []
        self._is_closed = False
        self._steps: list[ReasoningStep] = []
        self._plan = CoTPlan(StepAction.CONTINUE, "no step", 1)
        self._num_requests = 0
        self._num_accepted, self._num_accepted_tokens = 0, 0
        self._num_draft_tokens, self._num_judge_tokens = 0, 0

    @property
    def outcome(self) -> DraftedSteps:
        return DraftedSteps(
            num_steps=len(self._steps),
            num_accepted=self._num_accepted,
            num_accepted_tokens=self._num_accepted_tokens,
            num_draft_tokens=self._num_draft_tokens,
            num_judge_tokens=self._num_judge_tokens,
            reason=self._plan.reason,
        )

    def next_request(self, now_s: float) -> Request:
        """The request of this phase. Without room for a draft the phase becomes REST."""
        if self.phase is DraftPhase.DRAFT and self._room < 1:
            self.phase = DraftPhase.REST
        self._num_requests += 1
        self.engine_id = f"{self.request.request_id}#{self.phase.value}{self._num_requests}"
        self.began_s = now_s
        if self.phase is DraftPhase.JUDGE:
            return self._judging(now_s)
        request, params, room = self.request, self.request.params, self._rule.max_step_tokens
        if self.phase is DraftPhase.DRAFT:
            self._step, self._is_closed, room = [], False, self._room
            request = replace(request, approximate_reuse=False)  # the small model's engine copies no KV
            most = len(self._drawn) + room
            params = replace(
                params, max_tokens=most, min_tokens=min(params.min_tokens, most), max_reasoning_tokens=None
            )
        self._bounds = StepBounds(room)
        return replace(
            request, request_id=self.engine_id, params=params, generated=tuple(self._drawn), group=None
        )

    def take_written(self, output: RequestOutput) -> RequestOutput:
        """Take in what the served model has drawn; returns what may be shown.

        What it has drawn behind the end of a step is dropped; the phase is then DRAFT.
        """
        for position, token_id in enumerate(output.new_token_ids):
            self._push(token_id)
            if self.phase is DraftPhase.WRITE and self._ends_step(token_id):
                self.phase = DraftPhase.DRAFT
                if position + 1 < len(output.new_token_ids):
                    output, _ = split_output(output, position + 1)
                break
        return output._replace(request_id=self.request.request_id)

    def take_drafted(self, output: RequestOutput) -> None:
        """Take in what the small model has drawn. At the end of its step the phase changes.

        A token that would close the reasoning or the answer is left to the served model.
        """
        has_ended = output.finish_reason is not None
        for token_id in output.new_token_ids:
            self._num_draft_tokens += 1
            self._is_closed = token_id in self._closing
            if self._is_closed:
                has_ended = True
                break
            self._step.append(token_id)
            if self._bounds.push(self._tokenizer.token_bytes(token_id)):
                has_ended = True
                break
        if has_ended and not self._step and not self._is_closed:  # it has failed
            self.take_judged(None)
        elif has_ended:
            self.phase = DraftPhase.JUDGE if self._step else DraftPhase.WRITE

    def take_judged(self, output: RequestOutput | None) -> RequestOutput | None:
        """Take in a judgement; returns an accepted step.

        None: there is none, since the draft or the judge has failed.
        """
        score: float | None = None
        if output is not None:
            self._num_judge_tokens += output.num_prompt_tokens - output.num_cached_tokens + 1
            score = self._score_of(output)
        index = len(self._steps)
        self._steps.append(ReasoningStep(index, has_ended=True, score=score))
        self._plan = self._policy.accelerate_cot(self._steps)
        if self._plan.action is StepAction.CONCLUDE:
            self.phase = DraftPhase.REST
        elif self._plan.num_to_start and not self._is_closed:
            self.phase = DraftPhase.DRAFT
        else:
            self.phase = DraftPhase.WRITE
        if self._plan.chosen != index:
            return None
        self._num_accepted += 1
        self._num_accepted_tokens += len(self._step)
        for token_id in self._step:
            self._push(token_id)
        request = self.request
        return RequestOutput(
            request.request_id, tuple(self._step), len(request.tokens), 0, num_output_tokens=len(self._drawn)
        )

    def failed(self, error: RequestError) -> RequestOutput:
        """The end of a choice that the engine does not go on with."""
        request = self.request
        return RequestOutput(
            request.request_id, (), len(request.tokens), 0, len(self._drawn),
            finish_reason=FinishReason.ERROR, error=str(error), error_status=error.status,
        )  # fmt: skip

    @property
    def _room(self) -> int:
        """How many tokens the small model may draw now. The served model draws the last."""
        params = self.request.params
        assert params.max_tokens is not None
        room = min(self._rule.max_step_tokens, params.max_tokens - len(self._drawn) - 1)
        budget = params.max_reasoning_tokens
        return room if budget is None else min(room, budget - self._reasoning.num_tokens)

    def _judging(self, now_s: float) -> Request:
        """A judge's request: greedy, of the choice's tenant and class."""
        request, judge = self.request, self._judge
        tokens = Tokens(self._tokens)
        tokens.extend(self._step)
        tokens.extend(judge)
        top, scored = (MAX_LOGPROBS, None) if len(judge) else (None, 0)
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=top, prompt_logprobs=scored, num_speculative_tokens=0
        )
        return Request(
            self.engine_id, tokens, params, arrival_s=now_s, priority=request.priority,
            namespace=request.namespace, service_class=request.service_class, client=request.client,
            scored_from=0 if len(judge) else len(self._tokens) - 1,
        )  # fmt: skip

    def _score_of(self, output: RequestOutput) -> float | None:
        """What a judge has answered; None: no score, such as after an error."""
        if output.prompt_logprobs:
            return likelihood_score([entry.logprob for entry in output.prompt_logprobs])
        for entry in output.logprobs:
            likeliest = {entry.token_id: entry.logprob, **dict(entry.top)}
            return score_of((self._tokenizer.token_bytes(each), value) for each, value in likeliest.items())
        return None

    def _push(self, token_id: int) -> None:
        self._drawn.append(token_id)
        self._tokens.append(token_id)
        self._reasoning.push(token_id)

    def _ends_step(self, token_id: int) -> bool:
        if self._reasoning.is_inside and self._has_begun:
            return self._bounds.push(self._tokenizer.token_bytes(token_id))
        if self._has_begun:  # the served model has ended its reasoning
            self.phase = DraftPhase.REST
        self._has_begun = self._has_begun or self._reasoning.is_inside
        return self._reasoning.is_inside


class ReasoningDrafts:
    """Owns the small model's engine, and the choices that it writes steps for."""

    def __init__(
        self, engine: EngineCore, drafter: EngineCore, tokenizer: TextTokenizer, accel: AccelController
    ) -> None:
        self._engine, self._drafter, self._accel = engine, drafter, accel
        self._tokenizer = tokenizer
        self._open: dict[str, DraftedReasoning] = {}
        self._running: dict[str, DraftedReasoning] = {}

    def open(
        self, request: Request, rule: SpeculativeReasoning, reasoning: ReasoningTracker
    ) -> DraftedReasoning:
        """Follow a choice that has been added to the engine."""
        policy = self._accel.speculative_reasoning(rule)
        drafted = DraftedReasoning(request, rule, policy, reasoning, self._tokenizer)
        self._open[request.request_id] = self._running[request.request_id] = drafted
        return drafted

    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._drafter.has_work()

    def step(self) -> list[RequestOutput]:
        """One step of the small model, for all its drafts together. Returns the ends of choices that fail."""
        failed: list[RequestOutput] = []
        if self._drafter.has_work():
            for output in self._drafter.step():
                drafted = self._running.get(output.request_id)
                if drafted is not None:
                    drafted.take_drafted(output)
                    if drafted.phase is not DraftPhase.DRAFT:
                        failed += self._go_on(drafted, self._drafter)
        overdue_s = self._engine.clock.now() - MAX_DRAFT_S
        for drafted in [each for each in self._running.values() if each.phase is DraftPhase.DRAFT]:
            if drafted.began_s < overdue_s:
                drafted.take_judged(None)
                failed += self._go_on(drafted, self._drafter)
        return failed

    def through(self, output: RequestOutput) -> Iterator[RequestOutput]:
        """What choices may show after this output of the engine, perhaps of a judge."""
        drafted = self._running.get(output.request_id)
        if drafted is None:
            if output.request_id not in self._open:  # else drawn behind the end of the choice's first step
                yield output
        elif drafted.phase is DraftPhase.JUDGE:
            step = drafted.take_judged(output)
            failed = self._go_on(drafted, self._engine)
            if step is not None:
                yield step
            yield from failed
        else:
            shown, failed = drafted.take_written(output), []
            if drafted.phase is DraftPhase.DRAFT and shown.finish_reason is None:
                failed = self._go_on(drafted, self._engine)
            yield shown
            yield from failed

    def close(self, choice_id: str) -> None:
        """A choice has ended: end what runs for it, in either engine."""
        drafted = self._open.pop(choice_id, None)
        if drafted is None:
            return
        self._running.pop(drafted.engine_id, None)  # one that cannot go on has none
        self._engine.abort(drafted.engine_id)
        self._drafter.abort(drafted.engine_id)
        found = drafted.outcome
        in_vain = found.num_draft_tokens - found.num_accepted_tokens
        self._accel.count(
            SPECULATIVE_REASONING,
            saved={"tokens": found.num_accepted_tokens},
            spent={"rejected tokens": in_vain, "judge tokens": found.num_judge_tokens},
        )

    def shut_down(self) -> None:
        """The served model's engine is about to close: close the small one's."""
        self._open.clear()
        self._running.clear()
        self._drafter.close()

    def check(self) -> None:
        """Raise `BookkeepingError` unless one request runs for each open choice."""
        running = {each.engine_id: each for each in self._open.values()}
        if self._running != running:
            raise BookkeepingError(f"{sorted(self._running)} run for choices, not {sorted(running)}")

    def _go_on(self, drafted: DraftedReasoning, from_engine: EngineCore) -> list[RequestOutput]:
        """End the request that computes a choice, and start the next one.

        Returns the end of a choice that cannot go on, such as one that has reached its KV quota.
        """
        del self._running[drafted.engine_id]
        from_engine.abort(drafted.engine_id)
        while True:
            request = drafted.next_request(self._engine.clock.now())
            try:
                (self._drafter if drafted.phase is DraftPhase.DRAFT else self._engine).add(request)
            except RequestError as error:  # such as one that would not fit the model's context
                if drafted.phase is DraftPhase.DRAFT:
                    drafted.phase = DraftPhase.REST
                elif drafted.phase is DraftPhase.JUDGE:
                    drafted.take_judged(None)
                else:
                    return [drafted.failed(error)]
            else:
                self._running[drafted.engine_id] = drafted
                return []
