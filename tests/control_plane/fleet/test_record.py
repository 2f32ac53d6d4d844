"""`InstanceRecord`: what counts, once and at the right instance; and the record of a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from sagellm.control_plane.fleet.record import RATE_S, InstanceRecord, RecordedClient
from sagellm.core.clock import ManualClock
from sagellm.core.errors import SageError
from sagellm.core.protocols.fleet import (
    HandOverPart,
    HandOverReport,
    HandOverState,
    InstanceLost,
    RequestRefused,
)
from sagellm.core.types import FinishReason, RequestOutput
from tests.builders import request
from tests.control_plane.fleet.scene import Scene, Separating

PROMPT = list(range(1, 30))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def record(clock: ManualClock) -> InstanceRecord:
    return InstanceRecord(clock)


def output(
    name: str, new: int, drawn: int, cached: int = 0, reason: FinishReason | None = None
) -> RequestOutput:
    return RequestOutput(name, tuple(range(new)), 40, cached, drawn, finish_reason=reason)


def test_a_prompt_counts_where_its_first_token_is_drawn(record: InstanceRecord) -> None:
    record.take(output("a", 1, 1, cached=16))
    record.take(output("a", 2, 3, cached=16, reason=FinishReason.STOP))
    record.take(output("handed over", 1, 2, cached=32))  # another instance has drawn the first one
    assert (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens) == (40, 16, 4)


def test_a_plain_server_says_at_the_end_what_was_cached(record: InstanceRecord) -> None:
    record.take(output("a", 1, 1))
    record.take(output("a", 1, 2, cached=50, reason=FinishReason.STOP))
    assert (record.num_prompt_tokens, record.num_cached_tokens) == (40, 40)  # no more than its prompt


def test_the_rate_is_that_of_the_last_seconds(clock: ManualClock, record: InstanceRecord) -> None:
    clock.advance(100.0)
    record.take(output("a", 10, 10))
    clock.advance(1.0)
    record.take(output("a", 10, 20))
    assert record.tokens_per_s == pytest.approx(20 / RATE_S)
    clock.advance(RATE_S - 0.5)
    assert record.tokens_per_s == pytest.approx(10 / RATE_S)
    clock.advance(2.0)
    assert record.tokens_per_s == 0.0


def report(name: str, state: HandOverState, reason: str = "") -> HandOverReport:
    return HandOverReport(name, HandOverPart.DECODE, state, reason=reason)


def test_hand_overs_are_under_way_until_their_last_report(record: InstanceRecord) -> None:
    for name in ("a", "b", "c", "d"):
        record.moves(name)
        record.take(report(name, HandOverState.BOOTSTRAPPING))
        record.take(report(name, HandOverState.TRANSFERRING))
    assert record.num_under_way == 4
    record.take(report("a", HandOverState.READY))
    record.take(report("b", HandOverState.FAILED, "no sign of it"))
    record.drop("c")  # aborted: no last report comes
    record.take(report("c", HandOverState.TRANSFERRING))  # it was under way
    assert (record.num_under_way, record.num_handed_over, record.num_failed) == (1, 1, 1)
    assert record.last_failure == "a decode of KV failed: no sign of it"
    record.take(InstanceLost("its connection has ended"))
    assert record.num_under_way == 0


def test_a_failure_that_ends_the_request_counts_after_its_output(record: InstanceRecord) -> None:
    record.moves("a")
    record.take(report("a", HandOverState.BOOTSTRAPPING))
    record.take(output("a", 0, 0, reason=FinishReason.ERROR))
    record.take(report("a", HandOverState.FAILED, "no sign of it"))
    assert (record.num_under_way, record.num_failed) == (0, 1)


def test_a_prefix_that_is_fetched_and_sent_on_counts_twice(record: InstanceRecord) -> None:
    record.moves("a", 2)
    for part in (HandOverPart.FETCH, HandOverPart.PREFILL):
        record.take(HandOverReport("a", part, HandOverState.TRANSFERRING))
        record.take(HandOverReport("a", part, HandOverState.READY))
    record.take(HandOverReport("a", HandOverPart.PREFILL, HandOverState.TRANSFERRING))
    assert (record.num_under_way, record.num_handed_over) == (0, 2)


def test_what_is_a_failure(clock: ManualClock, record: InstanceRecord) -> None:
    record.take(RequestRefused("a", SageError("no such parameter")))  # the request's own fault
    assert record.last_failure == ""
    clock.advance(3.0)
    record.take(RequestRefused("a", SageError("the stream broke"), again=True))
    assert (record.last_failure, record.failed_s) == ("a request failed: the stream broke", clock.now())
    record.take(InstanceLost("its connection has ended"))
    assert record.last_failure == "lost: its connection has ended"


@pytest.mark.parametrize("is_first", [True, False])
def test_the_end_of_a_process_is_the_reason_of_a_loss(record: InstanceRecord, is_first: bool) -> None:
    lost = InstanceLost("its connection has ended")
    if is_first:
        record.ended("decode-0 was ended by SIGKILL")
    record.take(lost)
    if not is_first:
        record.ended("decode-0 was ended by SIGKILL")
    assert record.last_failure == "decode-0 was ended by SIGKILL"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, 3, exchanges=True, router=Separating())
    yield made
    made.close()


def record_of(scene: Scene, name: str) -> InstanceRecord:
    return client_of(scene, name).record


def client_of(scene: Scene, name: str) -> RecordedClient:
    return cast(RecordedClient, scene.front.members[name].client)


def test_counts_of_separated_requests_add_up(scene: Scene) -> None:
    for number in range(6):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 8))
    scene.finish()
    records = [record_of(scene, f"i-{number}") for number in range(3)]
    assert sum(each.num_output_tokens for each in records) == 6 * 8
    assert records[0].num_prompt_tokens == 6 * (1 + len(PROMPT))
    assert records[1].num_prompt_tokens == records[2].num_prompt_tokens == 0
    scene.until(lambda: sum(each.num_handed_over for each in records[1:]) == 6)
    scene.until(lambda: all(each.num_under_way == 0 for each in records))
    scene.kill("i-1")
    scene.until(lambda: scene.front.members["i-1"].facts is None)
    assert "lost" in records[1].last_failure
    assert records[1].connected_s is None


def test_aborted_hand_overs_are_not_under_way(scene: Scene) -> None:
    for number in range(12):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 8))
        for _ in range(number % 6):
            scene.turn()
        scene.front.abort(f"r{number}")
    for _ in range(50):
        scene.turn()
    assert all(record_of(scene, name).num_under_way == 0 for name in scene.servers)


def test_a_look_is_answered_without_a_wait(scene: Scene) -> None:
    client = client_of(scene, "i-1")
    assert client.look()
    assert client.look()  # is asked already
    assert client.record.seen_s is None
    scene.until(lambda: client.record.seen_s is not None)
    assert client.record.hot_prefixes == []
    for number in range(6):
        scene.front.add(request(f"r{number}", [*PROMPT, number + 1], 2))
    scene.finish()
    assert client.look()
    scene.until(lambda: bool(client.record.hot_prefixes))
    assert client.record.hot_prefixes[0].num_uses > 1
    scene.kill("i-1")
    scene.until(lambda: client.facts is None)
    assert not client.look()
