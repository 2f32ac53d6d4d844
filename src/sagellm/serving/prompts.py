"""From prompts to tokens. A prompt that cannot fit is refused before its slow encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from sagellm.core.errors import ContextLengthError, RequestError
from sagellm.core.protocols.tokenizer import Message
from sagellm.core.types import Tokens
from sagellm.engines.llm import LLM
from sagellm.serving.schema import PromptFields


class PromptEncoder:
    """Encodes for one model. Methods raise `RequestError` and are slow: call them on a worker thread."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._tokenizer = llm.tokenizer

    @cached_property
    def max_text_bytes(self) -> int:
        """The bytes that the context can hold, if every token were the longest one."""
        sizes = (len(self._tokenizer.token_bytes(token_id)) for token_id in range(self._tokenizer.vocab_size))
        return self._llm.max_model_len * max(sizes, default=1)

    def text(self, text: str, *, add_special_tokens: bool = True) -> Tokens:
        self._check_size(len(text.encode()), "prompt")
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def prompt(self, prompt: str | Sequence[int]) -> Tokens:
        """A text or token ids."""
        if isinstance(prompt, str):
            return self.text(prompt)
        self._check_count(len(prompt) + 1, "prompt")
        return self._llm.encode(prompt)

    def chat(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> Tokens:
        """Tokens of messages by the model's template; `options` are its variables."""
        self._check_count(len(messages), "messages")
        self._check_size(sum(_content_bytes(message) for message in messages), "messages")
        return self._tokenizer.encode_chat(
            messages, add_generation_prompt=add_generation_prompt, template_options=options
        )

    def of(self, body: PromptFields, *, add_generation_prompt: bool = False) -> Tokens:
        """The tokens of the prompt or the messages of a request."""
        if body.messages:
            variables = body.template_options()
            return self.chat(body.messages, variables, add_generation_prompt=add_generation_prompt)
        return self.prompt(body.prompt or "")

    def decode(self, token_ids: Sequence[int], where: str) -> str:
        """The text of token ids, at most as many as the context holds."""
        self._check_count(len(token_ids), where)
        limit = self._tokenizer.vocab_size
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < limit), None)
        if wrong is not None:
            raise RequestError(f"{where}: token id {wrong} is not in the vocabulary [0, {limit})", where)
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def token_texts(self, tokens: Tokens) -> list[str]:
        """What each token stands for."""
        return [self._tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in tokens]

    def _check_count(self, num_tokens: int, where: str) -> None:
        if num_tokens > self._llm.max_model_len:
            raise self._too_long(where, f"at least {num_tokens} tokens with what is generated")

    def _check_size(self, num_bytes: int, where: str) -> None:
        # No token is shorter than a byte, so a text of fewer bytes needs no scan of the vocabulary.
        if num_bytes > self._llm.max_model_len and num_bytes > self.max_text_bytes:
            raise self._too_long(where, f"{num_bytes} bytes, at most {self.max_text_bytes} of which fit")

    def _too_long(self, where: str, size: str) -> ContextLengthError:
        return ContextLengthError(self._llm.max_model_len, f"{where} has {size}: shorten it", where)


def _content_bytes(message: Message) -> int:
    """Bytes of a message's text, whichever form its content has."""
    content = message.get("content")
    if isinstance(content, str):
        return len(content.encode())
    parts = content if isinstance(content, list) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return sum(len(text.encode()) for text in texts if isinstance(text, str))
