"""Shares the rows of the batch between clients.

Shares are max-min fair (Bertsekas and Gallager 1992, section 6.5.2): of two clients that both want more rows,
the one with fewer is next. This is round robin: the k-th request of a client is in its round k, and earlier
rounds go first. A client is a path (`Request.client`), and siblings in the tree of paths share what their
parent has. So a client that invents end users, or sends many calls, competes only with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sagellm.core.plan import RequestState
from sagellm.core.types import RequestStatus

BULK_SHARE = 8
"""The last element of a path is one call (an HTTP request). Calls of one client are served in order of
arrival. A bulk call, which wants more than 1 / BULK_SHARE of the rows, has rounds of its own."""

MAX_ENDED = 256
"""Finished requests that may be kept, beyond twice those that wait or run, before they are removed."""


@dataclass(slots=True, eq=False)
class _Node:
    """A client, an end user of a client, or one call, within one priority.

    `num_present` counts its requests that wait or run, `num_clients` its children that are not calls. A call
    of more than `bulk_size` requests is a bulk call.
    """

    parent: _Node | None = None
    name: str = ""
    is_call: bool = False
    bulk_size: int = 0
    children: dict[str, _Node] = field(default_factory=dict)
    num_clients: int = 0
    num_present: int = 0

    @property
    def is_contested(self) -> bool:
        """Whether some of its requests are in a later round because others are there."""
        if self.is_call:
            return self.num_present > self.bulk_size
        return self.parent is not None and self.parent.num_clients > 1

    def round(self, num_before: int) -> int:
        """The round of the request that follows `num_before` others of this node."""
        return 0 if self.is_call and not self.is_contested else num_before


class ClientShares:
    """Knows the clients of all waiting and running requests, and orders requests by round.

    Call `update` first, with every request that is asked about later. Requests of different priority (by the
    function `priority`) do not compete here: the caller orders them.
    """

    def __init__(self, priority: Callable[[RequestState], int]) -> None:
        self._priority = priority
        self._roots: dict[int, _Node] = {}
        self._chains: dict[RequestState, tuple[_Node, ...]] = {}
        self._running: dict[RequestState, None] = {}
        self._batch: list[RequestState] = []
        self._num_contests = 0
        self._forget_at = MAX_ENDED
        self._rounds: dict[RequestState, tuple[int, ...]] = {}

    @property
    def is_contested(self) -> bool:
        """Whether rounds may differ from order of arrival. They do for two clients of one priority, and for a
        bulk call."""
        return self._num_contests > 0

    def is_current(self, running: list[RequestState]) -> bool:
        """Whether these are the running requests of the last `update`, in the same order."""
        return running == self._batch

    def update(self, running: list[RequestState], arrived: Iterable[RequestState], max_num_seqs: int) -> bool:
        """Note the running requests and those that `arrived` since the last call. Returns whether the running
        requests or their order have changed."""
        bulk_size = max(1, max_num_seqs // BULK_SHARE)
        for state in arrived:
            self._add(state, bulk_size)
        has_changed = not self.is_current(running)
        if has_changed:
            members = dict.fromkeys(running)
            for state in members:
                self._add(state, bulk_size)
            self._running, self._batch = members, running.copy()
        if has_changed or len(self._chains) > self._forget_at:
            for state in [s for s in self._chains if s.status is RequestStatus.FINISHED]:
                self._remove(state)
            self._forget_at = 2 * len(self._chains) + MAX_ENDED
        return has_changed

    def arrange(
        self, running: list[RequestState], waiting: list[RequestState], level: Callable[[RequestState], int]
    ) -> list[RequestState]:
        """Sort `running` in place; returns `waiting` sorted. Higher levels come first, then earlier rounds. A
        client's own requests stay in the order given, the running ones first. `level` may call
        `is_in_later_round`. Costs one sort per level of the tree."""
        ordered = running + waiting
        rounds: dict[RequestState, tuple[int, ...]] = dict.fromkeys(ordered, ())
        for depth in reversed(range(max((len(self._chains[state]) for state in ordered), default=0))):
            num_before: dict[_Node, int] = {}
            for state in ordered:
                chain = self._chains[state]
                if depth >= len(chain):
                    continue
                node = chain[depth]
                before = num_before.get(node, 0)
                num_before[node] = before + 1
                rounds[state] = (node.round(before), *rounds[state])
            ordered.sort(key=lambda state: rounds[state][0] if rounds[state] else 0)
        self._rounds = rounds
        ordered.sort(key=level, reverse=True)
        running[:] = [state for state in ordered if state in self._running]
        self._batch = running.copy()
        return [state for state in ordered if state not in self._running]

    def is_in_later_round(self, state: RequestState) -> bool:
        """Whether it is in a later round than its client's first, as last arranged."""
        chain, rounds = self._chains[state], self._rounds.get(state, ())
        return any(number and node.is_contested for node, number in zip(chain, rounds, strict=False))

    def is_in_later_round_than(self, state: RequestState, other: RequestState) -> bool:
        """Whether `state` is in a later round than `other`, as last arranged. Both have the same priority."""
        rounds, other_rounds = self._rounds.get(state, ()), self._rounds.get(other, ())
        for depth, (node, other_node) in enumerate(
            zip(self._chains[state], self._chains[other], strict=False)
        ):
            if node is not other_node:
                return bool(rounds and other_rounds) and rounds[depth] > other_rounds[depth]
        return False

    def check(self) -> None:
        """Raise `AssertionError` where a count does not match the requests."""
        nodes = {node for chain in self._chains.values() for node in chain}
        for node in nodes:
            assert node.num_present == sum(node in chain for chain in self._chains.values()), node.name
        parents = {node.parent for node in nodes if node.is_contested and not node.is_call}
        assert self._num_contests == len(parents) + sum(node.is_contested for node in nodes if node.is_call)

    # -- the tree

    def _add(self, state: RequestState, bulk_size: int) -> None:
        if state in self._chains:
            return
        request = state.request
        *clients, call = request.client or (request.namespace.tenant, request.group or request.request_id)
        node = self._roots.setdefault(self._priority(state), _Node())
        chain = []
        for name in clients:
            if name not in node.children:
                node.num_clients += 1
                self._num_contests += node.num_clients == 2
                node.children[name] = _Node(node, name)
            chain.append(node := node.children[name])
        call = f"\0{call}"  # an end user may have the same name as a call
        chain.append(node.children.setdefault(call, _Node(node, call, is_call=True, bulk_size=bulk_size)))
        for node in chain:
            node.num_present += 1
        self._num_contests += node.num_present == node.bulk_size + 1
        self._chains[state] = tuple(chain)

    def _remove(self, state: RequestState) -> None:
        self._rounds.pop(state, None)
        chain = self._chains.pop(state)
        self._num_contests -= chain[-1].num_present == chain[-1].bulk_size + 1
        for node in reversed(chain):
            node.num_present -= 1
            if node.num_present or node.parent is None:
                continue
            del node.parent.children[node.name]
            if not node.is_call:
                self._num_contests -= node.parent.num_clients == 2
                node.parent.num_clients -= 1
        root = chain[0].parent
        if root is not None and not root.children:
            del self._roots[self._priority(state)]
