"""POST /v1/kv/hints: what a client knows of its sessions' KV, told outside of any request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from sagellm.core.kv_hints import HintOutcome
from sagellm.serving.errors import MAX_MESSAGE_CHARS, clipped
from sagellm.serving.gateway import Gateway
from sagellm.serving.reader import RequestReader
from sagellm.serving.schema import HintRequest


@dataclass(frozen=True, slots=True)
class HintRoute:
    """Answers each action by itself; only what is no envelope is an error."""

    gateway: Gateway
    reader: RequestReader
    check_model: Callable[[str | None], str]

    async def hint(self, request: Request) -> dict[str, Any]:
        body = await self.reader.read(HintRequest, request)
        self.check_model(body.model)
        outcomes = await self.gateway.hint(body.kv_hints, tenant=body.cache_salt or "")
        return {"outcomes": [_shown(outcome) for outcome in outcomes]}


def _shown(outcome: HintOutcome) -> dict[str, Any]:
    return {
        "action_id": outcome.action_id,
        "status": outcome.status.value,
        "num_blocks": outcome.num_blocks,
        "reason": clipped(outcome.reason, MAX_MESSAGE_CHARS),
    }
