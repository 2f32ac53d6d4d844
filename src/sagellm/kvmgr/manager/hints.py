"""`KVHints` applies the KV hints of clients to the prefix index."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from sagellm.core.errors import RequestError
from sagellm.core.kv_hints import (
    MAX_DURATION_S,
    HintOutcome,
    HintStatus,
    KVHintAction,
    KVHintsEnvelope,
    number,
)
from sagellm.core.plan import RequestState
from sagellm.core.protocols.eviction import Hint
from sagellm.core.protocols.kv_tiers import KVTiers
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex
from sagellm.core.types import Account, Namespace, Tokens
from sagellm.kvmgr.manager.checkpoints import Checkpoints
from sagellm.kvmgr.manager.similar_sessions import Session, SimilarSessions

EXPECTED_FOR_S = 60.0
"""A `kv.expect` that no use has ended ends after this time, so that hints cannot hold the cache."""
MAX_EXPECTED = 1024
MIN_SIMILARITY = 0.8
BringUp = Callable[[str, Tokens, Namespace, Account], None]
"""Loads what tiers have of a path, under a name, for the account that pays."""


class KVHints:
    """Applies hints, and marks what waiting requests are about to reuse.

    Hints hold for the blocks of the index, for `checkpoints` of recurrent states behind them, and for what
    `tiers` have; from there `bring_up` loads what is expected. It keeps the tokens of the last `max_sessions`
    sessions, up to `max_tokens` tokens together.
    """

    def __init__(
        self,
        index: PrefixReuseIndex,
        namespace_of: Callable[[Namespace], Namespace],
        now: Callable[[], float],
        *,
        checkpoints: Checkpoints | None = None,
        tiers: KVTiers | None = None,
        bring_up: BringUp | None = None,
        max_sessions: int = 4096,
        max_tokens: int = 1 << 24,
    ) -> None:
        self._index, self._checkpoints, self._tiers = index, checkpoints, tiers
        self._bring_up, self._num_prefetches = bring_up, 0
        self._namespace_of = namespace_of
        self._max_sessions, self._max_tokens = max_sessions, max_tokens
        self._sessions: OrderedDict[Session, tuple[Tokens, Namespace]] = OrderedDict()
        self._similar = SimilarSessions()
        self._num_tokens = 0
        self._now = now
        self._wanted: dict[Any, tuple[PrefixHit, int]] = {}  # of waiting requests, with how many want each
        self._expected: OrderedDict[Any, tuple[float, PrefixHit]] = OrderedDict()  # with when each ends

    def released(self, state: RequestState, *, ended: bool) -> None:
        """Remember the session of a request that has left the batch.

        If it has ended, apply the hints that it brought.
        """
        request = state.request
        if request.session_id is not None:
            self.remember(request.session_id, Tokens(state.tokens), request.namespace)
        if ended and request.kv_hints is not None:
            self.apply(request.kv_hints, request.namespace, state.tokens, request.account)

    def remember(self, session_id: str, tokens: Tokens, namespace: Namespace) -> None:
        """The last request of a session is now this one, its answer included."""
        session = (namespace.tenant, session_id)
        old = self._sessions.pop(session, None)
        self._num_tokens += len(tokens) - (len(old[0]) if old is not None else 0)
        self._sessions[session] = (tokens, namespace)
        while len(self._sessions) > self._max_sessions or self._num_tokens > self._max_tokens:
            oldest, (forgotten, _) = self._sessions.popitem(last=False)
            self._num_tokens -= len(forgotten)
            self._similar.forget(oldest)

    def session_tokens(self, tenant: str, session_id: str) -> Tokens | None:
        """The last request of a session with its answer; None if unknown."""
        known = self._sessions.get((tenant, session_id))
        return None if known is None else known[0]

    def apply(
        self,
        envelope: KVHintsEnvelope,
        namespace: Namespace,
        own: Tokens | None = None,
        account: Account | None = None,
    ) -> tuple[HintOutcome, ...]:
        """Apply each action and report its outcome; never raises for an action.

        `own`: the tokens of the request that brought the hints; `account`: its account, else the tenant's.
        """
        account = account or Account(namespace.tenant)
        return tuple(self._act(action, namespace, own, account) for action in envelope.actions)

    def expect(self, hits: Iterable[PrefixHit]) -> None:
        """Have the hits of waiting requests evicted last, until the next call."""
        self._end_expectations()
        wanted: dict[Any, tuple[PrefixHit, int]] = {}
        for hit in hits:
            if hit.num_blocks:
                wanted[hit.node] = (hit, wanted.get(hit.node, (hit, 0))[1] + 1)
        for node, (hit, _) in self._wanted.items():
            if node not in wanted:
                self._hint(hit, Hint(wanted_by=0))
        for node, (hit, count) in wanted.items():
            if node in self._wanted:
                self._index.hint(hit, Hint(wanted_by=count))  # again, since a use by others forgets it
            else:
                self._hint(hit, Hint(wanted_by=count))
        self._wanted = wanted

    @property
    def is_idle(self) -> bool:
        """Whether no mark is set that has to end."""
        return not self._wanted and not self._expected

    # -- inside

    def _hint(self, hit: PrefixHit, hint: Hint) -> int:
        """Hint the last blocks of a hit, and the checkpoints there; returns their number."""
        num_blocks = self._index.hint(hit, hint)
        if self._checkpoints is not None and num_blocks:
            self._checkpoints.hint(hit, num_blocks, hint)
        return num_blocks

    def _act(
        self, action: KVHintAction, namespace: Namespace, own: Tokens | None, account: Account
    ) -> HintOutcome:
        if not action.is_known:
            name = f"{action.action_type}@{action.action_version}"
            return HintOutcome(action.action_id, HintStatus.UNSUPPORTED, reason=f"{name} is not known here")
        try:
            if action.action_type == "session.describe":
                return self._describe(action, namespace)
            hint = _hint_of(action)
            target = self._target(action, namespace, own)
        except RequestError as error:
            return HintOutcome(action.action_id, HintStatus.INVALID, reason=str(error))
        if target is None:
            return HintOutcome(
                action.action_id, HintStatus.NOT_FOUND, reason="nothing is known of the target"
            )
        tokens, namespace = target[0], self._namespace_of(target[1])
        hit = self._index.lookup(tokens, namespace)
        num_blocks = self._hint(hit, hint)
        if self._tiers is not None:
            num_blocks = max(num_blocks, self._tiers.hint(tokens, namespace, hint))
        if hint.expected and self._bring_up is not None:
            self._num_prefetches += 1
            self._bring_up(f"kv.expect {self._num_prefetches}", tokens, namespace, account)
        if hint.expected and hit.num_blocks:
            self._expected.pop(hit.node, None)
            self._expected[hit.node] = (self._now() + EXPECTED_FOR_S, hit)
            self._end_expectations()
        status = HintStatus.APPLIED if num_blocks else HintStatus.NOT_FOUND
        reason = "" if num_blocks else "no cached block is the target's alone"
        return HintOutcome(action.action_id, status, num_blocks, reason)

    def _describe(self, action: KVHintAction, namespace: Namespace) -> HintOutcome:
        session = (namespace.tenant, str(action.payload.get("session_id")))
        if session not in self._sessions:
            return HintOutcome(action.action_id, HintStatus.NOT_FOUND, reason="name a known session_id")
        self._similar.describe(session, action.payload.get("embedding"))
        return HintOutcome(action.action_id, HintStatus.APPLIED)

    def _end_expectations(self) -> None:
        """End expectations whose time is over, and the oldest of too many."""
        expected, now_s = self._expected, self._now()
        while expected:
            until_s, hit = next(iter(expected.values()))
            if until_s > now_s and len(expected) <= MAX_EXPECTED:
                return
            expected.popitem(last=False)
            self._hint(hit, Hint(expected=False))

    def _target(
        self, action: KVHintAction, namespace: Namespace, own: Tokens | None
    ) -> tuple[Tokens, Namespace] | None:
        session_id, token_ids = action.payload.get("session_id"), action.payload.get("token_ids")
        if "embedding" in action.payload:
            if action.action_type != "kv.expect":
                raise RequestError("an embedding can be the target of kv.expect only", "embedding")
            found = self._similar.nearest(namespace.tenant, action.payload["embedding"])
            least = number(action.payload, "min_similarity", MIN_SIMILARITY, 1)
            return None if found is None or found.similarity < least else self._sessions[found.session]
        if session_id is not None:
            if not isinstance(session_id, str):
                raise RequestError(f"session_id must be a string, got {session_id!r}", "session_id")
            return self._sessions.get((namespace.tenant, session_id))
        if token_ids is not None:
            try:
                return Tokens(token_ids), namespace
            except (TypeError, OverflowError, ValueError) as error:
                raise RequestError(f"token_ids must be a list of token ids: {error}", "token_ids") from error
        return (own, namespace) if own is not None else None


def _hint_of(action: KVHintAction) -> Hint:
    """The hint of an action; raises `RequestError` for a payload out of range."""
    payload = action.payload
    if action.action_type == "kv.retain":
        priority = number(payload, "priority", 50, 100)
        return Hint(priority=int(priority), duration_s=number(payload, "duration_s", 300, MAX_DURATION_S))
    if action.action_type == "kv.expect":
        return Hint(expected=True)
    ended = action.action_type == "session.end"
    return Hint(ended=ended, superseded=not ended)
