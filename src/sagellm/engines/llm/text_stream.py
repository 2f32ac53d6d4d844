"""From the tokens of one choice to its text, cut at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.accel.cot.reasoning import ReasoningTracker
from sagellm.core.protocols.tokenizer import TextTokenizer
from sagellm.core.types import FinishReason, RequestOutput, SamplingParams, TokenLogprob, Tokens
from sagellm.engines.llm.completion import TokenText


class TextStream:
    """Detokenizes one choice, finds its stop strings, and adds text to its log-probabilities.

    After `finish_reason` is set the choice has ended, even if its engine request still runs: then a stop
    string ended it, and the caller aborts the engine request. Tokens after a stop string of the same step are
    dropped.

    Text and log-probability of the token that ended the request (an EOS or one of `stop_token_ids`) are left
    out unless `include_stop_str_in_output`. The log-probability stays if those of the prompt are asked for,
    because clients that score a prompt drop the last entry (lm-evaluation-harness). With `max_tokens` 0 the
    token that the engine drew is dropped. `reasoning`: at the end of the prompt; it counts from there on.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        params: SamplingParams,
        stop_token_ids: frozenset[int],
        prompt: Tokens,
        reasoning: ReasoningTracker | None = None,
    ) -> None:
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._params = params
        self._stop_token_ids = stop_token_ids
        self._detokenizer = tokenizer.stream()
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._num_chars = 0
        self._reasoning = reasoning
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of `num_tokens` between the markers of reasoning."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return self._reasoning is not None and self._reasoning.is_inside

    def feed(self, output: RequestOutput) -> tuple[str, tuple[int, ...], tuple[TokenText, ...]]:
        """The text, token ids and log-probabilities that a step added; may set `finish_reason`."""
        if self._params.max_tokens == 0 and output.finish_reason is not FinishReason.ERROR:
            self.finish_reason = FinishReason.LENGTH
            return "", (), ()
        texts: list[str] = []
        logprobs: list[TokenText] = []
        token_ids = output.new_token_ids
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if self._reasoning is not None:
                self._reasoning.push(token_id)
            is_silent = position == len(token_ids) - 1 and self._ends_silently(token_id, output.finish_reason)
            if position < len(output.logprobs) and not (is_silent and self._params.prompt_logprobs is None):
                logprobs.append(self._with_text(output.logprobs[position], self._num_chars))
            if not is_silent:
                texts.append(self._through_stops(self._detokenizer.push(token_id)))
            if self._stops.matched is not None:
                self.finish_reason = FinishReason.STOP
                return "".join(texts), token_ids[: position + 1], tuple(logprobs)
        if output.finish_reason is not None:
            texts += self._through_stops(self._detokenizer.finish()), self._stops.finish()
            self.finish_reason = output.finish_reason if self._stops.matched is None else FinishReason.STOP
        return "".join(texts), token_ids, tuple(logprobs)

    def prompt_texts(self, entries: Sequence[TokenLogprob] | None) -> tuple[TokenText, ...]:
        """All tokens of the prompt, the first of them without a log-probability. Without entries, none."""
        if entries is None:
            return ()
        detokenizer = self._tokenizer.stream()
        texts = [self._token_text(self._prompt[0], None, 0)]
        offset = len(detokenizer.push(self._prompt[0]))
        for entry in entries:
            texts.append(self._with_text(entry, offset))
            offset += len(detokenizer.push(entry.token_id))
        return tuple(texts)

    def _through_stops(self, text: str) -> str:
        """The part of `text` to show now. Stop strings do not count before `min_tokens`."""
        self._num_chars += len(text)
        if self._params.stop and self.num_tokens >= self._params.min_tokens:
            return self._stops.push(text)
        return text

    def _ends_silently(self, token_id: int, reason: FinishReason | None) -> bool:
        ends = reason is FinishReason.STOP and token_id in self._stop_token_ids
        return ends and not self._params.include_stop_str_in_output

    def _with_text(self, entry: TokenLogprob, offset: int) -> TokenText:
        top = tuple(self._token_text(token_id, logprob, offset) for token_id, logprob in entry.top)
        return self._token_text(entry.token_id, entry.logprob, offset, top)

    def _token_text(
        self, token_id: int, logprob: float | None, offset: int, top: tuple[TokenText, ...] = ()
    ) -> TokenText:
        data = self._tokenizer.token_bytes(token_id)
        return TokenText(token_id, data.decode("utf-8", "replace"), data, logprob, offset, top)


class StopStrings:
    """Cuts a text, which comes in pieces, at the first complete stop string.

    The result depends on the text alone, not on the pieces: among matches the one that ends first wins, then
    the longest. A tail that may become a stop string is held back until that is decided. `include` keeps the
    stop string in the output.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """What may be shown now. After a match everything is dropped."""
        if self.matched is not None or not piece:
            return ""
        text = self._held + piece
        ends = ((text.find(stop) + len(stop), stop) for stop in self._stops if stop in text)
        match = min(ends, key=lambda match: (match[0], -len(match[1])), default=None)
        if match is not None:
            end, self.matched = match
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        keep = len(text) - max((_num_undecided(text, stop) for stop in self._stops), default=0)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The held tail: the text has ended, so the tail is no stop string."""
        held, self._held = self._held, ""
        return held


def _num_undecided(text: str, stop: str) -> int:
    """Length of the longest tail of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
