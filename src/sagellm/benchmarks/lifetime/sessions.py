"""Which requests of a trace are turns of one session, where the trace says nothing but block ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sagellm.benchmarks.traces.record import TraceRequest

MIN_SHARED_BLOCKS = 2
"""The first block may be a system prompt that all have."""


@dataclass(frozen=True, slots=True)
class Place:
    """Of a request: its session, and which turn of it this is, from 1 on."""

    session_id: str
    turn: int


def infer_sessions(requests: Sequence[TraceRequest]) -> list[Place]:
    """The next turn of a session is a prompt that continues the whole prompt of an earlier request.

    The whole, but for its last block, which may have been partial. Several prompts may continue one: each is
    the next turn then.
    """
    last_user: dict[tuple[object, int], int] = {}
    places: list[Place] = []
    for number, request in enumerate(requests):
        parent = _parent(request, requests, last_user)
        if parent is None:
            places.append(Place(f"s{number}", 1))
        else:
            places.append(Place(places[parent].session_id, places[parent].turn + 1))
        for block in request.ids:
            last_user[request.namespace, block] = number
    return places


def _parent(
    request: TraceRequest, requests: Sequence[TraceRequest], last_user: dict[tuple[object, int], int]
) -> int | None:
    """The earlier request that used the deepest block of this one, if this one continues it."""
    ids = request.ids.tolist()
    for depth in range(len(ids), MIN_SHARED_BLOCKS - 1, -1):
        number = last_user.get((request.namespace, ids[depth - 1]))
        if number is not None:
            return number if depth >= len(requests[number].ids) - 1 else None
    return None
