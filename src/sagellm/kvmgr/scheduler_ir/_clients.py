"""Which clients the waiting and running requests belong to, and whose turn it is.

Rows of the batch are shared max-min (Bertsekas and Gallager 1992, section 6.5.2): of two clients that both
want more rows, the one with fewer is next. A client is a path (`Request.client`), and siblings in the tree of
paths share what their parent has. So a client that invents end users, or sends many calls, competes with
itself alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sagellm.core.plan import RequestState
from sagellm.core.types import RequestStatus

BULK_SHARE = 8
"""The last element of a path is one call (an HTTP request). Calls of one client are served in order of
arrival; those that want more than an eighth of the rows (bulk calls) take turns and yield to the others."""

MAX_ENDED = 256
"""Requests that have ended and are remembered, beyond as many as wait or run, before they are looked for."""


@dataclass(slots=True, eq=False)
class _Node:
    """A client, an end user of it or one call, among the requests of one priority.

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
        """Whether some of its requests come in a later turn because others are there."""
        if self.is_call:
            return self.num_present > self.bulk_size
        return self.parent is not None and self.parent.num_clients > 1

    def turn(self, num_before: int) -> int:
        """In which turn a request comes that has so many of the same node before it."""
        return 0 if self.is_call and not self.is_contested else num_before


class ClientShares:
    """Knows the clients of all requests that wait or run, and orders these so that clients take turns.

    `see` first, with every request that is asked about later. Requests of different priority (as `priority`
    says) do not compete here: their order is the caller's business.
    """

    def __init__(self, priority: Callable[[RequestState], int]) -> None:
        self._priority = priority
        self._roots: dict[int, _Node] = {}
        self._chains: dict[RequestState, tuple[_Node, ...]] = {}
        self._running: dict[RequestState, None] = {}
        self._batch: list[RequestState] = []
        self._num_contests = 0
        self._forget_at = MAX_ENDED
        self._turns: dict[RequestState, tuple[int, ...]] = {}

    @property
    def is_contested(self) -> bool:
        """Whether turns may differ from the order of arrival: two clients of one priority are there, or a
        bulk call."""
        return self._num_contests > 0

    def knows(self, running: list[RequestState]) -> bool:
        """Whether these are the running requests of the last `see`, in the same order."""
        return running == self._batch

    def see(self, running: list[RequestState], arrived: Iterable[RequestState], max_num_seqs: int) -> bool:
        """Note the requests that run, and those that `arrived` in the queue since the last call.

        Returns whether the running requests or their order have changed.
        """
        bulk_size = max(1, max_num_seqs // BULK_SHARE)
        for state in arrived:
            self._add(state, bulk_size)
        has_changed = not self.knows(running)
        if has_changed:
            members = dict.fromkeys(running)
            for state in members:
                self._add(state, bulk_size)
            self._running, self._batch = members, running.copy()
        if has_changed or len(self._chains) > self._forget_at:
            for state in [one for one in self._chains if one.status is RequestStatus.FINISHED]:
                self._remove(state)
            self._forget_at = 2 * len(self._chains) + MAX_ENDED
        return has_changed

    def arrange(
        self,
        running: list[RequestState],
        waiting: list[RequestState],
        level: Callable[[RequestState], int],
    ) -> list[RequestState]:
        """Put `running` in order, in place; returns the `waiting` in order.

        Higher levels come first; within one, clients take turns. A client's own requests stay in the order
        given, the running ones first. `level` may ask `is_late`. One sort for each level of the tree.
        """
        ordered = running + waiting
        found: dict[RequestState, tuple[int, ...]] = dict.fromkeys(ordered, ())
        for depth in reversed(range(max((len(self._chains[one]) for one in ordered), default=0))):
            num_before: dict[_Node, int] = {}
            for state in ordered:
                chain = self._chains[state]
                if depth >= len(chain):
                    continue
                node = chain[depth]
                before = num_before.get(node, 0)
                num_before[node] = before + 1
                found[state] = (node.turn(before), *found[state])
            ordered.sort(key=lambda state: found[state][0] if found[state] else 0)
        self._turns = found
        ordered.sort(key=level, reverse=True)
        running[:] = [state for state in ordered if state in self._running]
        self._batch = running.copy()
        return [state for state in ordered if state not in self._running]

    def is_late(self, state: RequestState) -> bool:
        """Whether, as last arranged, others are served between it and the first request of its client."""
        chain, turns = self._chains[state], self._turns.get(state, ())
        return any(turn and node.is_contested for node, turn in zip(chain, turns, strict=False))

    def gives_way(self, state: RequestState, head: RequestState) -> bool:
        """Whether, as last arranged, `state` comes in a later turn than `head`, of the same priority."""
        mine, others = self._turns.get(state, ()), self._turns.get(head, ())
        for place, (node, other) in enumerate(zip(self._chains[state], self._chains[head], strict=False)):
            if node is not other:
                return bool(mine and others) and mine[place] > others[place]
        return False

    def check(self) -> None:
        """Raise `AssertionError` where a count is not what the requests say."""
        nodes = {node for chain in self._chains.values() for node in chain}
        for node in nodes:
            assert node.num_present == sum(node in chain for chain in self._chains.values()), node.name
        parents = {node.parent for node in nodes if node.is_contested and not node.is_call}
        assert self._num_contests == len(parents) + sum(one.is_contested for one in nodes if one.is_call)

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
        call = f"\0{call}"  # an end user may have the same name
        chain.append(node.children.setdefault(call, _Node(node, call, is_call=True, bulk_size=bulk_size)))
        for node in chain:
            node.num_present += 1
        self._num_contests += node.num_present == node.bulk_size + 1
        self._chains[state] = tuple(chain)

    def _remove(self, state: RequestState) -> None:
        self._turns.pop(state, None)
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
