"""`sagellm bench`: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sagellm.cli import bench

pytestmark = pytest.mark.usefixtures("no_collections")

PEER = """
import json, sys
if "{fails}" == "yes":
    sys.exit("out of luck")
row = {{"section": "b", "case": "miss lookup only (hashes ready)", "size": 512, "p50": 5.0, "cpu50": 4.0}}
json.dump({{"version": "9", "rows": [row]}}, open(sys.argv[2], "w"))
"""


@pytest.mark.parametrize("command", [[], ["micro"], ["micro", "prefix_cache"], ["micro", "kv_pool"]])
def test_help(cli: Any, command: list[str]) -> None:
    assert cli("bench", *command, "--help").exit_code == 0


BENCHES = (
    "conversation", "engine", "fairness", "http", "lifetime", "micro eviction", "micro fusion",
    "micro interconnect", "micro kv_pool", "micro overlap", "micro prefix_cache", "micro scheduler_ir",
)  # fmt: skip


def few(cli: Any, *more: str) -> Any:
    """The smallest run: one section, one index, one sample."""
    given = ("--sections", "b", "--index", "radix", "--quick", "--repeats", "1")
    return cli("bench", "micro", "prefix_cache", *given, *more)


def test_prefix_cache_prints_a_table_and_writes_json(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = few(cli, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert "half hit" in result.stdout
    values = json.loads(out.read_text())
    assert values["benchmark"] == "prefix_cache"
    assert {row["size"] for row in values["rows"]} == {512, 1024, 4096}
    assert {row["variant"] for row in values["rows"]} == {"radix"}


def test_kv_pool_prints_a_table(cli: Any) -> None:
    result = cli("bench", "micro", "kv_pool", "--pool", "free_list", "--quick", "--repeats", "1")
    assert result.exit_code == 0, result.stderr
    assert "grow by 1, with quota" in result.stdout


def test_a_peer_stands_beside_ours(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "peer.py"
    script.write_text(PEER.format(fails="no"))
    monkeypatch.setenv("SAGELLM_PEER_SCRIPT", str(script))
    out = tmp_path / "out.json"
    result = few(cli, "--peer", f"vllm={sys.executable}", "-o", str(out))
    assert result.exit_code == 0, result.stderr
    assert "ours beside peers" in result.stdout
    assert "vllm 9" in result.stdout
    [comparison] = json.loads(out.read_text())["comparisons"]
    assert (comparison["peer_value"], comparison["size"]) == (4.0, 512)


def test_what_was_measured_before_a_peer_failed_is_kept(cli: Any, tmp_path: Path) -> None:
    script, out = tmp_path / "peer.py", tmp_path / "out.json"
    script.write_text(PEER.format(fails="yes"))
    result = few(cli, "--peer", f"vllm={sys.executable}", "--peer-script", str(script), "--out", str(out))
    assert result.exit_code == 2
    assert result.stderr == "sagellm: peer vllm, section b of peer.py, exit status 1: out of luck\n"
    assert "half hit" in result.stdout
    assert json.loads(out.read_text())["rows"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--sections", "q"], "prefix_cache has no section 'q'; it has a, b, c, f"),
        (["--index", "nope"], "unknown index 'nope'. Known: "),
        (["--index", ","], "name at least one"),
        (["--policy", "nope"], "unknown policy 'nope'"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--seed", "-1"], "seed must be at least 0"),
        (["--peer", "vllm"], "--peer-script FILE, or SAGELLM_PEER_SCRIPT"),
        (["--peer", "vllm", "--peer-script", "none.py"], "there is no peer script none.py"),
        (["--out", "no/such/folder/out.json"], "name a file in a folder that exists"),
    ],
)
def test_micro_explains_what_it_refuses(cli: Any, arguments: list[str], text: str) -> None:
    result = cli("bench", "micro", "prefix_cache", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_conversation_prints_a_table_and_writes_json(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = cli("bench", "conversation", "--blocks", "10000", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert "66.70%" in result.stdout
    values = json.loads(out.read_text())
    assert values["settings"] == {"policy": "lru", "index": "radix", "seed": 0, "prefix_caching": True}
    assert [one["reused"] for one in values["outcomes"]] == [3347, 0, 792]
    assert [len(one["usages"]) for one in values["outcomes"]] == [100] * 3


def test_conversation_without_reuse_and_each_request(cli: Any) -> None:
    result = cli("bench", "conversation", "--blocks", "1000", "--no-prefix-caching", "--per-request")
    assert result.exit_code == 0, result.stderr
    assert "no prefix caching" in result.stdout
    assert "2048 and more" in result.stdout
    assert result.stdout.count("0.00%") > 300


def test_tables_as_markdown(cli: Any) -> None:
    result = cli("bench", "conversation", "--blocks", "1000", "--markdown")
    assert result.exit_code == 0, result.stderr
    assert "| prompts | pool | requests |" in result.stdout
    assert "| multi-turn, 20 conversations of 5 turns | 1,000 | 100 |" in result.stdout


@pytest.mark.parametrize("command", BENCHES)
def test_every_bench_has_markdown(cli: Any, command: str) -> None:
    assert "--markdown" in cli("bench", *command.split(), "--help").stdout


def test_micro_eviction_times_every_policy(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    given = ("--policies", "lru,adaptive", "--quick", "--repeats", "1", "--sections", "ue")
    result = cli("bench", "micro", "eviction", *given, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {(row["section"], row["variant"]) for row in rows} == {
        (section, policy) for section in "ue" for policy in ("lru", "adaptive")
    }


def test_micro_fusion_times_both_ways(cli: Any) -> None:
    pytest.importorskip("torch")
    given = ("--quick", "--repeats", "1", "--sections", "ag", "--markdown")
    result = cli("bench", "micro", "fusion", *given)
    if "a C++ compiler is needed" in result.stderr:
        pytest.skip("no C++ compiler")
    assert result.exit_code == 0, result.stderr
    for way in ("kernels", "torch"):
        assert f"| g | gated activation | {way} | 8 |" in result.stdout
        assert f"| a | attention of a prompt | {way} | 256 |" in result.stdout


def test_http_measures_a_server_started_for_it(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    given = ("--requests", "4", "--repeats", "1", "--concurrency", "1", "--tokens", "3")
    result = cli("bench", "http", *given, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    values = json.loads(out.read_text())
    assert (values["server"], len(values["runs"])) == ("sagellm", 6)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--answers", "nope"], "there is no answer 'nope'; there are list, one-token, stream"),
        (["--concurrency", "0"], "the requests at a time must be from 1 to 1024"),
        (["--concurrency", "x"], "the requests at a time must be from 1 to 1024"),
        (["--requests", "0"], "num requests must be at least 1, got 0"),
        (["--url", "nowhere"], "write the address of a server, for example http://127.0.0.1:"),
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9", "--model", "x"], "leave out the model, or --url"),
        (["--out", "no/such/folder/x.json"], "name a file in a folder that exists"),
    ],
)
def test_http_explains_what_it_refuses(cli: Any, arguments: list[str], text: str) -> None:
    result = cli("bench", "http", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--blocks", "0"], "--blocks '0': write counts from 1 on"),
        (["--blocks", "10,x"], "--blocks '10,x': write counts from 1 on"),
        (["--blocks", ""], "--blocks '': write counts from 1 on"),
        (["--blocks", "10"], "a pool of 10 blocks does not hold the longest prompt"),
        (["--policy", "nope"], "unknown policy 'nope'"),
        (["--index", "nope"], "unknown index 'nope'"),
        (["--out", "."], "cannot write ."),
    ],
)
def test_conversation_explains_what_it_refuses(cli: Any, arguments: list[str], text: str) -> None:
    result = cli("bench", "conversation", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert result.stderr.count("\n") == 1


def test_lists_are_written_with_commas() -> None:
    assert bench._split(" radix, hashed ,") == ("radix", "hashed")
    assert bench._numbers("--blocks", "10, 5") == (10, 5)
