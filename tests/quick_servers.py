"""Import it where tests start servers: uvicorn looks every 10 ms, not every 100, whether to end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from uvicorn import server


async def _tenth(delay_s: float) -> None:
    await asyncio.sleep(delay_s / 10)


vars(server)["asyncio"] = SimpleNamespace(**{**vars(asyncio), "sleep": _tenth})
