"""Who has to leave when memory is short: policies that choose one of several running requests.

`last` is what vLLM does (Kwon et al., 2023). The other three trade its fairness for something: `newest` loses
the least waiting, `most_blocks` makes the fewest leave, `cheapest` costs the least to make good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sagellm.core.plan import RequestState
from sagellm.core.protocols.scheduler_ir import KVQuotes, ResumeCost

VictimPolicy = Callable[[Sequence[RequestState], KVQuotes], RequestState]
"""Chooses one of the candidates, of which there is one at least; they stand in order of who comes first."""


def return_s(price: ResumeCost) -> float:
    """Seconds, by the better way of the two."""
    return min(price.recompute_s, price.swap_s) if price.fits else price.recompute_s


def _last(candidates: Sequence[RequestState], kv: KVQuotes) -> RequestState:
    return candidates[-1]


def _newest(candidates: Sequence[RequestState], kv: KVQuotes) -> RequestState:
    return max(reversed(candidates), key=lambda one: one.request.arrival_s)


def _most_blocks(candidates: Sequence[RequestState], kv: KVQuotes) -> RequestState:
    return max(reversed(candidates), key=kv.blocks_freed_by_preempting)


def _cheapest(candidates: Sequence[RequestState], kv: KVQuotes) -> RequestState:
    """The least time to come back for each block that it gives; the least to compute again, where no times
    are known."""

    def price(one: RequestState) -> tuple[float, int]:
        gain = kv.blocks_freed_by_preempting(one)
        return (return_s(kv.resume_cost(one)) / gain if gain else float("inf"), one.num_computed)

    return min(reversed(candidates), key=price)


VICTIMS: Mapping[str, VictimPolicy] = {
    "last": _last,
    "newest": _newest,
    "most_blocks": _most_blocks,
    "cheapest": _cheapest,
}


def choose_victim(
    name: str, rivals: Sequence[RequestState], winner: RequestState, kv: KVQuotes
) -> RequestState | None:
    """One of those behind the winner and, among these, of the lowest priority; None where nobody is there."""
    behind = rivals[rivals.index(winner) + 1 :] if name != "last" else rivals[-1:]
    if not behind or behind[-1] is winner:
        return None
    if name != "last":
        lowest = min(one.request.priority for one in behind)
        behind = [one for one in behind if one.request.priority == lowest]
    return VICTIMS[name](behind, kv)
