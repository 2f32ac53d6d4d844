"""Server-sent events: one generation as a stream of JSON chunks. README.md says what a disconnect does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Response
from fastapi.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from sagellm.core.errors import RequestError
from sagellm.engines.llm import TextDelta, Usage
from sagellm.serving.answers import Reply
from sagellm.serving.errors import body_of
from sagellm.serving.gateway import Generation
from sagellm.serving.schema import StreamOptions

DONE = b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


@asynccontextmanager
async def closed_on_disconnect(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Close the generation when its client disconnects, and at the end."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        generation.close()


async def sse_events(generation: Generation, reply: Reply, options: StreamOptions) -> AsyncIterator[bytes]:
    """The events of a generation up to `[DONE]`, joined for a slow client.

    An error is the last event.
    """
    usages, total = [Usage()] * reply.head.num_prompts, Usage()

    def with_usage(chunk: dict[str, Any]) -> bytes:
        if options.continuous_usage_stats:
            chunk["usage"] = reply.usage(total)
        elif options.include_usage:
            chunk["usage"] = None
        return event(chunk)

    def parts(position: int, delta: TextDelta) -> list[bytes]:
        return [with_usage(chunk) for chunk in reply.parts(position, delta)]

    for chunk in reply.opening():
        yield with_usage(chunk)
    try:
        async for batch in generation:
            pieces: list[bytes] = []
            for position, delta in batch:
                total += delta.usage - usages[position]
                usages[position] = delta.usage
                if delta.prompt_logprobs:  # they may be many
                    pieces += await run_in_threadpool(parts, position, delta)
                else:
                    pieces += parts(position, delta)
            if pieces:
                yield b"".join(pieces)
    except RequestError as error:
        yield event(body_of(error))
        return
    if options.include_usage:
        yield event(reply.closing(total))
    yield DONE


class EventStream(Response):
    """Sends `chunks` of a `generation`, which a disconnect of the client closes.

    The response begins with the first delta, so an error before that has its own HTTP status.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[bytes], generation: Generation, headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._chunks = chunks
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with closed_on_disconnect(receive, self._generation):
            await self._generation.wait()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
