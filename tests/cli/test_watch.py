"""`sagellm watch`: a short watch of a live server, its files, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sagellm.cli.watch import kv_bytes_per_token
from sagellm.core.errors import ConfigError
from sagellm.diagnostics.watch.ladder import LEFT_OUT
from sagellm.diagnostics.watch.replays import WatchedRequests
from sagellm.engines.native import DEMO_MODEL
from tests.diagnostics.watch.live_server import LiveServer
from tests.serving.live import wait_until


def watch_under_load(cli: Any, *options: str) -> Any:
    """Watch a server that reports hits while it serves."""
    with LiveServer(reports_hits=True) as server:
        is_over = threading.Event()

        def load() -> None:
            number = 0
            while not is_over.wait(0.01):
                server.serve([*range(24), number % 50, *range(11)])
                number += 1

        thread = threading.Thread(target=load)
        thread.start()
        try:
            servers = f"{server.events},{server.url}"
            return cli("watch", servers, "--duration", "1.5", "--interval", "0.3", *options)
        finally:
            is_over.set()
            thread.join()


def test_a_watch_writes_page_figures_and_trace(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = watch_under_load(
        cli, "--json", "seen.json", "--record", "seen.jsonl", "--bytes-per-token", "1000"
    )
    assert result.exit_code == 0, result.output
    assert "hit-rate ladder" in result.output
    assert "watch.html" in result.output
    assert "<h1>KV cache of toy</h1>" in Path("watch.html").read_text(encoding="utf-8")
    figures = json.loads(Path("seen.json").read_text(encoding="utf-8"))
    assert figures["version"] == 1
    assert figures["ladder"][0]["policy"] == "server"
    assert 0.5 < figures["ladder"][0]["hit_ratio"] < 0.9
    assert any(rung["capacity"] is None for rung in figures["ladder"])  # without limit
    assert figures["instances"][0]["bytes_per_block"] == 4000
    assert Path("seen.jsonl").read_text(encoding="utf-8").count("\n") > 10


def test_ctrl_c_ends_it_with_a_report(cli: Any, tmp_path: Path) -> None:
    former = signal.getsignal(signal.SIGINT)

    def press_ctrl_c() -> None:
        wait_until(lambda: signal.getsignal(signal.SIGINT) is not former)
        os.kill(os.getpid(), signal.SIGINT)

    with LiveServer() as server:
        threading.Thread(target=press_ctrl_c).start()
        result = cli("watch", server.url, "--html", str(tmp_path / "page.html"))
    assert result.exit_code == 0, result.output
    assert "now" in result.output


def test_ctrl_c_in_the_replays_writes_the_page_without_the_rest(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sagellm.cli.watch.SILENT_S", 0.0)

    def interrupted(self: WatchedRequests, policy: str, capacity: int) -> list[int]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        raise AssertionError("the signal came to nothing")

    monkeypatch.setattr(WatchedRequests, "hits_of_index", interrupted)
    result = watch_under_load(cli, "--json", "seen.json")
    assert result.exit_code == 0, result.output
    assert "replays: 1 of 24 done" in result.output
    figures = json.loads(Path("seen.json").read_text(encoding="utf-8"))
    known = {rung["policy"]: rung["hit_ratio"] for rung in figures["ladder"] if rung["capacity"] == 1}
    missing = {rung["policy"]: rung["missing"] for rung in figures["ladder"] if rung["capacity"] == 1}
    assert known["lru"] is not None
    assert known["optimum"] is not None
    assert (known["adaptive"], missing["adaptive"]) == (None, LEFT_OUT)
    assert {curve["policy"] for curve in figures["curves"]} >= {"lru", "optimum"}


def test_a_proxy_alone_watches_its_server_and_says_what_is_missing(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sagellm.cli.watch.SILENT_S", 0.1)
    monkeypatch.setattr("sagellm.cli.watch.LINE_S", 0.3)
    with LiveServer() as server:
        out = str(tmp_path / "page.html")
        result = cli("watch", "--proxy", server.url, "--duration", "1", "--interval", "0.2", "--html", out)
    assert result.exit_code == 0, result.output
    assert f"which passes them on to {server.url}" in result.output
    assert result.output.count("no KV events were asked for") == 2  # when it begins, and at the end
    assert "hit rate ?, 0 block events, 0 lost batches" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a server, as tcp://host:5557"),
        (["--proxy", "localhost:1"], "write http://host:port"),
        (["tcp://127.0.0.1:1"], "nothing publishes KV events at tcp://127.0.0.1:1"),
        (["nonsense"], "write tcp://host:port"),
        (["http://127.0.0.1:1"], "no metrics at http://127.0.0.1:1/metrics"),
        (["tcp://a:1", "--duration", "0"], "--duration and --interval must be more than 0"),
        (["tcp://a:1", "--html", "/nowhere/x.html"], "name a file in a folder that exists"),
        (["tcp://a:1", "--blocks", "0"], "--blocks 0: at least one"),
        (["http://127.0.0.1:1", "--bytes-per-token", "0"], "--bytes-per-token 0: at least one"),
        (["tcp://a:1", "tcp://b:1", "tcp://a:1"], "tcp://a:1 is named twice"),
        (["tcp://a:1", "--text"], "--text needs --model"),
        (["tcp://a:1", "--model", "/nowhere"], "give --bytes-per-token"),
        (["tcp://a:1", "--proxy", "http://127.0.0.1:1", "--listen", "x"], "write HOST:PORT"),
        (["tcp://a:1", "--max-blocks", "0"], "must be at least 1"),
    ],
)
def test_what_is_refused(cli: Any, arguments: list[str], message: str, tmp_path: Path) -> None:
    if "--html" not in arguments:
        arguments = [*arguments, "--html", str(tmp_path / "page.html")]
    result = cli("watch", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_kv_bytes_of_a_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    model = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
    }
    config.write_text(json.dumps(model))
    assert kv_bytes_per_token(config) == 2 * 32 * 8 * 128 * 2
    config.write_text(json.dumps({"text_config": {**model, "head_dim": 64, "dtype": "float32"}}))
    assert kv_bytes_per_token(config) == 2 * 32 * 8 * 64 * 4
    config.write_text(json.dumps({**model, "kv_lora_rank": 512, "qk_rope_head_dim": 64}))
    assert kv_bytes_per_token(config) == 32 * 576 * 2
    assert kv_bytes_per_token(DEMO_MODEL / "config.json") > 0
    gemma4 = json.dumps({**model, "per_layer_config": {"05": {"head_dim": 512}}})
    for broken in ("[]", "{}", "no json", gemma4):
        config.write_text(broken)
        with pytest.raises(ConfigError, match="give --bytes-per-token"):
            kv_bytes_per_token(config)
