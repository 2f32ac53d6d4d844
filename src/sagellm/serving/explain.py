"""POST /v1/kv/explain: what the KV cache knows of a prompt, span by span."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from pydantic import Field

from sagellm.core.types import Tokens
from sagellm.engines.llm import MAX_SESSION_ID_CHARS
from sagellm.serving.access_log import record_of
from sagellm.serving.cache_facts import CacheSpan, Explanation, SessionDifference
from sagellm.serving.gateway import Gateway
from sagellm.serving.prompts import PromptEncoder
from sagellm.serving.reader import RequestReader
from sagellm.serving.schema import PromptFields

SHOWN_TOKENS = 16
"""Of the texts around a difference."""


class ExplainRequest(PromptFields):
    """POST /v1/kv/explain.

    `session_id`: the session whose last request the prompt is compared with. Since text of that request is
    shown, and requests without `cache_salt` share one tenant, it is compared under a `cache_salt` only.
    `add_generation_prompt`: whether the beginning of an answer follows the messages, by default as in a chat.
    """

    session_id: str | None = Field(default=None, min_length=1, max_length=MAX_SESSION_ID_CHARS)
    add_generation_prompt: bool | None = None


@dataclass(frozen=True, slots=True)
class ExplainRoutes:
    """The handler. A tenant is told of its own prompts, and nothing of others.

    One prompt is explained at a time: the engine's thread hashes it between two steps, which takes 5 ms for
    131,072 tokens.
    """

    gateway: Gateway
    reader: RequestReader
    encoder: PromptEncoder
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def explain(self, request: Request) -> Explanation:
        """What the cache knows of a prompt of one tenant."""
        body = await self.reader.read(ExplainRequest, request)
        tenant = record_of(request.scope).tenant = body.cache_salt or ""
        tokens = await run_in_threadpool(
            self.encoder.of, body, add_generation_prompt=body.add_generation_prompt is not False
        )
        session_id = body.session_id if tenant else None
        async with self._turn:
            found = await self.gateway.ask(
                lambda llm: llm.explain(tokens, tenant=tenant, session_id=session_id)
            )
        return Explanation(
            num_tokens=len(tokens),
            block_size=found.block_size,
            spans=_shown(CacheSpan.of(span, tenant, found.bytes_per_block) for span in found.spans),
            session=await run_in_threadpool(self._difference, tokens, found.session_tokens),
        )

    def _difference(self, tokens: Tokens, before: Tokens | None) -> SessionDifference | None:
        """Where the prompt leaves the session's last request; None if one begins the other."""
        pairs = enumerate(zip(tokens, before or (), strict=False))
        token = next((index for index, (new, old) in pairs if new != old), None)
        if token is None or before is None:
            return None

        def text(ids: Tokens, start: int, stop: int) -> str:
            return self.encoder.decode(ids.slice(max(0, start), stop).tolist(), "tokens")

        return SessionDifference(
            token=token,
            before=text(tokens, token - SHOWN_TOKENS, token),
            now=text(tokens, token, token + SHOWN_TOKENS),
            then=text(before, token, token + SHOWN_TOKENS),
        )


def _shown(spans: Iterable[CacheSpan]) -> list[CacheSpan]:
    """What other tenants' requests evicted piece by piece is one span."""
    shown = []
    for _, alike in groupby(spans, key=lambda span: (span.state, span.cause, span.evicted_by)):
        pieces = list(alike)
        oldest = max(pieces, key=lambda piece: piece.blocks_needed or 0)
        shown.append(oldest.model_copy(update={"start": pieces[0].start, "stop": pieces[-1].stop}))
    return shown
