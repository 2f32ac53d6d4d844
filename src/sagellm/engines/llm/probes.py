"""`EarlyExits`: probes of requests with `early_exit`, which end reasoning once it is enough.

At a point of the reasoning a probe is added to the engine: an ordinary request, whose prompt is that of the
choice, and whose answer goes on behind the reasoning so far, the end marker and the text that asks for the
answer. It branches from the choice's KV. The choice runs on meanwhile; its tokens behind the point are held
back until the probe has answered. If reasoning may end, they are dropped, and the choice goes on from the
point with its budget of reasoning spent. So its text depends on its tokens alone, never on how long a probe
has taken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from sagellm.accel.cot.early_exit import ProbePoints, answer_behind, completes_answer, confidence_of
from sagellm.accel.cot.reasoning import ReasoningTracker
from sagellm.core.errors import BookkeepingError, RequestError
from sagellm.core.protocols.acceleration import AccelController
from sagellm.core.protocols.cot import CoTAccelerator, CoTPlan, EarlyExit, ReasoningStep, StepAction
from sagellm.core.protocols.engine import BranchingEngine, EngineCore
from sagellm.core.protocols.tokenizer import TextTokenizer, TokenStream
from sagellm.core.types import Request, RequestOutput, SamplingParams
from sagellm.engines.llm.accelerations import EARLY_EXIT
from sagellm.engines.llm.completion import ReasoningExit

MAX_IN_FLIGHT = 4
"""Probes of one choice that run at a time; further ones wait for the answers of these."""


@dataclass(slots=True)
class _Probe:
    """A probe behind `position` tokens of the answer, `num_reasoning` of them reasoning. `step`: its end."""

    request_id: str
    position: int
    num_reasoning: int
    stream: TokenStream
    has_started: bool = False
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    step: ReasoningStep | None = None


class ProbedReasoning:
    """The tokens of one choice, those held back among them, and its probes.

    `engine_id`: the engine request that computes the choice now. `num_probe_tokens`: what probes have drawn,
    and what the choice has drawn behind the point where its reasoning was closed.
    """

    def __init__(
        self,
        request: Request,
        rule: EarlyExit,
        policy: CoTAccelerator,
        reasoning: ReasoningTracker,
        tokenizer: TextTokenizer,
    ) -> None:
        self.request = request
        self.engine_id = request.request_id
        self.num_probe_tokens = 0
        self.probes: deque[_Probe] = deque()
        self._rule = rule
        self._policy = policy
        self._points = ProbePoints(rule)
        self._reasoning = reasoning
        self._tokenizer = tokenizer
        self._behind_point = (reasoning.end_id, *tokenizer.encode(rule.probe, add_special_tokens=False))
        self._drawn: list[int] = []
        self._held: deque[RequestOutput] = deque()
        self._num_released = 0
        self._steps: list[ReasoningStep] = []
        self._plan = CoTPlan(StepAction.CONTINUE, "no probe")
        self._num_points, self._num_probes = 0, 0
        self._ended_at: int | None = None

    @property
    def outcome(self) -> ReasoningExit:
        answer = self._steps[-1].answer if self._steps else None
        return ReasoningExit(
            self._num_probes, self.num_probe_tokens, self._ended_at, answer, self._plan.reason
        )

    def take(self, output: RequestOutput) -> None:
        """Hold what the choice has drawn, and see where probes stand."""
        self._held.append(output._replace(request_id=self.request.request_id))
        for token_id in output.new_token_ids:
            self._drawn.append(token_id)
            if self._ended_at is None and self._is_point(token_id):
                self._num_points += 1
                name = f"{self.request.request_id}#probe{self._num_points}"
                stream = self._tokenizer.stream()
                self.probes.append(_Probe(name, len(self._drawn), self._reasoning.num_tokens, stream))
        last = self.probes[-1] if self.probes and output.finish_reason is not None else None
        if last is not None and last.position == len(self._drawn) and not last.has_started:
            self.probes.pop()  # the choice has ended there

    def due(self) -> list[_Probe]:
        """The probes to start now."""
        return [probe for probe in islice(self.probes, MAX_IN_FLIGHT) if not probe.has_started]

    def _is_point(self, token_id: int) -> bool:
        before = self._reasoning.num_tokens
        self._reasoning.push(token_id)
        return self._points.push(
            is_reasoning=self._reasoning.num_tokens > before,
            ends_line=b"\n" in self._tokenizer.token_bytes(token_id),
        )

    def request_of(self, probe: _Probe, now_s: float) -> Request:
        """The engine request of a probe that starts. It is greedy, without hints, goals and proposals."""
        probe.has_started = True
        self._num_probes += 1
        so_far = (*self._drawn[: probe.position], *self._behind_point)
        params = SamplingParams(
            temperature=0.0,
            min_tokens=len(so_far) + 1,
            max_tokens=len(so_far) + self._rule.max_probe_tokens,
            logprobs=None if self._rule.threshold is None else 0,
            num_speculative_tokens=0,  # a draft would compute all of the prompt for a few tokens
        )
        request = self.request
        return Request(
            probe.request_id, request.tokens, params, request.eos_token_ids, now_s,
            priority=request.priority, namespace=request.namespace, group=f"probes of {request.request_id}",
            service_class=request.service_class, client=request.client, generated=so_far,
        )  # fmt: skip

    def take_probe(self, probe: _Probe, output: RequestOutput) -> None:
        """Take in what a probe has drawn. Sets its `step` once it has an answer, or ends."""
        is_complete = False
        for position, token_id in enumerate(output.new_token_ids):
            self.num_probe_tokens += 1
            has_ended = token_id in self.request.eos_token_ids
            if not has_ended:
                probe.text += probe.stream.push(token_id)
                probe.logprobs += [entry.logprob for entry in output.logprobs[position : position + 1]]
            is_complete = completes_answer(self._rule.probe, probe.text, has_ended=has_ended)
            if is_complete:
                break
        if is_complete or output.finish_reason is not None:
            answer = answer_behind(self._rule.probe, probe.text) if is_complete else None
            confidence = None if answer is None else confidence_of(probe.logprobs)
            probe.step = ReasoningStep(0, has_ended=True, answer=answer, confidence=confidence)

    def decide(self) -> _Probe | None:
        """The probe behind which reasoning ends, if one says so. Looks at each once, in order."""
        while self.probes and self.probes[0].step is not None:
            probe = self.probes.popleft()
            assert probe.step is not None
            self._steps.append(replace(probe.step, index=len(self._steps)))
            self._plan = self._policy.accelerate_cot(self._steps)
            if self._plan.action is StepAction.CONCLUDE:
                return probe
        return None

    def end_behind(self, probe: _Probe) -> Request:
        """The request with which the choice goes on. What it drew behind the probe's point is dropped."""
        self.num_probe_tokens += len(self._drawn) - probe.position
        self._ended_at = probe.num_reasoning
        del self._drawn[probe.position :]
        self._held = deque(self._outputs_until(probe.position))
        self.probes.clear()
        self.engine_id = f"{self.request.request_id}#exit"
        markers = self._reasoning.start_id, self._reasoning.end_id
        params = replace(
            self.request.params, max_reasoning_tokens=probe.num_reasoning, reasoning_token_ids=markers
        )
        return replace(self.request, request_id=self.engine_id, params=params, generated=tuple(self._drawn))

    def released(self) -> Iterator[RequestOutput]:
        """What may be shown: all before the first probe that has not answered."""
        yield from self._outputs_until(self.probes[0].position if self.probes else math.inf)

    def _outputs_until(self, position: float) -> Iterator[RequestOutput]:
        while self._held and self._num_released < position:
            output = self._held.popleft()
            room = int(min(position - self._num_released, len(output.new_token_ids)))
            if room < len(output.new_token_ids):
                output, later = split_output(output, room)
                self._held.appendleft(later)
            self._num_released += room
            yield output


class EarlyExits:
    """Owns the probes of an `LLM` and the choices that they belong to."""

    def __init__(self, engine: EngineCore, tokenizer: TextTokenizer, accel: AccelController) -> None:
        self._engine, self._accel = engine, accel
        self._branches: BranchingEngine | None = engine if isinstance(engine, BranchingEngine) else None
        self._tokenizer = tokenizer
        self._by_engine_id: dict[str, ProbedReasoning] = {}
        self._by_probe: dict[str, tuple[ProbedReasoning, _Probe]] = {}

    @property
    def are_possible(self) -> bool:
        return self._branches is not None

    def open(self, request: Request, rule: EarlyExit, reasoning: ReasoningTracker) -> ProbedReasoning:
        """Begin to probe a choice that has been added to the engine."""
        probed = ProbedReasoning(request, rule, self._accel.early_exit(rule), reasoning, self._tokenizer)
        self._by_engine_id[request.request_id] = probed
        return probed

    def through(self, output: RequestOutput) -> Iterator[RequestOutput]:
        """What choices may show after this output of the engine, perhaps a probe's."""
        if output.request_id in self._by_probe:
            probed, probe = self._by_probe[output.request_id]
            probed.take_probe(probe, output)
            if probe.step is not None:
                del self._by_probe[output.request_id]
                if output.finish_reason is None:  # it goes on behind its answer
                    self._engine.abort(output.request_id)
        elif output.request_id in self._by_engine_id:
            probed = self._by_engine_id[output.request_id]
            if output.request_id != probed.engine_id:  # drawn behind the point where its reasoning ended
                return
            probed.take(output)
        else:
            yield output
            return
        self._go_on(probed)
        yield from probed.released()

    def close(self, choice_id: str) -> None:
        """A choice has ended: end its probes, and what goes on for it."""
        probed = self._by_engine_id.pop(choice_id, None)
        if probed is None:
            return
        self._abort_probes(probed)
        outcome = probed.outcome
        closed = int(outcome.ended_at is not None)
        spent = {"tokens": outcome.num_probe_tokens}
        self._accel.count(EARLY_EXIT, saved={"reasoning closed": closed}, spent=spent)
        if probed.engine_id != choice_id:
            del self._by_engine_id[probed.engine_id]
            self._engine.abort(probed.engine_id)

    def clear(self) -> None:
        """The engine is closed, and has ended all."""
        self._by_engine_id.clear()
        self._by_probe.clear()

    def check(self) -> None:
        """Raise `BookkeepingError` unless an open choice waits for each running probe."""
        for name, (probed, probe) in self._by_probe.items():
            is_awaited = probe.has_started and probe.step is None and probe in probed.probes
            if name != probe.request_id or not is_awaited:
                raise BookkeepingError(f"probe {name} runs, and no choice waits for it")
            if self._by_engine_id.get(probed.request.request_id) is not probed:
                raise BookkeepingError(f"probe {name} runs for a choice that is not open")
        for probed in self._by_engine_id.values():
            if self._by_engine_id.get(probed.engine_id) is not probed:
                raise BookkeepingError(f"{probed.engine_id} computes a choice that is not open")

    def _go_on(self, probed: ProbedReasoning) -> None:
        """End the reasoning where probes say so, or start those that are due."""
        while (last := probed.decide()) is None:
            due = probed.due()
            if not due:
                return
            for probe in due:
                self._start(probed, probe)
        self._end_reasoning(probed, last)

    def _start(self, probed: ProbedReasoning, probe: _Probe) -> None:
        assert self._branches is not None
        try:
            request = probed.request_of(probe, self._engine.clock.now())
            self._branches.branch(probed.engine_id, request)
        except RequestError:  # such as one that would not fit the model's context
            probe.step = ReasoningStep(0, has_ended=True)
        else:
            self._by_probe[probe.request_id] = probed, probe

    def _end_reasoning(self, probed: ProbedReasoning, last: _Probe) -> None:
        self._engine.abort(probed.engine_id)
        self._abort_probes(probed)
        request = probed.end_behind(last)
        self._by_engine_id[request.request_id] = probed
        self._engine.add(request)

    def _abort_probes(self, probed: ProbedReasoning) -> None:
        for probe in probed.probes:
            if self._by_probe.pop(probe.request_id, None) is not None:
                self._engine.abort(probe.request_id)


def split_output(output: RequestOutput, count: int) -> tuple[RequestOutput, RequestOutput]:
    """The output of the first `count` tokens, and of the others."""
    ids, logprobs = output.new_token_ids, output.logprobs
    first = output._replace(
        new_token_ids=ids[:count],
        logprobs=logprobs[:count],
        num_output_tokens=output.num_output_tokens - len(ids) + count,
        finish_reason=None,
        error=None,
    )
    return first, output._replace(new_token_ids=ids[count:], logprobs=logprobs[count:], prompt_logprobs=None)
