"""`KVWaits`: requests whose KV is on its way up from a lower tier."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

from sagellm.core.binding import Binding
from sagellm.core.plan import RequestState
from sagellm.core.protocols.kv_tiers import KVTiers, TierLookup
from sagellm.core.types import RequestStatus
from sagellm.engines.request_table import WAITING, RequestTable
from sagellm.kvmgr.manager import HotPrefixes, KVCacheManager

MAX_LOADS = 6
"""Loads for a request while it waits, copies that should have made room for one, and questions to a shared
store. It may be that each time others have what it brought evicted."""
MAX_ASKED = 8
"""Requests for which tiers are asked in one step: a burst must not delay the running requests."""
MOST_LOADED_BLOCKS = 2048
"""Blocks whose loads begin in one step, for the same reason; a larger load begins alone. Requests that would
be admitted in this step are put off then, if tiers have KV for them."""


class KVWaits:
    """Asks tiers for each waiting request, and holds it back while its KV comes.

    Tiers are asked when the request begins to wait, so that its KV comes while it waits; when something has
    come, since a further one may have more; and when it is admitted, since the device may have evicted what
    it had. Other requests are planned meanwhile. For a request without room on the device the tiers are asked
    again when another's KV has come; if none is coming, it computes its prompt. `num_waits`: how often
    requests were held back so far.

    A request that is alone with its prompt may run while its last blocks, the tail, are loaded
    (`split_load.py`): it computes those before them. It must be admitted in the step after the one that found
    that to be faster; otherwise it waits for all of its KV, which costs no computing. `num_tails`: how many
    tails were loaded so far.
    """

    def __init__(
        self, table: RequestTable, kv: KVCacheManager, tiers: KVTiers, now: Callable[[], float]
    ) -> None:
        assert kv.loads is not None
        self._table, self._kv, self._tiers, self._loads = table, kv, tiers, kv.loads
        assert kv.writes is not None
        self._writes = kv.writes
        self._hot = HotPrefixes(kv.loads, tiers, kv.index, kv.pool, now) if tiers.load_hot else None
        self._to_ask: deque[RequestState] = deque()
        self._no_room: list[RequestState] = []
        self._to_split: list[RequestState] = []
        self._coming: dict[str, RequestState] = {}
        self._tails: dict[str, RequestState] = {}
        self._num_loads: Counter[str] = Counter()
        self._copies_seen: dict[str, tuple[int, int]] = {}
        """Of requests that wait for copies: how often these had ended, and how many blocks were free."""
        self._most_blocks = math.inf
        """Of all arrivals together: with as many, no more loads begin in this step."""
        self.num_waits = self.num_tails = 0

    def add(self, state: RequestState) -> None:
        """The request waits, for the first time or again."""
        del self._num_loads[state.request_id]
        self._copies_seen.pop(state.request_id, None)
        self._drop_tail(state)
        self._to_ask.append(state)

    def forget(self, state: RequestState) -> None:
        """The request has ended."""
        del self._num_loads[state.request_id]
        self._copies_seen.pop(state.request_id, None)
        self._coming.pop(state.request_id, None)
        self._tails.pop(state.request_id, None)
        self._tiers.cancel(state.request_id)

    @property
    def is_settled(self) -> bool:
        """Whether `advance` has nothing to do before a move has ended.

        A move that ended while a preempted request was being saved is seen when that request is asked for.
        """
        to_ask = self._to_ask or self._to_split
        is_behind = to_ask or self._writes.is_write_back  # which keeps to its watermark
        return not is_behind and (bool(self._coming) or not self._no_room)

    def advance(self, *, start: bool, again: bool = True) -> None:
        """Release requests whose KV has come, and ask for others; see `KVTiers.request` for `start`.

        Without `again`, tiers are asked for nothing: the blocks that are free now are for others.
        """
        came = [self._coming.pop(name) for name in self._tiers.poll() if name in self._coming]
        for state in list(self._tails.values()):
            self._take_tail(state)
        if came or not self._coming:  # a load that was cancelled is not named
            self._to_ask.extendleft(reversed(self._no_room))
            self._no_room.clear()
        if again:
            self._to_ask.extendleft(reversed(came))
        else:
            for state in came:
                self._table.kv_arrived(state)
            return
        self._writes.advance()
        if start:
            self._tiers.start_loads()
        self._most_blocks = self._tiers.arrivals.num_blocks + MOST_LOADED_BLOCKS
        late, self._to_split = self._to_split, []
        for state in late:
            self._ask(state, start=start, splits=False)
        for _ in range(min(MAX_ASKED, len(self._to_ask))):
            if not self._may_begin:
                break
            self._ask(self._to_ask.popleft(), start=start)

    @property
    def _may_begin(self) -> bool:
        """Whether one more load may begin in this step."""
        return self._tiers.arrivals.num_blocks < self._most_blocks

    def hold_back(self, binding: Binding, *, start: bool) -> bool:
        """Ask tiers for the requests that a draft admits; returns whether to plan again.

        Those whose KV comes wait for it. A load may have evicted what the draft counts on. A tail is loaded
        with `start` only: without it, a step is in flight, and the next step is planned when that has ended.
        """
        num_cached, changes = self._kv.index.num_cached, False
        for chunk in list(binding.draft.admitted()):
            state = chunk.state
            splits = self._ask(state, start=start, admits=True) is TierLookup.SPLIT
            changes = changes or splits or state.status is RequestStatus.WAITING_FOR_KV
        return changes or self._kv.index.num_cached < num_cached

    def _ask(
        self, state: RequestState, *, start: bool, admits: bool = False, splits: bool = True
    ) -> TierLookup:
        """Ask tiers for one request. SPLIT: its tail is loaded, or may be in the next step."""
        if state.status not in WAITING or state.request_id in self._tails:  # it runs, will, or has ended
            return TierLookup.MISS
        if state.request_id in self._coming:  # it was asked for when it was to be admitted
            return TierLookup.HIT_PENDING
        outcome, may_begin = TierLookup.MISS, self._may_begin
        if self._num_loads[state.request_id] < MAX_LOADS:
            splits = splits and self._is_alone(state)
            options = {"admits": admits, "splits": splits, "may_begin": may_begin}
            outcome = self._loads.bring_up(state, start=start, **options)
            self._charge_copies(state)
        if outcome is TierLookup.SPLIT and not self._split(state, start=start, admits=admits):
            return self._ask(state, start=start, admits=admits, splits=False)
        comes = outcome is TierLookup.HIT_PENDING
        if comes:
            self._num_loads[state.request_id] += 1
            self._coming[state.request_id] = state
        elif outcome is TierLookup.RETRY and (self._coming or not may_begin or self._awaits_blocks):
            (self._no_room if may_begin else self._to_ask).append(state)
            comes = True
        if comes and state.status is RequestStatus.WAITING:
            self._table.wait_for_kv(state)
            self.num_waits += 1
        elif not comes and state.status is RequestStatus.WAITING_FOR_KV:
            self._table.kv_arrived(state)
        return outcome

    def _charge_copies(self, state: RequestState) -> None:
        """Count as a load where copies have ended and others have their blocks."""
        if self._loads.awaits_copies:
            now = self._writes.num_given_back, self._writes.num_free
            before = self._copies_seen.get(state.request_id, now)
            self._num_loads[state.request_id] += now[0] > before[0] and now[1] <= before[1]
            self._copies_seen[state.request_id] = now

    # -- what is loaded for no request

    @property
    def wake_s(self) -> float:
        """Seconds until an idle engine has something to load; infinite if it never has."""
        return math.inf if self._hot is None else self._hot.wake_s

    def load_hot(self, *, may_begin: bool) -> None:
        """See `HotPrefixes.advance`. `may_begin`: no step is in flight."""
        if self._hot is not None:
            self._hot.advance(is_idle=may_begin and not self._table.states)
            if may_begin:
                self._tiers.start_loads()

    @property
    def _awaits_blocks(self) -> bool:
        """Whether such a load gives back its blocks, or evicted ones are being saved."""
        return self._loads.awaits_copies or (self._hot is not None and self._hot.holds_blocks)

    # -- tails

    def loads_tail_of(self, state: RequestState) -> bool:
        return state.request_id in self._tails

    def _is_alone(self, state: RequestState) -> bool:
        """Whether no other prompt could be computed while the KV of this one comes."""
        others = len(self._table.waiting) - self._table.num_for_kv - (state.status is RequestStatus.WAITING)
        return not others and not self._table.prefilling

    def _split(self, state: RequestState, *, start: bool, admits: bool) -> bool:
        """Load the tail of a request that is admitted now; note any other."""
        if not admits:
            self._to_split.append(state)
        elif not start and state in self._to_split:  # the next step is planned with none in flight
            self._to_split.remove(state)
        elif start:
            first = self._loads.bring_up_tail(state)
            if first is None:
                return False
            self._table.limit(state, first * self._kv.block_size)
            self._tails[state.request_id] = state
            self._num_loads[state.request_id] += 1
            self.num_tails += 1
        return True

    def _take_tail(self, state: RequestState) -> None:
        """Give a request its tail once it has computed all before it.

        No step in flight contains it then.
        """
        stop = state.compute_until
        if stop is None or state.status is not RequestStatus.RUNNING:
            self._drop_tail(state)
            self._to_split.append(state)  # if it waits, for all of its KV
        elif state.num_computed == stop:
            tail = self._tiers.take_tail(state.request_id)
            if tail is None:
                return
            size = self._kv.block_size
            if tail.arrival is not None:
                self._kv.append_filled(state, stop + tail.num_blocks * size, tail.arrival)
            self._table.receive(state, tail.num_blocks * size)
            del self._tails[state.request_id]

    def _drop_tail(self, state: RequestState) -> None:
        if self._tails.pop(state.request_id, None) is not None:
            self._table.limit(state, None)
            self._tiers.cancel(state.request_id)

    # -- all moves

    @property
    def holds_tails(self) -> bool:
        """Whether device blocks are kept for requests that compute what is before them."""
        return bool(self._tails)

    @property
    def is_moving(self) -> bool:
        """Whether blocks are on their way down or up."""
        return not self._tiers.is_idle

    def give_way(self) -> bool:
        """Stop all moves, which frees their device blocks; False without any."""
        if not self._tiers.give_way():
            return False
        for state in list(self._tails.values()):
            self._drop_tail(state)
        self.advance(start=True, again=False)
        return True

    def settle(self) -> None:
        """Wait for all moves, and release the requests that waited for them."""
        self._tiers.start_loads()
        while not self._tiers.is_idle:
            self._tiers.wait(1.0)
            self.advance(start=True)
