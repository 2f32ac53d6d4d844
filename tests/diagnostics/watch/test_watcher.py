"""A watch of live sockets: what is read, what is missing, and what the report then says."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sagellm.benchmarks.replay.block_trace import block_trace
from sagellm.benchmarks.traces import read_trace
from sagellm.control_plane.kv_events.publisher import WallClock
from sagellm.core.errors import ConfigError
from sagellm.diagnostics.watch.endpoints import CounterWatch, ServerAddress
from sagellm.diagnostics.watch.ladder import NEEDS_HITS, NEEDS_REQUESTS
from sagellm.diagnostics.watch.recording import WatchRecording
from sagellm.diagnostics.watch.report import WatchReport
from sagellm.diagnostics.watch.watcher import CacheSizes, Watcher
from tests.diagnostics.watch.live_server import LiveServer
from tests.serving.live import wait_until


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer() as made:
        yield made


def join(watcher: Watcher, *servers: LiveServer) -> None:
    """Publish empty batches until the watcher hears every server."""
    for index, server in enumerate(servers):

        def is_heard(index: int = index, server: LiveServer = server) -> bool:
            server.idle()
            return watcher.report(with_replays=False).instances[index].num_batches > 0

        wait_until(is_heard)


def play(server: LiveServer, seed: int = 0, num_requests: int = 60) -> None:
    draw = random.Random(seed)
    texts = [[draw.randrange(99) for _ in range(draw.randrange(8, 60))] for _ in range(8)]
    for _ in range(num_requests):
        server.serve(draw.choice(texts) + [draw.randrange(99) for _ in range(6)], [1, 2, 3, 4, 5])


def watched(watcher: Watcher, *servers: LiveServer) -> WatchReport:
    """The report once the last batch of each server has arrived."""
    for index, server in enumerate(servers):
        before = watcher.report(with_replays=False).instances[index].num_batches

        def is_ahead(index: int = index, before: int = before) -> bool:
            return watcher.report(with_replays=False).instances[index].num_batches > before

        server.idle()
        wait_until(is_ahead)
    time.sleep(0.1)
    watcher.close()
    return watcher.report()


def address(server: LiveServer) -> ServerAddress:
    return ServerAddress.parse(f"{server.events},{server.url}")


def test_the_servers_own_hit_rate_is_reported(server: LiveServer) -> None:
    server.queried, server.hit = 1000, 10  # before the watch
    watcher = Watcher([address(server)], wall_clock=WallClock())
    join(watcher, server)
    play(server)
    report = watched(watcher, server)
    [instance] = report.instances
    assert instance.num_queried_tokens == server.queried - 1000
    assert instance.hit_ratio == pytest.approx((server.hit - 10) / (server.queried - 1000))
    assert (instance.engine, instance.model, instance.num_blocks, instance.block_size) == (
        "vLLM",
        "toy",
        50,
        4,
    )
    assert report.ladder[0].hit_ratio == instance.hit_ratio
    assert report.missed.evicted > 0
    assert any(NEEDS_HITS in text for text in report.unknown)
    assert report.advice


def test_whole_requests_are_replayed_and_recorded(tmp_path: Path) -> None:
    with LiveServer(reports_hits=True) as server, WatchRecording(tmp_path / "seen.jsonl") as recording:
        watcher = Watcher([address(server)], on_access=recording.write, wall_clock=WallClock())
        join(watcher, server)
        play(server, num_requests=100)
        report = watched(watcher, server)
    by_rung = {(rung.policy, rung.capacity): rung.hit_ratio for rung in report.ladder}
    assert by_rung["lru", 1.0] == pytest.approx(by_rung["server", 1.0], abs=0.03)
    assert (by_rung["optimum", 1.0] or 0) >= (by_rung["lru", 1.0] or 0)
    assert {curve.policy for curve in report.curves} == {"lru", "adaptive", "optimum"}
    trace = read_trace(tmp_path / "seen.jsonl")
    assert len(trace.requests) == recording.num_requests >= 95
    assert block_trace(trace).block_tokens == 4


def test_a_fleet_of_eight_and_what_routing_would_add() -> None:
    servers = [LiveServer() for _ in range(8)]
    try:
        watcher = Watcher([address(server) for server in servers], wall_clock=WallClock())
        join(watcher, *servers)
        for server in servers:
            server.serve(list(range(40)))
            time.sleep(0.02)  # each one's events arrive before the next one's
        report = watched(watcher, *servers)
    finally:
        for server in servers:
            server.close()
    routing = next(rung for rung in report.ladder if rung.policy == "routing")
    assert routing.hit_ratio == pytest.approx(7 / 8)
    assert report.advice[0].text.startswith("Routing by prefix")


def test_lost_and_broken_batches_are_counted_and_said(server: LiveServer) -> None:
    watcher = Watcher([address(server)], wall_clock=WallClock())
    join(watcher, server)
    server.send(b"\xc1 no msgpack")
    server.send(b"\x93", skip=3)
    server.serve(list(range(20)))
    report = watched(watcher, server)
    [instance] = report.instances
    assert (instance.num_lost, instance.num_malformed) == (3, 2)
    assert any("3 batches were lost and 2 events could not be read" in text for text in report.unknown)


def test_without_events_only_the_hit_rate_is_known(server: LiveServer) -> None:
    watcher = Watcher([ServerAddress.parse(server.url)], wall_clock=WallClock())
    play(server, num_requests=5)
    watcher.close()
    report = watcher.report()
    assert report.ladder[0].hit_ratio is not None
    assert any("--kv-events-config" in text for text in report.unknown)


def test_a_server_that_goes_away_keeps_its_figures(server: LiveServer) -> None:
    watcher = Watcher([address(server)], wall_clock=WallClock())
    join(watcher, server)
    play(server, num_requests=5)
    watcher.update()
    server.is_down = True
    report = watched(watcher, server)
    assert report.instances[0].num_queried_tokens == server.queried
    assert any("its metrics did not answer 1 times" in text for text in report.unknown)


def test_silence_is_explained(server: LiveServer) -> None:
    with Watcher([address(server)], wall_clock=WallClock()) as watcher:
        assert any("has it had any request?" in text for text in watcher.report().unknown)
        server.queried = 100
        watcher.update()
        assert any("not of replays" in text for text in watcher.report().unknown)


def test_counters_go_on_after_a_restart(server: LiveServer) -> None:
    counters = CounterWatch(f"{server.url}/metrics")
    server.queried, server.hit = 100, 40
    counters.update()
    server.queried, server.hit = 10, 5  # a new process
    counters.update()
    server.queried, server.hit = 30, 6
    counters.update()
    assert (counters.grown().num_queried_tokens, counters.grown().num_hit_tokens) == (130, 46)


def test_sizes_that_the_user_gives_win(server: LiveServer) -> None:
    sizes = CacheSizes(num_blocks=99, bytes_per_token=1000)
    watcher = Watcher([address(server)], sizes=sizes, wall_clock=WallClock())
    watcher.close()
    [instance] = watcher.report().instances
    assert (instance.num_blocks, instance.bytes_per_block) == (99, 4000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "one server has one address"),
        ("localhost", "write tcp://host:port for KV events"),
        ("tcp://host", "has no port"),
        ("tcp://host:99999", "has no port"),
        ("tcp://*:5557", "instead of"),
        ("tcp://a:1,tcp://b:2,tcp://c:3", "one server has one address"),
        ("http://a,http://b", "write tcp://host:port"),
    ],
)
def test_addresses_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerAddress.parse(text)


def test_sockets_are_tried_first(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagellm.diagnostics.watch.endpoints.CONNECT_S", 0.3)
    http = server.url.removeprefix("http://")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    for text, message in (
        (free, r"nothing publishes KV events at .*Connection refused.*--kv-events-config"),
        (f"{server.events},{free}", "nothing publishes KV events"),
        ("tcp://nowhere.invalid:1", "nothing publishes KV events"),
        (f"tcp://{http}", "is no socket of KV events: another program answers"),
        ("ipc:///nowhere/events", "there is no socket /nowhere/events"),
    ):
        with pytest.raises(ConfigError, match=message):
            Watcher([ServerAddress.parse(text)], wall_clock=WallClock())
    ServerAddress.parse(f"{server.events},{server.url}").check_sockets()


def test_without_requests_the_ladder_says_so(server: LiveServer) -> None:
    with Watcher([address(server)], wall_clock=WallClock()) as watcher:
        ladder = watcher.report().ladder
    assert {rung.missing for rung in ladder if rung.policy == "server"} == {NEEDS_REQUESTS}


def test_addresses() -> None:
    full = ServerAddress.parse("tcp://a:1, tcp://a:2, http://a:80")
    assert full == ServerAddress("tcp://a:1", "tcp://a:2", "http://a:80/metrics")
    assert ServerAddress.parse("http://a:80").name == "http://a:80/metrics"
    with pytest.raises(ConfigError, match="at least one server"):
        Watcher([], wall_clock=WallClock())
