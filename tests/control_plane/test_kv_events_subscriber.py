"""The subscriber against a plain PUB socket: what no publisher of ours would send."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zmq

from sagellm.control_plane.kv_events import (
    AllBlocksCleared,
    Gap,
    KVEventBatch,
    KVEventError,
    KVEventSubscriber,
    Malformed,
    ReceivedBatch,
    encode_batch,
)
from sagellm.core.errors import ConfigError

BATCH = KVEventBatch(1.0, [AllBlocksCleared()], 0)


class PlainPublisher:
    """A PUB socket, and a ROUTER socket that never answers."""

    def __init__(self, context: zmq.SyncContext) -> None:
        self.socket = context.socket(zmq.PUB)
        self.socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.silent = context.socket(zmq.ROUTER)
        self.silent.bind("tcp://127.0.0.1:*")
        self.silent_endpoint = self.silent.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, seq: int, payload: bytes | None = None) -> None:
        body = encode_batch(BATCH) if payload is None else payload
        self.socket.send_multipart([b"kv", seq.to_bytes(8, "big"), body])

    def join(self, subscriber: KVEventSubscriber) -> int:
        """Publish until the subscriber hears it; returns the number of the last batch that it has."""
        seq = 0
        while (item := subscriber.poll(0.01)) is None:
            self.send(seq)
            seq += 1
        while item is not None:
            item = subscriber.poll(0.05)
        assert subscriber.next_seq == seq
        return seq - 1


@pytest.fixture
def plain() -> Iterator[PlainPublisher]:
    context = zmq.Context()
    made = PlainPublisher(context)
    yield made
    context.destroy(linger=0)


def test_missing_numbers_are_a_gap_where_nobody_can_be_asked(plain: PlainPublisher) -> None:
    with KVEventSubscriber(plain.endpoint) as subscriber:
        last = plain.join(subscriber)
        plain.send(last + 5)
        assert subscriber.poll() == Gap(last + 1, last + 4)
        assert subscriber.poll() == ReceivedBatch(last + 5, BATCH)


def test_a_replay_that_never_answers_costs_its_time_and_is_a_gap(plain: PlainPublisher) -> None:
    with KVEventSubscriber(plain.endpoint, plain.silent_endpoint, replay_timeout_s=0.01) as subscriber:
        last = plain.join(subscriber)
        plain.send(last + 2)
        assert subscriber.poll() == Gap(last + 1, last + 1)


def test_what_cannot_be_decoded_is_told_and_the_rest_goes_on(plain: PlainPublisher) -> None:
    with KVEventSubscriber(plain.endpoint) as subscriber:
        last = plain.join(subscriber)
        plain.send(last + 1, b"\xc1")
        plain.socket.send_multipart([b"one frame"])
        plain.send(last + 2)
        item = subscriber.poll()
        assert isinstance(item, Malformed)
        assert item.seq == last + 1
        assert "not a batch of KV events" in item.reason
        with pytest.raises(KVEventError, match="got frames of 9 bytes"):
            subscriber.poll()
        assert subscriber.poll() == ReceivedBatch(last + 2, BATCH)


def test_close_ends_the_iteration(plain: PlainPublisher) -> None:
    subscriber = KVEventSubscriber(plain.endpoint)
    last = plain.join(subscriber)
    seen: list[object] = []
    first = threading.Event()

    def listen() -> None:
        for item in subscriber:
            seen.append(item)
            first.set()

    thread = threading.Thread(target=listen)
    thread.start()
    plain.send(last + 1)
    first.wait()
    subscriber.close()
    thread.join()
    subscriber.close()
    assert seen == [ReceivedBatch(last + 1, BATCH)]
    assert subscriber.poll(0.0) is None
    assert list(subscriber) == []


def test_close_interrupts_a_replay(plain: PlainPublisher) -> None:
    subscriber = KVEventSubscriber(plain.endpoint, plain.silent_endpoint, replay_timeout_s=3600)
    thread = threading.Thread(target=lambda: list(subscriber))
    thread.start()
    subscriber.close()
    thread.join()
    assert subscriber.poll() is None


def test_only_the_topic_asked_for(plain: PlainPublisher) -> None:
    with KVEventSubscriber(plain.endpoint, topic="other") as subscriber:
        for seq in range(5):
            plain.send(seq)
            assert subscriber.poll(0.01) is None


def test_an_endpoint_that_is_none() -> None:
    with pytest.raises(ConfigError, match="cannot be read from 'nonsense'"):
        KVEventSubscriber("nonsense")
