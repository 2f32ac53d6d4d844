"""Engines that share KV over a server: the same tokens, whatever becomes of it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.core.protocols.kv_tiers import TierState
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import Engine
from sagellm.kvmgr.kv_pool.tiers.remote_storage import RemoteStorage
from sagellm.kvmgr.kv_pool.tiers.remote_tier import RemoteTier
from tests.engines.native.tiered import BLOCK, WHOLE, ask, engine, hierarchy, prompts
from tests.kvmgr.tiers.storages.resp_server import RespServer
from tests.redis_server import running_redis
from tests.tiny_models import save_tiny

ONE_WARNING = "the remote KV store is not used until it works again"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "model", "llama")
    return tmp_path / "model"


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "redis").mkdir()
    with running_redis(tmp_path / "redis") as path:
        yield path


@pytest.fixture
def small_server() -> Iterator[RespServer]:
    server = RespServer("s3cret-word")
    server.start()
    yield server
    server.stop()


def at(url: str | Path) -> dict[str, Any]:
    """Settings for a server; the limit keeps `check` quick."""
    return {"kv.remote_url": url if isinstance(url, str) else f"unix://{url}", "kv.remote_gb": 0.05}


def url_of(server: RespServer) -> str:
    return server.url.replace("//", "//:s3cret-word@")


def shared(asked: Engine) -> RemoteTier:
    tier = hierarchy(asked).tiers[-1]
    assert isinstance(tier, RemoteTier)
    return tier


def state(asked: Engine) -> TierState:
    return hierarchy(asked).states()[-1]


def flush(asked: Engine) -> None:
    """Wait until all that was computed is on the server."""
    waits, storage = asked._kv_waits, shared(asked).storage
    assert waits is not None
    waits.settle()
    assert isinstance(storage, RemoteStorage)
    assert storage.flush(30.0)


def expected(model: Path, count: int = 4) -> list[list[int]]:
    alone = engine(model)
    drawn = [ask(alone, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts(count=count))]
    alone.close()
    return drawn


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("llama", {"engine.overlap": True}),
        ("llama", {"kv.host_gb": 0.05}),
        ("llama", {"kv.codec": "zstd"}),
        ("deepseek2-lite", {}),
        ("gemma3", {}),
    ],
    ids=["plain", "overlap", "host", "zstd", "latent", "windows"],
)
def test_what_one_engine_computes_another_loads(
    tmp_path: Path, socket: Path, kind: str, settings: dict[str, Any]
) -> None:
    model = tmp_path / kind
    save_tiny(model, kind)
    url = {**at(socket), **settings}
    first, second = engine(model, **url), engine(model, **url)
    drawn = [ask(first, f"r{i}", prompt) for i, prompt in enumerate(prompts())]
    assert [tokens for tokens, _ in drawn] == expected(model)
    flush(first)
    for i, prompt in enumerate(prompts()):
        assert ask(second, f"r{i}", prompt) == (drawn[i][0], WHOLE)
    flush(second)
    # Of 66 tokens the last has no KV: the answers add one block each, which the first engine has put.
    assert state(first).stored == 4 * (WHOLE // BLOCK + 1)
    assert (state(second).stored, state(second).loaded) == (0, 4 * WHOLE // BLOCK)
    assert not state(second).misses
    for i, prompt in enumerate(prompts()):
        assert ask(second, f"again {i}", prompt) == (drawn[i][0], WHOLE)
    if "kv.host_gb" in settings:  # what came from the server is in the nearer tier too
        assert hierarchy(second).states()[0].loaded > 0
    assert second.stats().tier_faults == []
    first.close()
    second.close()


def test_another_model_shares_nothing(model: Path, tmp_path: Path, socket: Path) -> None:
    url = at(socket)
    first = engine(model, **url)
    for i, prompt in enumerate(prompts()):
        ask(first, f"r{i}", prompt)
    flush(first)
    first.close()
    save_tiny(tmp_path / "other", "llama", seed=1)
    other = engine(tmp_path / "other", **url)
    assert [ask(other, f"r{i}", prompt)[1] for i, prompt in enumerate(prompts())] == [0] * 4
    assert not state(other).misses
    other.close()


def test_damaged_values_are_computed_again(model: Path, socket: Path) -> None:
    url = at(socket)
    first = engine(model, **url)
    drawn = [ask(first, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts())]
    flush(first)
    first.close()
    with redis.Redis(unix_socket_path=str(socket)) as client:
        for key in client.scan_iter():
            client.setrange(key, 1000, b"!!")
    second = engine(model, **url)
    for i, prompt in enumerate(prompts()):
        assert ask(second, f"r{i}", prompt) == (drawn[i], 0)
    assert state(second).misses == {"corrupt": 4}
    flush(second)
    second.close()
    third = engine(model, **url)
    for i, prompt in enumerate(prompts()):
        assert ask(third, f"r{i}", prompt) == (drawn[i], WHOLE)
    third.close()


def test_no_server(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone = engine(model, **at("redis://:s3cret-word@127.0.0.1:1"))
    drawn = [ask(alone, f"r{i}", prompt) for i, prompt in enumerate(prompts())]
    assert drawn == [(tokens, 0) for tokens in expected(model)]
    assert caplog.text.count(ONE_WARNING) == 1
    [fault] = alone.stats().tier_faults
    assert fault.startswith("remote: redis://127.0.0.1:1 (db 0): ConnectionError")
    assert state(alone).fault
    alone.close()
    assert "s3cret-word" not in caplog.text + fault


def test_a_silent_server(model: Path, small_server: RespServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    slow = engine(model, **at(url_of(small_server)))
    small_server.delay_s = 30.0
    drawn = [ask(slow, f"r{i}", prompt) for i, prompt in enumerate(prompts())]
    assert drawn == [(tokens, 0) for tokens in expected(model)]
    assert caplog.text.count(ONE_WARNING) == 1
    [fault] = slow.stats().tier_faults
    slow.close()
    assert "s3cret-word" not in caplog.text + fault


def test_a_server_that_is_killed_and_comes_back(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "redis").mkdir()
    url = at(tmp_path / "redis" / "socket")
    tokens = expected(model)
    with running_redis(tmp_path / "redis"):
        lasting = engine(model, **url)
        for i, prompt in enumerate(prompts()):
            assert ask(lasting, f"a{i}", prompt) == (tokens[i], 0)
    for i, prompt in enumerate(prompts()):
        assert ask(lasting, f"b{i}", prompt)[0] == tokens[i]
    assert lasting.stats().tier_faults
    assert caplog.text.count(ONE_WARNING) == 1
    with running_redis(tmp_path / "redis"):
        deadline_s = time.monotonic() + 60.0
        while lasting.stats().tier_faults and time.monotonic() < deadline_s:
            time.sleep(0.2)  # the pause after a failure
            ask(lasting, f"c{time.monotonic()}", prompts(seed=9, count=1)[0])
            lasting.clear_cache()
        for i, prompt in enumerate(prompts()):
            assert ask(lasting, f"d{i}", prompt) == (tokens[i], 0)
        flush(lasting)
        another = engine(model, **url)
        for i, prompt in enumerate(prompts()):
            assert ask(another, f"e{i}", prompt) == (tokens[i], WHOLE)
        another.close()
        lasting.close()


def test_the_ttl_and_the_size_limit_are_those_of_the_configuration(model: Path, socket: Path) -> None:
    probe = engine(model)
    block_gb = (probe.backend.get_kv_schema().bytes_per_block + 512) / 2**30
    probe.close()
    small = {"kv.remote_ttl_s": 1000.0, "kv.remote_gb": 40.5 * block_gb}
    limited = engine(model, **at(socket) | small)
    for i, prompt in enumerate(prompts()):
        ask(limited, f"r{i}", prompt)
    flush(limited)
    with redis.Redis(unix_socket_path=str(socket)) as client:
        keys = client.keys()
        assert 16 <= len(keys) <= 40
        assert all(900_000 < client.pttl(key) <= 1_000_000 for key in keys)
    assert limited.diagnostics().tiers[0].dropped > 0
    limited.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv.remote_url": "http://:s3cret-word@host"}, "the scheme must be redis, rediss or unix"),
        ({"kv.remote_url": "redis://:s3cret-word@host:many"}, "cannot be read"),
        ({"kv.remote_url": "redis://host", "kv.remote_gb": 1e-9}, "remote_gb: 1e-09 GiB hold no block"),
        ({"kv.remote_url": "redis://host", "kv.prefix_caching": False}, "nothing to keep"),
        ({"kv.remote_url": "redis://host", "kv.remote_ttl_s": 0.0}, "greater than 0"),
        ({"kv.remote_url": ""}, "leave it out"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(model: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        engine(model, **settings)
    assert "s3cret" not in str(raised.value)


def test_a_wrong_url_and_a_missing_package_are_told_before_the_model_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config(cli={"model.name": "/no/such/model", "kv.remote_url": "redis://host/x"}, environ={})
    with pytest.raises(ConfigError, match="the URL of the remote KV store: the database must be a number"):
        build_engine(config.config)
    monkeypatch.setitem(sys.modules, "redis", None)
    config = load_config(cli={"model.name": "/no/such/model", "kv.remote_url": "redis://host"}, environ={})
    with pytest.raises(MissingExtraError, match="redis"):
        build_engine(config.config)
    assert "redis://host" not in repr(config.config)
