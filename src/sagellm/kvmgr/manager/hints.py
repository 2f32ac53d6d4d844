"""`KVHints` applies the KV hints of clients to the prefix index."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from sagellm.core.errors import BookkeepingError, RequestError
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
from sagellm.kvmgr.manager.expected_later import Expected, ExpectedLater, Prefix, prefix_of
from sagellm.kvmgr.manager.loads import TierLoads
from sagellm.kvmgr.manager.similar_sessions import Session, SimilarSessions

EXPECTED_FOR_S = 60.0
"""A `kv.expect` that no use has ended ends after this time, so that hints cannot hold the cache."""
MAX_EXPECTED = 1024
LOAD_MARGIN_S = 1.0
"""What is expected later begins to load so long before, beside the time that the load takes."""
MIN_SIMILARITY = 0.8


class _Expected(NamedTuple):
    """A prefix that is evicted last until `until_s`."""

    tokens: Tokens
    namespace: Namespace
    until_s: float


class KVHints:
    """Applies hints, and marks what waiting requests are about to reuse.

    Hints hold for the blocks of the index, for `checkpoints` of recurrent states behind them, and for what
    `tiers` have; from there `loads` brings up what is expected. It keeps the tokens of the last
    `max_sessions` sessions, up to `max_tokens` tokens together; as many tokens of what is expected later.
    """

    def __init__(
        self,
        index: PrefixReuseIndex,
        namespace_of: Callable[[Namespace], Namespace],
        now: Callable[[], float],
        loads: TierLoads | None = None,
        checkpoints: Checkpoints | None = None,
        tiers: KVTiers | None = None,
        *,
        max_sessions: int = 4096,
        max_tokens: int = 1 << 24,
    ) -> None:
        self._index, self._checkpoints, self._tiers = index, checkpoints, tiers
        self._loads, self._num_prefetches = loads, 0
        self._namespace_of = namespace_of
        self._max_sessions, self._max_tokens = max_sessions, max_tokens
        self._sessions: OrderedDict[Session, tuple[Tokens, Namespace]] = OrderedDict()
        self._similar = SimilarSessions()
        self._num_tokens = 0
        self._now = now
        self._wanted: dict[Any, tuple[PrefixHit, int]] = {}  # of waiting requests, with how many want each
        self._expected: OrderedDict[Prefix, _Expected] = OrderedDict()  # the first ends first
        self._loading: dict[Prefix, str] = {}  # of those expected, the name of the load under way
        self._later = ExpectedLater(MAX_EXPECTED, max_tokens)

    def released(self, state: RequestState, *, ended: bool) -> None:
        """Remember the session of a request that has left the batch.

        If it has ended, apply the hints that it brought.
        """
        request = state.request
        if request.session_id is not None:
            self.remember(request.session_id, Tokens(state.tokens), request.namespace)
        if ended and request.kv_hints is not None:
            self.apply(request.kv_hints, request.namespace, Tokens(state.tokens), request.account)

    def remember(self, session_id: str, tokens: Tokens, namespace: Namespace) -> None:
        """The last request of a session is now this one, its answer included."""
        session = (namespace.tenant, session_id)
        old = self._sessions.pop(session, None)
        if old is not None and self._later:
            self._later.forget(prefix_of(old[0], self._namespace_of(old[1])))
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
        self.advance()
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

    @property
    def wake_s(self) -> float:
        """Seconds until `advance` has something to begin; infinite if it never has."""
        return max(0.0, self._later.next_s - self._now()) if self._later else math.inf

    def advance(self) -> None:
        """Begin what is expected soon, and end what was not used in time. Called in each step."""
        if self._later:
            for due in self._later.take_due(self._now()):
                self._expect(due.tokens, due.namespace, due.account)
        if self._expected:
            self._mark_loaded()
            self._end_expectations()

    def check(self) -> None:
        """Raise `BookkeepingError` where what is expected, now or later, does not add up."""
        self._later.check()
        if not self._loading.keys() <= self._expected.keys() or len(self._expected) > MAX_EXPECTED:
            raise BookkeepingError(f"{len(self._loading)} loads for {len(self._expected)} expected prefixes")

    # -- inside

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
            in_s = number(action.payload, "in_s", 0, MAX_DURATION_S) if hint.expected else 0.0
            target = self._target(action, namespace, own)
        except RequestError as error:
            return HintOutcome(action.action_id, HintStatus.INVALID, reason=str(error))
        if target is None:
            return HintOutcome(
                action.action_id, HintStatus.NOT_FOUND, reason="nothing is known of the target"
            )
        tokens, namespace = target[0], self._namespace_of(target[1])
        if not hint.expected:
            if hint.expected is False:
                self._expect_no_more(tokens, namespace)
            num_blocks = self._apply(tokens, namespace, hint)
        elif (wait_s := self._wait_s(tokens, namespace, in_s)) <= 0:
            num_blocks = self._expect(tokens, namespace, account)
        else:
            num_blocks = self._expect_later(tokens, namespace, account, wait_s)
            if num_blocks and prefix_of(tokens, namespace) not in self._later:
                reason = "too much is expected before it: say so again when it is nearer"
                return HintOutcome(action.action_id, HintStatus.INVALID, reason=reason)
        status = HintStatus.APPLIED if num_blocks else HintStatus.NOT_FOUND
        reason = "" if num_blocks else "no cached block is the target's alone"
        return HintOutcome(action.action_id, status, num_blocks, reason)

    def _apply(self, tokens: Tokens, namespace: Namespace, hint: Hint) -> int:
        """Hint a prefix on the device and in tiers; returns the larger count."""
        num_blocks = self._hint(self._index.lookup(tokens, namespace), hint)
        if self._tiers is not None:
            num_blocks = max(num_blocks, self._tiers.hint(tokens, namespace, hint))
        return num_blocks

    def _hint(self, hit: PrefixHit, hint: Hint) -> int:
        """Hint the last blocks of a hit, and the checkpoints there; returns their number."""
        num_blocks = self._index.hint(hit, hint)
        if self._checkpoints is not None and num_blocks:
            self._checkpoints.hint(hit, num_blocks, hint)
        return num_blocks

    def _describe(self, action: KVHintAction, namespace: Namespace) -> HintOutcome:
        session = (namespace.tenant, str(action.payload.get("session_id")))
        if session not in self._sessions:
            return HintOutcome(action.action_id, HintStatus.NOT_FOUND, reason="name a known session_id")
        self._similar.describe(session, action.payload.get("embedding"))
        return HintOutcome(action.action_id, HintStatus.APPLIED)

    # -- what is expected

    def _wait_s(self, tokens: Tokens, namespace: Namespace, in_s: float) -> float:
        """Seconds until what is expected in `in_s` has to begin to load."""
        if self._tiers is None or not in_s:
            return in_s - LOAD_MARGIN_S
        return in_s - LOAD_MARGIN_S - self._tiers.slowest_load_s(tokens, namespace)

    def _expect(self, tokens: Tokens, namespace: Namespace, account: Account) -> int:
        """Have a prefix evicted last for a while, and loaded from tiers."""
        num_blocks, prefix = self._apply(tokens, namespace, Hint(expected=True)), prefix_of(tokens, namespace)
        self._later.forget(prefix)
        if num_blocks:
            self._expected.pop(prefix, None)
            self._expected[prefix] = _Expected(tokens, namespace, self._now() + EXPECTED_FOR_S)
            if self._loads is not None and prefix not in self._loading:
                self._num_prefetches += 1
                load = self._loading[prefix] = f"kv.expect {self._num_prefetches}"
                self._loads.bring_up_expected(load, tokens, namespace, account)
            self._end_expectations()
        return num_blocks

    def _expect_later(self, tokens: Tokens, namespace: Namespace, account: Account, wait_s: float) -> int:
        """Expect a prefix in `wait_s` seconds, and have tiers evict it last until then."""
        num_blocks = self._index.lookup(tokens, namespace).num_blocks
        if self._tiers is not None:
            num_blocks = max(num_blocks, self._tiers.hint(tokens, namespace, Hint(expected=True)))
        if num_blocks:
            for dropped in self._later.add(Expected(self._now() + wait_s, tokens, namespace, account)):
                if self._tiers is not None:
                    self._tiers.hint(dropped.tokens, dropped.namespace, Hint(expected=False))
        return num_blocks

    def _expect_no_more(self, tokens: Tokens, namespace: Namespace) -> None:
        prefix = prefix_of(tokens, namespace)
        self._later.forget(prefix)
        self._expected.pop(prefix, None)
        load = self._loading.pop(prefix, None)
        if load is not None and self._tiers is not None:
            self._tiers.cancel(load)

    def _mark_loaded(self) -> None:
        """Mark what has come from tiers since it was expected."""
        for prefix, load in list(self._loading.items()):
            assert self._tiers is not None
            if not self._tiers.is_loading(load):
                del self._loading[prefix]
                each = self._expected[prefix]
                self._hint(self._index.lookup(each.tokens, each.namespace), Hint(expected=True))

    def _end_expectations(self) -> None:
        """End expectations whose time is over, and the oldest of too many."""
        expected, now_s = self._expected, self._now()
        while expected:
            prefix, each = next(iter(expected.items()))
            if each.until_s > now_s and len(expected) <= MAX_EXPECTED:
                return
            del expected[prefix]
            self._loading.pop(prefix, None)
            self._hint(self._index.lookup(each.tokens, each.namespace), Hint(expected=False))
            if self._tiers is not None and prefix not in self._later:
                self._tiers.hint(each.tokens, each.namespace, Hint(expected=False))

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
    return Hint(ended=ended, superseded=not ended, expected=False)
