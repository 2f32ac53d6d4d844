"""`KVWaits`: waiting requests whose KV is on its way up from a lower tier."""

from __future__ import annotations

from collections import Counter, deque

from sagellm.core.binding import Binding
from sagellm.core.plan import RequestState
from sagellm.core.protocols.kv_tiers import KVTiers, TierLookup
from sagellm.core.types import RequestStatus
from sagellm.engines.request_table import WAITING, RequestTable
from sagellm.kvmgr.manager import KVCacheManager

MAX_LOADS = 6
"""Loads for a request while it waits, and questions to a shared store. It may be that each time others have
what it brought evicted."""
MAX_ASKED = 8
"""Requests for which tiers are asked in one step: a burst must not delay the running requests."""


class KVWaits:
    """Asks tiers for each waiting request, and holds it back while its KV comes.

    Tiers are asked when the request begins to wait, so that its KV comes while it waits; when something has
    come, since a further one may have more; and when it is admitted, since the device may have evicted what
    it had. Other requests are planned meanwhile. For a request without room on the device the tiers are asked
    again when another's KV has come; if none is coming, it computes its prompt. `num_waits`: how often
    requests were held back so far.
    """

    def __init__(self, table: RequestTable, kv: KVCacheManager, tiers: KVTiers) -> None:
        self._table, self._kv, self._tiers = table, kv, tiers
        self._to_ask: deque[RequestState] = deque()
        self._no_room: list[RequestState] = []
        self._coming: dict[str, RequestState] = {}
        self._num_loads: Counter[str] = Counter()
        self.num_waits = 0

    def add(self, state: RequestState) -> None:
        """The request waits, for the first time or again."""
        del self._num_loads[state.request_id]
        self._to_ask.append(state)

    def forget(self, state: RequestState) -> None:
        """The request has ended."""
        del self._num_loads[state.request_id]
        self._coming.pop(state.request_id, None)
        self._tiers.cancel(state.request_id)

    @property
    def is_settled(self) -> bool:
        """Whether `advance` has nothing to do before a move has ended.

        A move that ended while a preempted request was being saved is seen when that request is asked for.
        """
        return not self._to_ask and (bool(self._coming) or not self._no_room)

    def advance(self, *, start: bool, again: bool = True) -> None:
        """Release requests whose KV has come, and ask for others; see `KVTiers.request` for `start`.

        Without `again`, tiers are asked for nothing: the blocks that are free now are for others.
        """
        came = [self._coming.pop(name) for name in self._tiers.poll() if name in self._coming]
        if came or not self._coming:  # a load that was cancelled is not named
            self._to_ask.extendleft(reversed(self._no_room))
            self._no_room.clear()
        if again:
            self._to_ask.extendleft(reversed(came))
        else:
            for state in came:
                self._table.kv_arrived(state)
            return
        if start:
            self._tiers.start_loads()
        for _ in range(min(MAX_ASKED, len(self._to_ask))):
            self._ask(self._to_ask.popleft(), start=start)

    def hold_back(self, binding: Binding, *, start: bool) -> bool:
        """Ask tiers for the requests that a draft admits; returns whether to plan again.

        Those whose KV comes wait for it. A load may have evicted what the draft counts on.
        """
        num_cached, waits = self._kv.index.num_cached, False
        for chunk in list(binding.draft.admitted()):
            self._ask(chunk.state, start=start, admits=True)
            waits = waits or chunk.state.status is RequestStatus.WAITING_FOR_KV
        return waits or self._kv.index.num_cached < num_cached

    def _ask(self, state: RequestState, *, start: bool, admits: bool = False) -> None:
        if state.status not in WAITING:  # it runs, or has ended
            return
        outcome = TierLookup.MISS
        if self._num_loads[state.request_id] < MAX_LOADS:
            outcome = self._kv.bring_up(state, start=start, admits=admits)
        comes = outcome is TierLookup.HIT_PENDING
        if comes:
            self._num_loads[state.request_id] += 1
            self._coming[state.request_id] = state
        elif outcome is TierLookup.RETRY and self._coming:
            self._no_room.append(state)
            comes = True
        if comes and state.status is RequestStatus.WAITING:
            self._table.wait_for_kv(state)
            self.num_waits += 1
        elif not comes and state.status is RequestStatus.WAITING_FOR_KV:
            self._table.kv_arrived(state)

    @property
    def is_moving(self) -> bool:
        """Whether blocks are on their way down or up."""
        return not self._tiers.is_idle

    def give_way(self) -> bool:
        """Stop all moves, which frees their device blocks; False without any."""
        if not self._tiers.give_way():
            return False
        self.advance(start=True, again=False)
        return True

    def settle(self) -> None:
        """Wait for all moves, and release the requests that waited for them."""
        self._tiers.start_loads()
        while not self._tiers.is_idle:
            self._tiers.wait(1.0)
            self.advance(start=True)
