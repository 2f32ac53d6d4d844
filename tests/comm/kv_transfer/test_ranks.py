"""Ranks that send their heads of many prompts to one instance do not wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork, InProcessTransport
from sagellm.core.clock import ManualClock
from sagellm.core.protocols.kv_transfer import TransferStatus
from tests.comm.kv_transfer.world import LAYOUT, SIZE, Inline, Instance, introduce, prompt, until

PROMPTS = [prompt(seed, 4) for seed in range(10)]
DONE = TransferStatus.DONE


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def ranks_and_whole(
    stack: ExitStack, num_ranks: int, *, of_rank: dict[str, Any] | None = None, num_blocks: int = 64,
    clock: ManualClock | None = None, **options: Any,
) -> tuple[list[Instance], Instance]:  # fmt: skip
    network, each = InProcessNetwork(threaded=clock is None), LAYOUT.total_heads // num_ranks
    worker = None if clock is None else Inline()
    given = {"chunk_bytes": 1024} | options
    made = []
    for number in range(num_ranks):
        name, chosen = f"rank {number}", ChannelOptions(**(given | (of_rank or {})))
        heads = LAYOUT.of_heads(number * each, (number + 1) * each)
        made.append(
            Instance(
                name, InProcessTransport(name, network), layout=heads, options=chosen, clock=clock,
                worker=worker,
            )
        )  # fmt: skip
    whole = Instance(
        "whole", InProcessTransport("whole", network), options=ChannelOptions(**given), num_blocks=num_blocks,
        clock=clock, worker=worker,
    )  # fmt: skip
    for instance in (*made, whole):
        stack.callback(instance.channel.close)
    introduce(*made, whole)
    return made, whole


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("max_credits", "num_blocks"), [(2, 64), (64, 8)])
def test_all_prompts_of_all_ranks_arrive(
    num_ranks: int, max_credits: int, num_blocks: int, stack: ExitStack
) -> None:
    """The first ranks offer all prompts before the last offers one; credits or blocks are for few of them."""
    ranks, whole = ranks_and_whole(
        stack, num_ranks, credits=2, max_credits=max_credits, num_blocks=num_blocks
    )
    tickets = []
    for number, rank in enumerate(ranks):
        for seed, tokens in reversed(list(enumerate(PROMPTS))) if number % 2 else enumerate(PROMPTS):
            rank.compute(tokens)
            tickets.append((rank, rank.send(tokens, "whole", f"r{seed}")))
        if rank is not ranks[-1]:
            until(lambda: whole.channel._receiver._offers, whole, rank)
    until(lambda: all(ticket in rank.reports for rank, ticket in tickets), whole, *ranks)
    assert [rank.reports[ticket].status for rank, ticket in tickets] == [DONE] * len(tickets)
    assert whole.num_tokens(PROMPTS[0]) == 4 * SIZE or num_blocks == 8
    whole.check(*PROMPTS)


def test_more_offers_than_a_queue_holds(stack: ExitStack) -> None:
    """`max_offers` is of a link: a rank does not fill the queue of another."""
    ranks, whole = ranks_and_whole(stack, 2, credits=2, max_credits=2, max_offers=10)
    tickets = []
    for rank in ranks:
        for seed, tokens in enumerate(PROMPTS):
            rank.compute(tokens)
            tickets.append((rank, rank.send(tokens, "whole", f"r{seed}")))
        until(lambda: len(whole.channel._receiver._offers) >= 9, rank)
    until(lambda: all(ticket in rank.reports for rank, ticket in tickets), whole, *ranks)
    assert [rank.reports[ticket].status for rank, ticket in tickets] == [DONE] * len(tickets)


def test_heads_that_find_no_room_are_refused_together(stack: ExitStack) -> None:
    """A rank whose other half was sent back does not hold blocks for nothing."""
    ranks, whole = ranks_and_whole(
        stack, 2, num_blocks=4, offer_wait_s=0.2, of_rank={"num_retries": 0}, credits=8, max_credits=8
    )
    first, second = PROMPTS[:2]
    for rank in ranks:
        rank.compute(first)
        rank.compute(second)
    ticket = ranks[0].send(first, "whole", "a")  # has all credits, and its other heads do not come
    until(lambda: whole.arrivals.num_blocks, whole, *ranks)
    others = [(rank, rank.send(second, "whole", "b")) for rank in ranks]
    until(lambda: all(other in rank.reports for rank, other in others), whole, *ranks)
    assert {rank.reports[other].status for rank, other in others} == {TransferStatus.RETRY}
    assert ticket not in ranks[0].reports
    assert len(whole.channel._receiver._open) == 1


def test_a_rank_that_computes_keeps_the_others_waiting(stack: ExitStack) -> None:
    """Its heads come layer by layer, slower than links are given up; the other rank is told to wait."""
    clock = ManualClock()
    ranks, whole = ranks_and_whole(stack, 2, clock=clock, stall_s=0.2, offer_wait_s=0.1)
    [tokens, *_] = PROMPTS
    tickets = []
    for rank, by_layer in zip(ranks, (False, True), strict=True):
        rank.compute(tokens)
        tickets.append((rank, rank.send(tokens, "whole", by_layer=by_layer)))
    for layer in range(LAYOUT.num_layers):
        run(1.0, clock, whole, *ranks)
        ranks[1].channel.computed(tickets[1][1], layer + 1)
    run(0.1, clock, whole, *ranks)
    assert [rank.reports[ticket].status for rank, ticket in tickets] == [DONE, DONE]
    assert [each.status for each in whole.received] == [DONE, DONE]
    whole.check(tokens)


def test_a_slow_prefill_is_no_stall(stack: ExitStack) -> None:
    """By layer between equal layouts; the sender is alive and has not computed them yet."""
    clock = ManualClock()
    [source], target = ranks_and_whole(stack, 1, clock=clock, stall_s=0.2, offer_wait_s=0.1, num_retries=0)
    [tokens, *_] = PROMPTS
    source.compute(tokens)
    ticket = source.send(tokens, "whole", by_layer=True)
    for layer in range(LAYOUT.num_layers):
        run(1.0, clock, source, target)
        source.channel.computed(ticket, layer + 1)
    run(0.1, clock, source, target)
    assert source.reports[ticket].status is DONE
    assert [each.status for each in target.received] == [DONE]


def test_a_sender_that_does_not_poll_has_stalled(stack: ExitStack) -> None:
    """Its blocks are free again at the target, though its link lives."""
    clock = ManualClock()
    [source], target = ranks_and_whole(stack, 1, clock=clock, stall_s=0.2, offer_wait_s=0.1)
    [tokens, *_] = PROMPTS
    source.compute(tokens)
    source.send(tokens, "whole", by_layer=True)
    run(0.1, clock, source, target)
    assert target.arrivals.num_blocks
    run(0.5, clock, target)
    assert not target.arrivals.num_blocks
    assert [each.status for each in target.received] == [TransferStatus.RETRY]


def test_an_offer_may_wait_longer_than_its_sender_waits_for_an_answer(stack: ExitStack) -> None:
    """The target says that it is alive, while there is no room."""
    clock, impatient = ManualClock(), {"stall_s": 0.2, "offer_wait_s": 0.1, "num_retries": 0}
    ranks, whole = ranks_and_whole(stack, 2, clock=clock, num_blocks=4, of_rank=impatient)
    first, second = PROMPTS[:2]
    for rank in ranks:
        rank.compute(first)
        rank.compute(second)
    begun = ranks[0].send(first, "whole", "a", by_layer=True)
    run(0.1, clock, whole, *ranks)
    assert whole.arrivals.num_blocks
    others = [(rank, rank.send(second, "whole", "b")) for rank in ranks]
    run(2.0, clock, whole, *ranks)
    ranks[0].channel.cancel(begun)
    run(0.2, clock, whole, *ranks)
    assert [rank.reports[other].status for rank, other in others] == [DONE, DONE]


def run(seconds: float, clock: ManualClock, *instances: Instance) -> None:
    """Deliver and poll while that time passes."""
    network = instances[0].channel._transport._network  # type: ignore[attr-defined]
    for _ in range(round(seconds / 0.01)):
        while network.run_one():
            pass
        for each in instances:
            each.poll()
        clock.advance(0.01)
