"""One choice of a request: engine outputs in, text pieces out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sagellm.core.protocols.tokenizer import TextTokenizer
from sagellm.core.types import FinishReason, RequestOutput, SamplingParams, TokenLogprob, Tokens
from sagellm.engines.llm.completion import TokenText
from sagellm.engines.llm.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine output means as text. `stopped_by_text`: a stop string ended it, the engine runs on."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenText, ...]
    finish_reason: FinishReason | None
    prompt_logprobs: tuple[TokenText, ...] = ()
    stopped_by_text: bool = False


class TextStream:
    """Detokenizes one sequence, finds its stop strings, dresses its logprobs.

    Tokens after a stop string that came in the same step are dropped. Text and logprob of the token that
    ended the request (an EOS or one of `stop_token_ids`) are left out unless `include_stop_str_in_output`;
    its logprob is there if those of the prompt are, because clients that score a prompt drop the last entry
    (lm-evaluation-harness). With `max_tokens` 0 the engine's one token is dropped.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        params: SamplingParams,
        stop_token_ids: frozenset[int],
        prompt: Tokens,
    ) -> None:
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._params = params
        self._stop_token_ids = stop_token_ids
        self._stream = tokenizer.stream()
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._num_chars = 0
        self.num_tokens = 0
        self.finished = False

    def feed(self, output: RequestOutput) -> Piece:
        prompt = () if output.prompt_logprobs is None else self._prompt_texts(output.prompt_logprobs)
        if self._params.max_tokens == 0 and output.finish_reason is not FinishReason.ERROR:
            self.finished = True
            return Piece("", (), (), FinishReason.LENGTH, prompt)
        piece = self._feed(output)
        return replace(piece, prompt_logprobs=prompt) if prompt else piece

    def _feed(self, output: RequestOutput) -> Piece:
        texts: list[str] = []
        logprobs: list[TokenText] = []
        token_ids = output.new_token_ids
        for position, token_id in enumerate(token_ids):
            is_last = position == len(token_ids) - 1
            silent = is_last and self._ends_silently(token_id, output.finish_reason)
            if position < len(output.logprobs) and not (silent and self._params.prompt_logprobs is None):
                logprobs.append(self._token_text(output.logprobs[position], self._num_chars))
            texts.append(self._push(token_id, silent=silent))
            if self._stops.matched is not None:
                return self._stopped(texts, token_ids[: position + 1], logprobs, output)
        if output.finish_reason is not None:
            texts.append(self._flush())
        stopped = self._stops.matched is not None
        self.finished = output.finish_reason is not None
        reason = FinishReason.STOP if stopped else output.finish_reason
        return Piece("".join(texts), token_ids, tuple(logprobs), reason)

    def _stopped(
        self,
        texts: Sequence[str],
        token_ids: tuple[int, ...],
        logprobs: Sequence[TokenText],
        output: RequestOutput,
    ) -> Piece:
        self.finished = True
        engine_runs = output.finish_reason is None
        reason = FinishReason.STOP
        return Piece("".join(texts), token_ids, tuple(logprobs), reason, stopped_by_text=engine_runs)

    def _push(self, token_id: int, *, silent: bool) -> str:
        self.num_tokens += 1
        return "" if silent else self._show(self._stream.push(token_id))

    def _show(self, text: str) -> str:
        """Through the stop strings, which do not count before `min_tokens`."""
        self._num_chars += len(text)
        if self._params.stop and self.num_tokens >= self._params.min_tokens:
            return self._stops.push(text)
        return text

    def _flush(self) -> str:
        return self._show(self._stream.finish()) + self._stops.finish()

    def _ends_silently(self, token_id: int, reason: FinishReason | None) -> bool:
        ends = reason is FinishReason.STOP and token_id in self._stop_token_ids
        return ends and not self._params.include_stop_str_in_output

    def _prompt_texts(self, entries: Sequence[TokenLogprob]) -> tuple[TokenText, ...]:
        """All tokens of the prompt, the first of them without a log-probability."""
        stream = self._tokenizer.stream()
        texts = [self._dress(self._prompt[0], None, 0)]
        offset = len(stream.push(self._prompt[0]))
        for entry in entries:
            texts.append(self._token_text(entry, offset))
            offset += len(stream.push(entry.token_id))
        return tuple(texts)

    def _token_text(self, entry: TokenLogprob, offset: int) -> TokenText:
        top = tuple(self._dress(token_id, logprob, offset) for token_id, logprob in entry.top)
        return self._dress(entry.token_id, entry.logprob, offset, top)

    def _dress(
        self, token_id: int, logprob: float | None, offset: int, top: tuple[TokenText, ...] = ()
    ) -> TokenText:
        data = self._tokenizer.token_bytes(token_id)
        return TokenText(token_id, data.decode("utf-8", "replace"), data, logprob, offset, top)
