"""`CheckpointRetention` alone, with an index of one path per conversation."""

from __future__ import annotations

import pytest

from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.protocols.checkpoints import Marginal
from sagellm.kvmgr.eviction.checkpoints.retention import CheckpointRetention

BLOCK_BYTES, STATE_BYTES, BLOCK_TOKENS = 10, 30, 16


class FakeIndex:
    """Checkpoints by key; conversations share nothing. A key is 1000 x conversation + depth."""

    def __init__(self) -> None:
        self.keys: set[int] = set()

    def marginal(self, key: int) -> Marginal:
        conversation, depth = divmod(key, 1000)
        path = sorted(other % 1000 for other in self.keys if other // 1000 == conversation)
        above = max((other for other in path if other < depth), default=0)
        only = depth - above if path[-1] == depth else 0
        key_above = 1000 * conversation + above if above else None
        return Marginal((depth - above) * BLOCK_TOKENS, STATE_BYTES + only * BLOCK_BYTES, key_above)


class Conversations:
    """Serves turns of conversations, each a path of its own."""

    def __init__(self, **options: int) -> None:
        self.index = FakeIndex()
        self.retention = CheckpointRetention(self.index, **options)
        self.known: dict[int, int] = {}

    def turn(self, conversation: int, num_blocks: int, now_s: float) -> list[int]:
        keys = [1000 * conversation + depth for depth in range(1, num_blocks + 1)]
        reused = max((key % 1000 for key in self.index.keys if key in keys), default=0)
        depths = self.retention.places(keys, self.known.get(conversation, 0), reused, 8, now_s)
        self.known[conversation] = num_blocks
        for depth in depths:
            self.index.keys.add(keys[depth - 1])
            self.retention.made(keys[depth - 1], depth, now_s)
        self.retention.check()
        return depths

    def drop(self, now_s: float) -> int:
        key = self.retention.victim(now_s)
        above = self.index.marginal(key).above
        self.index.keys.remove(key)
        self.retention.removed(key, above, now_s)
        self.retention.check()
        return key


def test_places_are_the_end_two_blocks_before_it_and_the_junction() -> None:
    served = Conversations()
    assert served.turn(1, 10, 0.0) == [8, 9, 10]
    assert served.turn(1, 20, 5.0) == [18, 19, 20]  # it continues from the checkpoint at 10
    while served.index.keys:
        served.drop(6.0)
    assert served.turn(1, 30, 7.0) == [20, 28, 29, 30]
    assert served.retention.places([], 0, 0, 8, 8.0) == []


def test_what_saves_least_per_byte_goes_first() -> None:
    served = Conversations()
    served.turn(1, 10, 0.0)
    served.turn(2, 100, 0.0)
    dropped = [served.drop(1.0) for _ in range(6)]
    assert dropped[:4] == [1010, 2100, 1009, 2099]  # beside the one in front, each saves one block alone
    assert dropped[4:] == [1008, 2098]  # 8 blocks for the bytes of 11, 98 for those of 101
    with pytest.raises(BookkeepingError, match="no checkpoint"):
        served.retention.victim(2.0)


def test_a_dropped_end_leaves_its_uses_to_the_checkpoint_in_front() -> None:
    served = Conversations()
    served.turn(1, 40, 0.0)
    served.turn(1, 80, 50.0)
    before = served.retention._value(served.retention._records[1040], 60.0)
    while 1080 in served.index.keys:
        served.drop(60.0)
    assert served.retention._value(served.retention._records[1040], 60.0) > before


def test_conversations_that_go_on_are_kept_and_those_that_end_are_not() -> None:
    """Odd conversations have one turn, even ones a turn per minute; the first outputs tell nothing."""
    served = Conversations()
    resident: list[tuple[int, int]] = []
    for minute in range(60):
        now_s = 60.0 * minute
        for conversation in range(10):
            served.turn(2 * conversation + 2, 20 + 4 * minute, now_s + conversation)
        served.turn(1001 + 2 * minute, 30 + minute % 3, now_s + 20)
        while len(served.index.keys) > 12:
            served.drop(now_s + 30)
        if minute > 40:
            ended = sum(key // 1000 > 1000 for key in served.index.keys)
            resident.append((len({key // 1000 for key in served.index.keys}) - ended, ended))
    assert all(going_on >= 9 for going_on, _ in resident)


def test_old_places_are_forgotten_but_those_of_checkpoints() -> None:
    served = Conversations(max_records=64)
    for conversation in range(200):
        served.turn(conversation + 1, 10, float(conversation))
        while len(served.index.keys) > 5:
            served.drop(float(conversation))
    assert len(served.retention._records) <= 64
    assert len(served.retention) == 5


def test_too_few_records_are_refused() -> None:
    with pytest.raises(ConfigError, match="64"):
        CheckpointRetention(FakeIndex(), max_records=8)
