"""`sagellm cache stat --url` and `clear --url`, and KV that moves from one server's folder to another's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sagellm.cli.cache_server import server_values
from sagellm.diagnostics.watch import counters
from sagellm.engines.build import load
from tests.engines.native.tiered import BLOCK, LENGTH, ask, engine, prompts
from tests.serving.live import serving, wait_until
from tests.tiny_models import save_tiny

TEXT = "1 + 1 = 2, 1 + 2 = 3, 1 + 3 = 4, 1 + 4 = 5, 1 + 5 = 6"


def test_a_server_with_tiers(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = str(tmp_path / "kv")
    tiers = {"kv.host_gb": 0.01, "kv.disk_gb": 0.01, "kv.dir": kv, "kv.miss_attribution": True}
    with serving(load(None, tiers), admin_key="secret") as live:

        def stat() -> Any:
            result = cli("cache", "stat", "--url", f"{live.url}/v1/", "--json")
            assert result.exit_code == 0, result.output
            return json.loads(result.stdout)

        def cached_on_disk() -> bool:
            live.http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 1}).raise_for_status()
            return bool(stat()["tiers"]["nvme"]["cached"] and stat()["hit_tokens"])

        wait_until(cached_on_disk)
        found = stat()
        assert found["device"]["cached"] > 0
        assert found["hit_tokens"] > 0
        assert sum(found["misses"].values()) > 0
        text = cli("cache", "stat", "--url", live.url).output
        for word in ("device", "dram", "nvme", "hit ratio", "computed, by cause"):
            assert word in text
        assert cli("cache", "stat", "--dir", kv).exit_code == 0

        assert "give --admin-key" in cli("cache", "clear", "--url", live.url, "--yes").output
        wrong = cli("cache", "clear", "--url", live.url, "--yes", "--admin-key", "wrong")
        assert wrong.exit_code == 2
        monkeypatch.setenv("SAGELLM_SERVER_ADMIN_KEY", "secret")
        cleared = cli("cache", "clear", "--url", live.url, "--yes")
        assert cleared.exit_code == 0, cleared.output
        wait_until(lambda: stat()["tiers"]["nvme"]["cached"] == 0)
        assert stat()["tiers"]["dram"]["cached"] == 0
        assert stat()["device"]["cached"] == 0
    assert json.loads(cli("cache", "stat", "--dir", kv, "--json").stdout)["blocks"] == 0


def test_what_is_no_server(cli: Any) -> None:
    for name in ("stat", "clear"):
        more = ["--yes", "--admin-key", "k"] if name == "clear" else []
        result = cli("cache", name, "--url", "http://127.0.0.1:1", *more)
        assert result.exit_code == 2
        assert "no" in result.output
        assert result.output.count("\n") == 1


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_kv_moves_to_another_folder_and_hits(cli: Any, tmp_path: Path, codec: str) -> None:
    save_tiny(tmp_path / "model", "llama")
    disk = {"kv.disk_gb": 0.05, "kv.codec": codec}
    old, new, file = str(tmp_path / "old"), str(tmp_path / "new"), str(tmp_path / "file")
    first = engine(tmp_path / "model", **disk, **{"kv.dir": old})
    expected = [ask(first, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts())]
    first.close()
    found = json.loads(cli("cache", "stat", "--dir", old, "--json").stdout)
    assert (found["tokens_per_block"], found["codec"], found["details"]["dtype"]) == (BLOCK, codec, "float32")
    assert found["blocks"] >= 4 * (LENGTH // BLOCK)
    assert cli("cache", "verify", "--dir", old).exit_code == 0
    assert cli("cache", "export", file, "--dir", old).exit_code == 0
    assert cli("cache", "import", file, "--dir", new).exit_code == 0

    second = engine(tmp_path / "model", **disk, **{"kv.dir": new})
    for i, prompt in enumerate(prompts()):
        assert ask(second, f"r{i}", prompt) == (expected[i], LENGTH // BLOCK * BLOCK)
    second.close()

    save_tiny(tmp_path / "other", "llama", seed=1)
    other = engine(tmp_path / "other", **disk, **{"kv.dir": str(tmp_path / "of other")})
    ask(other, "r", prompts()[0])
    other.close()
    refused = cli("cache", "import", file, "--dir", str(tmp_path / "of other"))
    assert refused.exit_code == 2
    assert "model fingerprint" in refused.output


def test_misses_of_all_tiers_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        'sagellm_kv_blocks{model_name="m",state="free"} 3.0',
        'sagellm_kv_tier_misses_total{model_name="m",tier="dram",cause="absent"} 1.0',
        'sagellm_kv_tier_misses_total{model_name="m",tier="nvme",cause="absent"} 2.0',
        'sagellm_kv_tier_misses_total{model_name="m",tier="nvme",cause="corrupt"} 4.0',
    ]
    monkeypatch.setattr(counters, "fetch_metrics", lambda address: "\n".join([*lines, ""]))
    assert server_values(None)["tier_misses"] == {"absent": 3, "corrupt": 4}
