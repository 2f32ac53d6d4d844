"""An engine that says what a script tells it: the exact fake below `LLM` and the HTTP server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sagellm.accel.cot.reasoning import ReasoningTracker
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import RequestError
from sagellm.core.features import REASONING_BUDGETS
from sagellm.core.kv_hints import HintOutcome, HintStatus, KVHintsEnvelope
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats, PinnedPrefix, PromptExplanation
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.core.protocols.prefix_cache import PromptSpan, SpanState
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.types import (
    CapabilityDescriptor,
    FinishReason,
    Namespace,
    Request,
    RequestOutput,
    TokenLogprob,
    Tokens,
)
from sagellm.engines.llm import LLM
from sagellm.engines.native.tokenizer import Tokenizer
from tests.toy_tokenizers import CHATML, byte_level

BLOCK_SIZE = 4
NUM_BLOCKS = 4096
Script = Callable[[Request], Sequence[int]]


@dataclass
class _Running:
    request: Request
    tokens: list[int]
    reasoning: ReasoningTracker | None
    num_sent: int = 0


@dataclass
class ScriptedEngine:
    """Implements `EngineCore`: each step gives every request its next `tokens_per_step` tokens of the script.

    Ends by EOS, stop ids and max_tokens as the real one does, and reasoning by its budget: the end marker
    takes the place of a token of the script. `fail_next` is raised by the next step or hint.
    """

    script: Script
    tokens_per_step: int = 1
    step_s: float = 0.0
    num_cached: int = 0
    fail_next: Exception | None = None
    error_for: str | None = None
    added: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    hinted: list[tuple[KVHintsEnvelope, Namespace]] = field(default_factory=list)
    running: dict[str, _Running] = field(default_factory=dict)
    closed: bool = False
    clock: Clock = field(default_factory=MonotonicClock)

    def add(self, request: Request) -> None:
        if request.params.seed == -1:
            raise RequestError("the engine refuses this seed", "seed")
        self.added.append(request)
        prompt, eos = request.tokens.slice(0), request.eos_token_ids
        reasoning = ReasoningTracker.of(request.params, prompt, (), eos)
        self.running[request.request_id] = _Running(request, list(self.script(request)), reasoning)

    def step(self) -> list[RequestOutput]:
        time.sleep(self.step_s)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        return [self._advance(running) for running in list(self.running.values())]

    def _advance(self, running: _Running) -> RequestOutput:
        request, reason = running.request, None
        new: list[int] = []
        while len(new) < self.tokens_per_step and reason is None:
            new.append(running.tokens[running.num_sent % len(running.tokens)])
            if running.reasoning is not None:
                forced_id = running.reasoning.forced_id
                new[-1] = new[-1] if forced_id is None else forced_id
                running.reasoning.push(new[-1])
            running.num_sent += 1
            reason = _reason(request, new[-1], running.num_sent)
        error = None
        if self.error_for == request.request_id:
            reason, error = FinishReason.ERROR, "scripted error"
        if reason is not None:
            del self.running[request.request_id]
        return RequestOutput(
            request.request_id,
            tuple(new),
            len(request.tokens),
            self.num_cached,
            running.num_sent,
            _logprobs(new, request.params.logprobs),
            reason,
            error,
            self._prompt_logprobs(request, is_first=running.num_sent == len(new)),
        )

    def _prompt_logprobs(self, request: Request, *, is_first: bool) -> tuple[TokenLogprob, ...] | None:
        count = request.params.prompt_logprobs
        return None if count is None or not is_first else _logprobs(request.tokens.tolist()[1:], count)

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return self.running.pop(request_id, None) is not None

    def pin_prefix(self, tokens: Tokens, namespace: Namespace) -> PinnedPrefix:
        return PinnedPrefix(0, 0, lambda: None)

    def clear_cache(self, *, tiers: bool = False) -> int:
        return 0

    def explain(
        self, tokens: Tokens, namespace: Namespace, session_id: str | None = None
    ) -> PromptExplanation:
        """It caches nothing."""
        return PromptExplanation([PromptSpan(0, len(tokens), SpanState.NEVER_SEEN)], 16, 1024)

    def hint(self, envelope: KVHintsEnvelope, namespace: Namespace) -> list[HintOutcome]:
        """It caches nothing, so nothing is found."""
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.hinted.append((envelope, namespace))
        known = {True: HintStatus.NOT_FOUND, False: HintStatus.UNSUPPORTED}
        return [HintOutcome(action.action_id, known[action.is_known]) for action in envelope.actions]

    def set_policy(self, factory: Callable[[], EvictionPolicy]) -> None:
        """There is nothing to evict."""

    def set_passes(self, passes: Sequence[SchedulerPass]) -> None:
        """There is nothing to schedule."""

    def diagnostics(self) -> EngineDiagnostics:
        return EngineDiagnostics()

    def wake(self) -> None:
        """A step waits for nothing."""

    def has_work(self) -> bool:
        return bool(self.running)

    def is_idle(self, tokens: Tokens, namespace: Namespace) -> bool:
        return not self.running

    def idle_s(self) -> None:
        """It has nothing to do but what it is asked to."""

    def tier_faults(self) -> Sequence[str]:
        return ()

    def stats(self) -> EngineStats:
        lengths = [len(one.request.tokens) + one.num_sent for one in self.running.values()]
        active = sum(math.ceil(length / BLOCK_SIZE) for length in lengths)
        return EngineStats(len(lengths), 0, active, 0, NUM_BLOCKS - active)

    def capability(self) -> CapabilityDescriptor:
        features = frozenset({REASONING_BUDGETS})
        return CapabilityDescriptor("cpu", "float32", 512, 512, NUM_BLOCKS, BLOCK_SIZE, 64, features=features)

    def end_ranks(self, grace_s: float) -> bool:
        return False

    def close(self) -> None:
        for request_id in list(self.running):
            self.abort(request_id)
        self.closed = True


def _reason(request: Request, token_id: int, num_sent: int) -> FinishReason | None:
    params = request.params
    is_eos = token_id in request.eos_token_ids and not params.ignore_eos
    if num_sent >= params.min_tokens and (is_eos or token_id in params.stop_token_ids):
        return FinishReason.STOP
    return FinishReason.LENGTH if num_sent >= (params.max_tokens or math.inf) else None


def _logprobs(token_ids: Sequence[int], count: int | None) -> tuple[TokenLogprob, ...]:
    if count is None:
        return ()
    tops = (tuple((token_id + rank, -0.5 - rank) for rank in range(count)) for token_id in token_ids)
    return tuple(TokenLogprob(token_id, -0.5, top) for token_id, top in zip(token_ids, tops, strict=True))


def toy_tokenizer(chat_template: str | None = CHATML) -> Tokenizer:
    """Byte-level, ChatML, `</s>` ends a text; `<think>` is no special token."""
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(byte_level(), special_tokens=special, chat_template=chat_template)


def says(tokenizer: Tokenizer, text: str) -> Script:
    """A script: this text, then EOS for ever."""
    tokens = [*tokenizer.encode(text), *tokenizer.eos_token_ids]
    return lambda request: tokens


def scripted_llm(
    text: str = "Hello, wörld 🙂!",
    max_model_len: int = 512,
    chat_template: str | None = CHATML,
    **options: Any,
) -> LLM:
    """An `LLM` that answers `text` to everything; `options` as of `ScriptedEngine`."""
    tokenizer = toy_tokenizer(chat_template)
    engine = ScriptedEngine(says(tokenizer, text), **options)
    return LLM(engine, tokenizer, model_name="toy", max_model_len=max_model_len)
