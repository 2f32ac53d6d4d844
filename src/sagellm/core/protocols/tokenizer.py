"""Contract of tokenizers: text to token ids and back, whole and token by token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from sagellm.core.types import Tokens

Message = Mapping[str, Any]
"""One chat message: `role`, and `content` as a string or a list of `{"type": "text", "text": ...}` parts."""


class TokenStream(Protocol):
    """Token ids in, text out, for one sequence. The deltas, joined, equal `decode` of all tokens pushed."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token: whole characters only, never taken back."""

    def finish(self) -> str:
        """What was held back. Nothing may be pushed afterwards."""


class TextTokenizer(Protocol):
    """Safe to call from several threads."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Any of these ends a generation."""

    @property
    def reasoning_token_ids(self) -> tuple[int, ...]:
        """The tokens before and behind reasoning (`<think>`, `</think>`); empty: there are none."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Tokens: ...

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> Tokens:
        """The prompt that the model's chat template makes of a conversation. Raises `RequestError`."""

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes in the middle of a text; empty for an unknown id."""

    def stream(self, *, skip_special_tokens: bool = True) -> TokenStream: ...
