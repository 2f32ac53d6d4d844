"""Which prefixes count as hot, and which copies are made of them, within their limits."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

import pytest

from sagellm.control_plane.rebalancing import RebalancingOptions
from sagellm.control_plane.replication import COPY_TIMEOUT_S, DECIDE_S, REPEAT_S, Replicator
from sagellm.control_plane.router import prefix_uses
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.control_plane.router.prefix_uses import (
    MEMORY_S,
    PrefixUses,
    device_holders,
    num_prefix_tokens,
    prefix_tokens,
)
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.events import BlocksStored, IndexCleared
from sagellm.core.protocols.router import ExecutionInstance, InstanceType
from sagellm.core.types import Namespace, Tokens

SIZE = 4
OPTIONS = RebalancingOptions(bytes_per_token=1000.0, bytes_per_s=1e9, least_uses_per_s=0.01)
SYSTEM = list(range(100, 140))
OTHER = list(range(200, 240))
HOT = ExecutionInstance("a", utilization=0.9, prefill_token_s=1e-4)
COLD = ExecutionInstance("b", utilization=0.1, prefill_token_s=1e-4)
COLDER = ExecutionInstance("c", utilization=0.05, prefill_token_s=1e-4)


def store(index: PrefixIndex, instance: str, tokens: list[int]) -> None:
    ends = range(SIZE, len(tokens) + 1, SIZE)
    hashes = tuple(blake2b(Tokens(tokens[:end]).tobytes(), digest_size=8).digest() for end in ends)
    data = Tokens(tokens).tobytes()
    index.apply(instance, BlocksStored((), 0, hashes, None, data, Namespace()))


def scene(options: RebalancingOptions = OPTIONS) -> tuple[Replicator, PrefixIndex, ManualClock]:
    clock = ManualClock()
    index = PrefixIndex(clock)
    for name in "abc":
        index.join(name)
    return Replicator(index, options, clock), index, clock


def use(replicator: Replicator, tokens: list[int], times: int = 20) -> None:
    for number in range(times):
        replicator.count(Tokens([*tokens, 1000 + number]), Namespace(), Namespace())


def test_a_prefix_that_parts_is_counted_up_to_where_it_parts() -> None:
    clock = ManualClock()
    index = PrefixIndex(clock)
    uses = PrefixUses(index, clock)
    store(index, "a", [*SYSTEM, *OTHER])
    store(index, "a", [*SYSTEM, *SYSTEM])
    for _ in range(3):
        uses.count(Tokens([*SYSTEM, *OTHER, 1]), Namespace(), Namespace())
    uses.count(Tokens([*SYSTEM, 1]), Namespace(), Namespace())
    found = {num_prefix_tokens(edge): (edge, per_s * MEMORY_S) for edge, per_s in uses.most_used(0.0)}
    assert {length: round(count) for length, (_, count) in found.items()} == {40: 4, 80: 3}
    assert list(prefix_tokens(found[80][0])) == [*SYSTEM, *OTHER]
    assert index.names_of(device_holders(found[80][0])) == {"a"}
    clock.advance(MEMORY_S)
    [(edge, per_s)] = uses.most_used(1.2 / MEMORY_S)
    assert num_prefix_tokens(edge) == 40
    assert per_s == pytest.approx(4 / 2.718281828 / MEMORY_S)
    index.apply("a", IndexCleared())
    assert uses.most_used(0.0) == []
    assert not len(uses)


def test_counts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_uses, "MAX_PREFIXES", 8)
    clock = ManualClock()
    index = PrefixIndex(clock)
    uses = PrefixUses(index, clock)
    for number in range(30):
        store(index, "a", [number] * 8)
        for _ in range(number + 1):
            uses.count(Tokens([number] * 8), Namespace(), Namespace())
        assert len(uses) <= 8
    assert max(per_s for _, per_s in uses.most_used(0.0)) * MEMORY_S == 30


def test_a_hot_prefix_is_copied_once_and_arrives() -> None:
    replicator, index, clock = scene()
    store(index, "a", SYSTEM)
    use(replicator, SYSTEM)
    assert not replicator.is_due()
    clock.advance(DECIDE_S)
    assert replicator.is_due()
    [copy] = replicator.decide([HOT, COLD])
    assert (copy.source, copy.target, list(copy.tokens)) == ("a", "b", SYSTEM)
    clock.advance(DECIDE_S)
    assert replicator.decide([HOT, COLD]) == []
    store(index, "b", SYSTEM)
    clock.advance(DECIDE_S)
    assert replicator.decide([HOT, COLD]) == []
    assert (replicator.num_copies, replicator.num_arrived) == (1, 1)
    replicator.check()


def test_a_copy_that_does_not_arrive_is_tried_again_much_later() -> None:
    replicator, index, clock = scene()
    store(index, "a", SYSTEM)
    clock.advance(DECIDE_S)
    use(replicator, SYSTEM)
    assert len(replicator.decide([HOT, COLD])) == 1
    clock.advance(COPY_TIMEOUT_S)
    assert replicator.decide([HOT, COLD]) == []
    clock.advance(REPEAT_S)
    use(replicator, SYSTEM)
    assert len(replicator.decide([HOT, COLD])) == 1


def test_each_type_is_compared_with_its_own() -> None:
    replicator, index, clock = scene()
    store(index, "a", SYSTEM)
    use(replicator, SYSTEM)
    clock.advance(DECIDE_S)
    assert replicator.decide([HOT, replace(COLD, kind=InstanceType.DECODING)]) == []
    clock.advance(DECIDE_S)
    [copy] = replicator.decide([HOT, COLD, replace(COLDER, kind=InstanceType.DECODING)])
    assert copy.target == "b"


def test_copies_are_bounded_in_number_and_bytes() -> None:
    replicator, index, clock = scene(replace(OPTIONS, max_copies=1))
    for prefix in (SYSTEM, OTHER):
        store(index, "a", prefix)
        use(replicator, prefix)
    clock.advance(DECIDE_S)
    assert len(replicator.decide([HOT, COLD, COLDER])) == 1
    clock.advance(DECIDE_S)
    assert replicator.decide([HOT, COLD, COLDER]) == []  # one is on its way
    replicator, index, clock = scene(replace(OPTIONS, bytes_per_s=40_000.0, link_share=0.1))
    for prefix in (SYSTEM, OTHER):
        store(index, "a", prefix)
        use(replicator, prefix, 1000)
    clock.advance(DECIDE_S)
    assert len(replicator.decide([HOT, COLD, COLDER])) == 1  # a second of the link
    clock.advance(8.0)
    assert replicator.decide([HOT, COLD, COLDER]) == []
    clock.advance(1.1)
    assert len(replicator.decide([HOT, COLD, COLDER])) == 1


def test_copies_of_an_instance_that_is_lost_end() -> None:
    replicator, index, clock = scene(replace(OPTIONS, max_copies=1))
    for prefix in (SYSTEM, OTHER):
        store(index, "a", prefix)
        use(replicator, prefix)
    clock.advance(DECIDE_S)
    [copy] = replicator.decide([HOT, COLD, COLDER])
    replicator.lost(copy.target)
    clock.advance(DECIDE_S)
    [other] = replicator.decide([each for each in (HOT, COLD, COLDER) if each.instance_id != copy.target])
    assert (copy.target, other.target) == ("c", "b")
    replicator.lost("a")  # the source
    clock.advance(DECIDE_S)
    assert replicator.decide([COLD, COLDER]) == []
    replicator.check()


def test_without_the_size_of_kv_nothing_is_copied() -> None:
    replicator, index, clock = scene(RebalancingOptions())
    store(index, "a", SYSTEM)
    use(replicator, SYSTEM)
    clock.advance(DECIDE_S)
    assert replicator.decide([HOT, COLD]) == []


@pytest.mark.parametrize("options", [{"max_copies": 0}, {"bytes_per_s": 0.0}, {"cold": -1.0}])
def test_options_that_cannot_be(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        RebalancingOptions(**options)  # type: ignore[arg-type]
