"""`PlainEvents`: KV events of vLLM's and SGLang's form, as an instance's changes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from sagellm.control_plane.fleet.plain_events import PlainEvents
from sagellm.control_plane.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    encode_batch,
    salt_digest,
)
from sagellm.core.blocks import Tier
from sagellm.core.events import BlocksRemoved, BlocksStored, IndexCleared
from sagellm.core.protocols.fleet import KVChanges
from sagellm.core.types import Namespace, Tokens
from tests.control_plane.fleet.plain_stand_in import wait_until


class Publisher:
    """Sends batches by number, so that a test can leave some out."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.XPUB)
        self.socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait_for_reader(self) -> None:
        assert self.socket.poll(5000)
        self.socket.recv()

    def send(self, number: int, *events: Any, payload: bytes | None = None) -> None:
        data = encode_batch(KVEventBatch(float(number), list(events))) if payload is None else payload
        self.socket.send_multipart([b"", struct.pack(">q", number), data])

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


class Reader:
    def __init__(self, publisher: Publisher) -> None:
        self.changes: list[KVChanges] = []
        self.events = PlainEvents(publisher.endpoint, None, "", self.changes.append)
        self.events.start()
        publisher.wait_for_reader()

    def all(self) -> list[Any]:
        return [event for changes in list(self.changes) for event in changes.events]

    def until(self, num: int) -> list[Any]:
        wait_until(lambda: len(self.all()) >= num)
        return self.all()


@pytest.fixture
def reader(publisher: Publisher) -> Iterator[Reader]:
    made = Reader(publisher)
    yield made
    made.events.close()


def stored(*hashes: int, parent: int | None = None, **given: Any) -> BlockStored:
    tokens = list(range(4 * len(hashes)))
    return BlockStored(list(hashes), parent, tokens, 4, None, given.pop("medium", "GPU"), **given)


def test_blocks_are_stored_and_removed(publisher: Publisher, reader: Reader) -> None:
    publisher.send(0, stored(-2, 3), stored(4, parent=3, medium="CPU"))
    publisher.send(1, BlockRemoved([3], "GPU"), AllBlocksCleared())
    first, second, removed, cleared = reader.until(4)
    assert isinstance(first, BlocksStored)
    assert first.hashes == ((2**64 - 2).to_bytes(8, "big"), (3).to_bytes(8, "big"))
    assert first.tokens == Tokens(range(8)).tobytes()
    assert (second.parent_hash, second.tier) == ((3).to_bytes(8, "big"), Tier.DRAM)
    assert isinstance(removed, BlocksRemoved)
    assert isinstance(cleared, IndexCleared)
    assert reader.events.num_evicted == 1
    assert reader.events.is_fresh
    assert all(changes.is_complete for changes in reader.changes)


def test_the_salt_is_read_in_both_forms(publisher: Publisher, reader: Reader) -> None:
    digest = salt_digest("acme")
    publisher.send(
        0,
        stored(1, cache_salt=digest),  # SGLang
        stored(2, extra_keys=[(digest,)]),  # vLLM
        stored(3, lora_name="poet", extra_keys=[("poet", digest)]),
        stored(4, lora_name="poet", extra_keys=[("poet",)]),
    )
    assert [event.namespace for event in reader.until(4)] == [
        Namespace(digest),
        Namespace(digest),
        Namespace(digest, adapter="poet"),
        Namespace(adapter="poet"),
    ]


def test_further_groups_of_a_model_are_passed_over(publisher: Publisher, reader: Reader) -> None:
    publisher.send(0, stored(1, group_idx=0), stored(2, group_idx=1), BlockRemoved([2], "GPU", group_idx=1))
    publisher.send(1, stored(3, group_idx=0))
    assert len(reader.until(2)) == 2
    assert reader.events.num_evicted == 0


def test_a_gap_makes_it_incomplete_until_all_is_cleared(publisher: Publisher, reader: Reader) -> None:
    publisher.send(0, stored(1))
    reader.until(1)
    assert reader.events.is_fresh
    publisher.send(3, stored(2))
    reader.until(2)
    assert [changes.is_complete for changes in reader.changes] == [True, False, True]
    wait_until(lambda: not reader.events.is_fresh)
    publisher.send(4, AllBlocksCleared())
    reader.until(3)
    wait_until(lambda: reader.events.is_fresh)


def test_what_cannot_be_read_makes_it_incomplete(publisher: Publisher, reader: Reader) -> None:
    publisher.send(0, stored(1))
    publisher.send(1, payload=b"no msgpack")
    publisher.send(2, BlockStored([2], None, [2**40], 1))  # a token that is no int32
    publisher.socket.send_multipart([b"one frame"])
    publisher.send(3, stored(5))
    reader.until(2)
    wait_until(lambda: sum(not changes.is_complete for changes in reader.changes) == 3)
    assert not reader.events.is_fresh


def test_a_new_process_has_nothing_of_the_former(publisher: Publisher, reader: Reader) -> None:
    publisher.send(0, stored(1))
    publisher.send(1, stored(2))
    reader.until(2)
    publisher.send(0, stored(3))
    assert [type(event) for event in reader.until(4)[2:]] == [IndexCleared, BlocksStored]
    wait_until(lambda: reader.events.is_fresh)


def test_nothing_is_given_after_the_end(publisher: Publisher) -> None:
    reader = Reader(publisher)
    reader.events.close()
    publisher.send(0, stored(1))
    assert not reader.changes
