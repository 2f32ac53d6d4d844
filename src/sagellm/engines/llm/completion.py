"""The answers of a request: deltas while it runs, a completion at its end.

A generated token takes these forms on its way to a client:

    StepResult      the backend's answer: token ids by row, `TokenLogprob`s by row
    RequestOutput   the engine's answer: the tokens and `TokenLogprob`s that a step added to one request
    TextDelta       the same as text, with a `TokenText` per log-probability (`text_stream.py`)
    JSON, bytes     `serving/answers.py` and `serving/sse.py`
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sagellm.core.protocols.prefix_cache import MissCounts, PromptSpan
from sagellm.core.types import FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request.

    The prompt counts once, for any number of choices. `misses` says why blocks of the prompt had to be
    computed (for the first choice); None where the engine does not attribute misses. `evicted`: the
    evicted part of the first prompt that has one, for a request that `reports_eviction`, its seconds counted
    from the arrival. `approximate_tokens`: prompt tokens whose KV was copied from another position; they are
    no cached ones. `reasoning_tokens`: those of `completion_tokens` between the markers of reasoning.
    `probe_tokens`: drawn for `early_exit` and in no answer.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    misses: MissCounts | None = None
    evicted: PromptSpan | None = None
    approximate_tokens: int = 0
    reasoning_tokens: int = 0
    probe_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            other.misses if self.misses is None else self.misses.plus(other.misses),
            self.evicted or other.evicted,
            self.approximate_tokens + other.approximate_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.probe_tokens + other.probe_tokens,
        )

    def __sub__(self, other: Usage) -> Usage:
        """What was added since `other`, an earlier usage of the same requests."""
        return Usage(
            self.prompt_tokens - other.prompt_tokens,
            self.completion_tokens - other.completion_tokens,
            self.cached_tokens - other.cached_tokens,
            self.misses if self.misses is None else self.misses.minus(other.misses),
            self.evicted,
            self.approximate_tokens - other.approximate_tokens,
            self.reasoning_tokens - other.reasoning_tokens,
            self.probe_tokens - other.probe_tokens,
        )


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token with its natural-log probability and alternatives.

    `data` holds the token's exact bytes; `text` shows bytes that are no whole character as U+FFFD. `offset`
    counts the characters before the token, in the answer or in the prompt. The first token of a prompt has no
    log-probability, since nothing predicts it.
    """

    token_id: int
    text: str
    data: bytes
    logprob: float | None
    offset: int = 0
    top: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class Consensus:
    """What became of the samples of a request with `early_stop`.

    Of `num_samples` that were asked for, `num_started` were, and `num_used` ended by themselves; the others
    were aborted. `answer` has `num_votes`, most of all, and choice `majority_index` is the first that gives
    it; None and 0: no sample has an answer.
    """

    num_samples: int
    num_started: int
    num_used: int
    majority_index: int | None
    answer: str | None
    num_votes: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReasoningExit:
    """What became of the reasoning of a choice with `early_exit`.

    Reasoning was closed behind `ended_at` of its tokens; None: it ended by itself, or the choice did.
    `answer`: of the last probe that counted. `num_probe_tokens`: drawn by probes, and by the choice behind
    the point where its reasoning was closed.
    """

    num_probes: int
    num_probe_tokens: int
    ended_at: int | None
    answer: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class DraftedSteps:
    """What became of a small model's steps, for a choice with `speculative_reasoning`.

    Of `num_steps` that were judged `num_accepted` are in the reasoning, with `num_accepted_tokens`.
    `num_draft_tokens`: drawn by the small model; `num_judge_tokens`: computed by the served model to judge.
    """

    num_steps: int
    num_accepted: int
    num_accepted_tokens: int
    num_draft_tokens: int
    num_judge_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one step added to choice `index` of a request.

    `usage` covers all choices so far. `is_last` marks the last delta of the request: all choices have ended.
    A choice's first delta has `prompt_logprobs`, an entry for each prompt token, if the request asked for
    them. `error` explains a `FinishReason.ERROR`, with HTTP's `error_status`. `queued_s`: how long the
    request waited for its first step. `consensus`: with the last delta of a request with `early_stop`, unless
    it failed; samples that it aborts have `FinishReason.ABORT`. `exit`: with the last delta of a choice with
    `early_exit` that was not aborted; `drafted`: the same with `speculative_reasoning`.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    logprobs: tuple[TokenText, ...] = ()
    prompt_logprobs: tuple[TokenText, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_status: int = 500
    is_last: bool = False
    queued_s: float | None = None
    consensus: Consensus | None = None
    exit: ReasoningExit | None = None
    drafted: DraftedSteps | None = None


@dataclass(slots=True)
class Choice:
    """One continuation of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    prompt_logprobs: list[TokenText] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    exit: ReasoningExit | None = None
    drafted: DraftedSteps | None = None


@dataclass(slots=True)
class Completion:
    """All choices of one request so far; `add` appends a delta.

    With `early_stop`, choices that were not started are left out at the end.
    """

    request_id: str
    choices: list[Choice]
    usage: Usage = Usage()
    error: str | None = None
    consensus: Consensus | None = None

    @classmethod
    def empty(cls, request_id: str, num_choices: int) -> Completion:
        return cls(request_id, [Choice(index) for index in range(num_choices)])

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    def add(self, delta: TextDelta) -> None:
        choice = self.choices[delta.index]
        choice.text += delta.text
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(delta.logprobs)
        choice.prompt_logprobs.extend(delta.prompt_logprobs)
        choice.finish_reason = delta.finish_reason or choice.finish_reason
        choice.exit = delta.exit or choice.exit
        choice.drafted = delta.drafted or choice.drafted
        self.usage = delta.usage
        self.error = delta.error or self.error
        if delta.consensus is not None:
            self.consensus = delta.consensus
            del self.choices[delta.consensus.num_started :]
