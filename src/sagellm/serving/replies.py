"""The JSON of answers: whole, and in chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sagellm.core.types import FinishReason
from sagellm.engines.llm import Completion, TextDelta, TokenText, Usage

Json = dict[str, Any]
LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; this is what OpenAI sends for it."""


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of one answer repeats."""

    answer_id: str
    model: str
    created: int
    with_misses: bool = False

    def usage(self, usage: Usage) -> Json:
        """With why prompt blocks had to be computed, if the request asked (`return_cache_misses`)."""
        shown = usage_json(usage)
        if self.with_misses and usage.misses is not None:
            shown["prompt_tokens_details"]["cache_miss_blocks"] = usage.misses._asdict()
        return shown

    def wrap(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class ChatReply:
    """Answers of /v1/chat/completions."""

    def __init__(self, head: Head, *, logprobs: bool) -> None:
        self.head = head
        self._logprobs = logprobs

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        [completion] = completions
        choices = []
        for choice in completion.choices:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": self._logprobs_json(choice.logprobs),
                    "finish_reason": _reason(choice.finish_reason),
                }
            )
        return self.head.wrap("chat.completion", choices) | {"usage": self.head.usage(usage)}

    def opening(self, num_choices: int) -> Iterator[Json]:
        """The role, once per choice."""
        for index in range(num_choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def parts(self, index: int, delta: TextDelta) -> Iterator[Json]:
        """What a delta adds, then, in a chunk of its own, why it ended."""
        if delta.text or (self._logprobs and delta.logprobs):
            yield self._chunk(index, {"content": delta.text}, delta.logprobs)
        if delta.finish_reason is not None:
            yield self._chunk(index, {}, reason=delta.finish_reason)

    def closing(self, usage: Usage) -> Json:
        """The usage chunk: no choices."""
        return self.head.wrap("chat.completion.chunk", []) | {"usage": self.head.usage(usage)}

    def _chunk(
        self,
        index: int,
        delta: Json,
        logprobs: Sequence[TokenText] = (),
        reason: FinishReason | None = None,
    ) -> Json:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs_json(logprobs) if logprobs else None,
            "finish_reason": _reason(reason),
        }
        return self.head.wrap("chat.completion.chunk", [choice])

    def _logprobs_json(self, entries: Sequence[TokenText]) -> Json | None:
        if not self._logprobs:
            return None
        tops = ([_token_json(one) for one in entry.top] for entry in entries)
        content = [
            _token_json(entry) | {"top_logprobs": top} for entry, top in zip(entries, tops, strict=True)
        ]
        return {"content": content, "refusal": None}


class CompletionReply:
    """Answers of /v1/completions. `echoes[i]` is put before the text of prompt `i`; with `scores_prompts` the
    log-probabilities of its tokens are put before those of the answer.
    """

    def __init__(
        self,
        head: Head,
        *,
        logprobs: int | None,
        echoes: Sequence[str],
        num_choices: int,
        scores_prompts: bool = False,
    ) -> None:
        self.head = head
        self._scores_prompts = scores_prompts
        self._logprobs = logprobs
        self._echoes = echoes
        self._num_choices = num_choices

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        choices = [
            self._choice(
                position * self._num_choices + choice.index,
                self._echoes[position] + choice.text,
                (*choice.prompt_logprobs, *self._behind_echo(position, choice.logprobs)),
                choice.finish_reason,
            )
            for position, completion in enumerate(completions)
            for choice in completion.choices
        ]
        return self.head.wrap("text_completion", choices) | {"usage": self.head.usage(usage)}

    def opening(self, num_choices: int) -> Iterator[Json]:
        """The echoed prompts, if there are any; those that are scored come with their log-probabilities."""
        if self._scores_prompts:
            return
        for index in range(num_choices):
            echo = self._echoes[index // self._num_choices]
            if echo:
                yield self._chunk(index, echo)

    def parts(self, index: int, delta: TextDelta) -> Iterator[Json]:
        position = index // self._num_choices
        if delta.prompt_logprobs:
            yield self._chunk(index, self._echoes[position], delta.prompt_logprobs)
        if delta.text or delta.finish_reason is not None or (self._logprobs is not None and delta.logprobs):
            logprobs = self._behind_echo(position, delta.logprobs)
            yield self._chunk(index, delta.text, logprobs, delta.finish_reason)

    def closing(self, usage: Usage) -> Json:
        """The usage chunk: no choices."""
        return self.head.wrap("text_completion", []) | {"usage": self.head.usage(usage)}

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenText] = (),
        reason: FinishReason | None = None,
    ) -> Json:
        return self.head.wrap("text_completion", [self._choice(index, text, logprobs, reason)])

    def _choice(
        self, index: int, text: str, entries: Sequence[TokenText], reason: FinishReason | None
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": None if self._logprobs is None else self._logprobs_json(entries),
            "finish_reason": _reason(reason),
        }

    def _behind_echo(self, position: int, entries: Sequence[TokenText]) -> Sequence[TokenText]:
        """Entries of the answer with offsets that count the echoed prompt."""
        echo = self._echoes[position]
        return [replace(entry, offset=entry.offset + len(echo)) for entry in entries] if echo else entries

    def _logprobs_json(self, entries: Sequence[TokenText]) -> Json:
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [_top_json(entry) for entry in entries] if self._logprobs else None,
            "text_offset": [entry.offset for entry in entries],
        }


Reply = ChatReply | CompletionReply


def _token_json(entry: TokenText) -> Json:
    return {"token": entry.text, "logprob": _finite(entry.logprob), "bytes": list(entry.data)}


def _top_json(entry: TokenText) -> Json | None:
    """The likeliest tokens and the token itself, by text; of tokens of one text the likeliest counts."""
    if entry.logprob is None:
        return None
    found: Json = {}
    for one in (*entry.top, entry):
        found.setdefault(one.text, _finite(one.logprob))
    return found


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def _reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value
