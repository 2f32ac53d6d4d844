"""Hints of clients about their KV, passed on by a host.

Three fields of a request: `sage_session` (a name of its session), `sage_hints` (an envelope of
`docs/kv_hints.md`, as an object or as JSON text) and `sage_pin_s` (seconds for which the prompt and its
answer are evicted last). They change the order of eviction and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from sagellm.core.clock import Clock
from sagellm.core.errors import RequestError
from sagellm.core.kv_hints import (
    ACTION_VERSIONS,
    MAX_DURATION_S,
    PROTOCOL_VERSION,
    KVHintAction,
    KVHintsEnvelope,
    number,
)
from sagellm.core.protocols.prefix_cache import PrefixReuseIndex
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.manager.hints import KVHints

SESSION, HINTS, PIN = "sage_session", "sage_hints", "sage_pin_s"
PIN_KIND = "pin"
HINT_KINDS = (*(kind for kind in ACTION_VERSIONS if kind != "session.describe"), PIN_KIND)
"""What a guest may heed: the types of actions, and pins."""
MAX_SESSION_CHARACTERS = 256
MAX_HINTS_CHARACTERS = 65_536
"""Of `sage_hints` as text: the host's scheduler waits while it is read."""


class RequestHints(NamedTuple):
    """The hints of one request. `actions`: pairs of a kind (of `HINT_KINDS`) and an action of that kind."""

    session_id: str | None = None
    actions: tuple[tuple[str, KVHintAction], ...] = ()


NO_HINTS = RequestHints()


def hints_of(fields: Any) -> RequestHints:
    """The hints among the fields of a request.

    Clients may send anything. Raises only `RequestError`, which names the field that is wrong.
    """
    if not isinstance(fields, Mapping):
        raise RequestError(f"the fields of a request must be an object, got {type(fields).__name__}", SESSION)
    session = fields.get(SESSION)
    if session is not None and not (isinstance(session, str) and 0 < len(session) <= MAX_SESSION_CHARACTERS):
        raise RequestError(f"{SESSION} must be a string of 1 to {MAX_SESSION_CHARACTERS} characters", SESSION)
    actions = [(action.action_type, action) for action in _envelope(fields.get(HINTS)).actions]
    if any("token_ids" in action.payload for _, action in actions):
        raise RequestError(
            f"{HINTS}: token_ids are not known inside another engine; name a session_id, or send the hint"
            " with the request itself",
            HINTS,
        )
    if PIN in fields:
        seconds = number(fields, PIN, 0, MAX_DURATION_S)
        payload = {"priority": 100, "duration_s": seconds}
        actions.append((PIN_KIND, KVHintAction("", "kv.retain", payload=payload)))
    return RequestHints(session, tuple(actions))


def _envelope(given: Any) -> KVHintsEnvelope:
    if given is None:
        return KVHintsEnvelope(PROTOCOL_VERSION, "", ())
    if isinstance(given, str):
        if len(given) > MAX_HINTS_CHARACTERS:
            raise RequestError(f"{HINTS} has {len(given)} characters, at most {MAX_HINTS_CHARACTERS}", HINTS)
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{HINTS} is no JSON: {error}", HINTS) from error
    return KVHintsEnvelope.parse(given)


def as_they_are(namespace: Namespace) -> Namespace:
    """The namespace itself: for an index that has the namespaces of the requests."""
    return namespace


class HintedIndex:
    """Applies the hints of requests that end to one prefix index.

    `kinds`: those of `HINT_KINDS` that it heeds. `namespace_of`: a request's namespace in the index.
    """

    def __init__(
        self,
        index: PrefixReuseIndex,
        clock: Clock,
        kinds: Collection[str],
        namespace_of: Callable[[Namespace], Namespace] = as_they_are,
    ) -> None:
        self._kinds = frozenset(kinds)
        self._hints = KVHints(index, namespace_of, clock.now)

    def ended(self, said: RequestHints, path: Tokens, namespace: Namespace) -> None:
        """A request has ended with this path, and no longer pins it. `said`: its hints."""
        if not self._kinds:
            return
        self._hints.expect(())  # ends expectations whose time is over
        if said.session_id is not None:
            self._hints.remember(said.session_id, path, namespace)
        actions = tuple(action for kind, action in said.actions if kind in self._kinds)
        if actions:
            self._hints.apply(KVHintsEnvelope(PROTOCOL_VERSION, "", actions), namespace, path)
