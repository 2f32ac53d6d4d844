"""`PlainHttp`: HTTP to one server. What goes wrong is a `PlainServerError`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import httpx2

from sagellm.control_plane.fleet.plain_kind import PlainServerError, said
from sagellm.core.errors import ConfigError

CONNECT_S = 5.0
MAX_BYTES = 64 << 20
"""Of one message, or of one whole answer."""
_JSON = {"Content-Type": "application/json"}


class PlainHttp:
    """Connections to one server, for one event loop. `stall_s`: so long may an answer bring nothing.

    Raises `ConfigError` for an address or a key that cannot be sent.
    """

    def __init__(self, url: str, api_key: str | None, *, stall_s: float, num_kept: int) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = httpx2.Timeout(stall_s, connect=CONNECT_S, pool=None)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=num_kept)
        try:
            self._client = httpx2.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits)
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise ConfigError(f"{url} or its key cannot be sent: {error}") from error

    async def ask(self, method: str, path: str, content: bytes | None, timeout_s: float) -> bytes:
        """The body of an answer with status 200, within this time."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(method, path, content=content, headers=_JSON) as response,
            ):
                data = await _body(response)
        except TimeoutError as error:
            late = f"{method} {path}: no answer within {timeout_s:g} s"
            raise PlainServerError(late, is_silence=True) from error
        except httpx2.HTTPError as error:
            raise PlainServerError(f"{method} {path}: {str(error) or type(error).__name__}") from error
        if response.status_code != 200:
            raise _status_error(response, data)
        return data

    async def messages(
        self, path: str, content: bytes, *, streams: bool
    ) -> AsyncGenerator[str | bytes, None]:
        """The messages of the answer to a POST, as they come.

        If it does not stream, there is one: its body."""
        try:
            async with self._client.stream("POST", path, content=content, headers=_JSON) as response:
                if response.status_code != 200:
                    raise _status_error(response, await _body(response))
                if not streams:
                    yield await _body(response)
                    return
                async for event in httpx2.EventSource(response, MAX_BYTES):
                    yield event.data
        except httpx2.HTTPError as error:
            raise PlainServerError(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        await self._client.aclose()


async def _body(response: httpx2.Response) -> bytes:
    """Raises `PlainServerError` for more than `MAX_BYTES`."""
    data = bytearray()
    async for part in response.aiter_bytes():
        data += part
        if len(data) > MAX_BYTES:
            raise PlainServerError(f"it answers with more than {MAX_BYTES} bytes")
    return bytes(data)


def _status_error(response: httpx2.Response, data: bytes) -> PlainServerError:
    status, path = response.status_code, response.request.url.path
    hint = ": it wants another key, set api_key_variable of the server" if status in (401, 403) else ""
    return PlainServerError(f"{path} gives status {status}{hint} ({said(data) or 'no reason'})", status)
