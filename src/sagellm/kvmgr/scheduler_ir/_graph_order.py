"""Which operation of a graph comes after which, by its dependencies alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sagellm.core.ir import Operation


class GraphOrder:
    """The reachability of a graph without cycles, as one bit set per operation."""

    def __init__(self, ops: Mapping[int, Operation]) -> None:
        self._bits = {op_id: 1 << i for i, op_id in enumerate(ops)}
        self._before: dict[int, int] = {}
        for op in _in_order(ops):
            before = 0
            for one in op.after:
                before |= self._before[one] | self._bits[one]
            self._before[op.op_id] = before

    def comes_after(self, later: int, earlier: int) -> bool:
        """Whether `later` sees the effects of `earlier`."""
        return bool(self._before[later] & self._bits[earlier])

    def are_ordered(self, one: int, other: int) -> bool:
        return self.comes_after(one, other) or self.comes_after(other, one)


def find_cycle(ops: Mapping[int, Operation]) -> Sequence[Operation]:
    """Operations each of which comes after the next, and the last after the first; empty where there are
    none."""
    done = {op.op_id for op in _in_order(ops)}
    rest = [op_id for op_id in ops if op_id not in done]
    if not rest:
        return ()
    path: dict[int, None] = {}
    here = rest[0]
    while here not in path:  # each of the rest waits for another of the rest
        path[here] = None
        here = next(one for one in ops[here].after if one not in done)
    steps = list(path)
    return [ops[one] for one in steps[steps.index(here) :]]


def _in_order(ops: Mapping[int, Operation]) -> list[Operation]:
    """Those that can be ordered, each behind all that it comes after."""
    missing = {op_id: len(set(op.after)) for op_id, op in ops.items()}
    followers: dict[int, list[int]] = {op_id: [] for op_id in ops}
    for op in ops.values():
        for one in set(op.after):
            followers[one].append(op.op_id)
    ready = [op_id for op_id, count in missing.items() if not count]
    for op_id in ready:  # it grows while it is walked
        for one in followers[op_id]:
            missing[one] -= 1
            if not missing[one]:
                ready.append(one)
    return [ops[op_id] for op_id in ready]
