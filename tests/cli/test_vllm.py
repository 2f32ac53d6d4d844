"""`sagellm vllm serve`: the command that it makes of vLLM's flags and ours."""

from __future__ import annotations

import importlib.util
import json
import shlex
from typing import Any

import pytest

from sagellm.cli.vllm import SCHEDULER

OTHER = '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}'

FAILS = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}'


def composed(cli: Any, *arguments: str) -> tuple[list[str], dict[str, Any]]:
    """The arguments of vLLM, and the connector's configuration among them."""
    result = cli("vllm", "serve", "folder/model", *arguments, "--show-command")
    assert result.exit_code == 0, result.output
    *words, name, config = shlex.split(result.stdout)
    assert name == "--kv-transfer-config"
    return words, json.loads(config)


def test_by_default_it_only_watches(cli: Any) -> None:
    words, config = composed(cli)
    assert words == ["vllm", "serve", "folder/model"]
    assert config == {
        "kv_connector": "SageConnector",
        "kv_connector_module_path": "sagellm.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "mode": "shadow",
            "policy": "adaptive",
            "options": {},
            "hints": [],
            "report_s": 300.0,
        },
    }


def test_flags_of_vllm_are_passed_on_in_their_order(cli: Any) -> None:
    flags = ["--max-model-len", "4096", "--enforce-eager", "-tp", "2", "--served-model-name", "a b"]
    ours = ["--sage-mode", "on", "--sage-policy", "lru", "--sage-report-s", "0"]
    words, config = composed(cli, *flags[:3], *ours, *flags[3:])
    assert words[3:] == flags
    extra = config["kv_connector_extra_config"]
    assert (extra["mode"], extra["policy"], extra["report_s"]) == ("on", "lru", 0)


@pytest.mark.parametrize(
    "given",
    [["--kv-transfer-config", OTHER], [f"--kv-transfer-config={OTHER}"], ["--kv_transfer_config", OTHER]],
)
def test_another_connector_stays_beside_ours(cli: Any, given: list[str]) -> None:
    words, config = composed(cli, *given, "--sage-option", "max_records=1000")
    assert words[3:] == []
    assert (config["kv_connector"], config["kv_role"]) == ("MultiConnector", "kv_consumer")
    other, ours = config["kv_connector_extra_config"]["connectors"]
    assert other == json.loads(OTHER)
    assert ours["kv_connector_extra_config"]["options"] == {"max_records": 1000}


def test_what_vllm_reads_of_the_other_connector_stays_in_force(cli: Any) -> None:
    own = {"engine_id": "e1", "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_port": 7}
    other = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"a": 1}, **own}
    _, config = composed(cli, "--kv-transfer-config", json.dumps(other))
    assert {name: config[name] for name in own} == own
    member = config["kv_connector_extra_config"]["connectors"][0]
    assert member == {name: value for name, value in other.items() if name != "engine_id"}


def test_a_multi_connector_gets_one_member_more(cli: Any) -> None:
    members = [{"kv_connector": "A", "kv_role": "kv_both"}, {"kv_connector": "B", "kv_role": "kv_both"}]
    extra = {"connectors": members, "other": 1}
    other = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    _, config = composed(cli, "--kv-transfer-config", json.dumps(other))
    found = config["kv_connector_extra_config"]
    assert [each["kv_connector"] for each in found["connectors"]] == ["A", "B", "SageConnector"]
    assert {**config, "kv_connector_extra_config": {**found, "connectors": members}} == other


STORE = ["--sage-host-gb", "4", "--sage-disk-gb", "20", "--sage-dir", "/var/kv"]


def test_a_store_runs_beside_the_policy(cli: Any) -> None:
    _, config = composed(cli, *STORE)
    assert (config["kv_connector"], config["kv_load_failure_policy"]) == ("MultiConnector", "recompute")
    policy, store = config["kv_connector_extra_config"]["connectors"]
    assert (policy["kv_connector"], store["kv_connector"]) == ("SageConnector", "SageStoreConnector")
    extra = {"host_gb": 4.0, "disk_gb": 20.0, "dir": "/var/kv", "policy": "adaptive", "options": {}}
    assert store["kv_connector_extra_config"] == extra


def test_a_tilde_is_the_home_folder(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/someone")
    _, config = composed(cli, "--sage-disk-gb", "1", "--sage-dir", "~/kv")
    store = config["kv_connector_extra_config"]["connectors"][1]
    assert store["kv_connector_extra_config"]["dir"] == "/srv/someone/kv"


def test_a_store_beside_another_connector(cli: Any) -> None:
    _, config = composed(cli, "--kv-transfer-config", OTHER, *STORE)
    members = config["kv_connector_extra_config"]["connectors"]
    assert [each["kv_connector"] for each in members] == [
        "NixlConnector",
        "SageConnector",
        "SageStoreConnector",
    ]
    assert (config["kv_role"], config["kv_load_failure_policy"]) == ("kv_consumer", "recompute")


def test_a_strategy_brings_our_scheduler(cli: Any) -> None:
    words, _ = composed(cli, "--sage-strategy", "fair", "--additional-config", '{"a": 1}', "--seed", "3")
    assert words[3:8] == ["--seed", "3", "--scheduler-cls", SCHEDULER, "--additional-config"]
    assert json.loads(words[8]) == {"a": 1, "sagellm": {"strategy": "fair", "options": {}}}


REFUSED = {
    "no such strategy": (["--sage-strategy", "best"], "adaptive, fair"),
    "a strategy that admits by itself": (["--sage-strategy", "vllm-like"], "admits by itself"),
    "no such policy": (["--sage-policy", "best"], "adaptive, arc"),
    "no such mode": (["--sage-mode", "off"], "use shadow or on"),
    "no such option": (["--sage-option", "speed=9"], "has no option 'speed'"),
    "an option without a value": (["--sage-option", "speed"], "write KEY=VALUE"),
    "an option that vLLM's pool gives": (["--sage-option", "capacity=9"], "leave it out"),
    "a negative time": (["--sage-report-s", "-1"], "a number of seconds"),
    "a disk without a folder": (["--sage-disk-gb", "1"], "belong together"),
    "a folder without a size": (["--sage-dir", "/var/kv"], "set host_gb"),
    "a folder without a size, beside host memory": (
        ["--sage-host-gb", "1", "--sage-dir", "/var/kv"],
        "belong together",
    ),
    "a folder of an unknown user": (["--sage-disk-gb", "1", "--sage-dir", "~no one/kv"], "no such user"),
    "a folder that cannot be made": (
        ["--sage-disk-gb", "1", "--sage-dir", "/dev/null/kv"],
        "cannot write to",
    ),
    "a negative size": (["--sage-host-gb", "-1"], "a number of GiB"),
    "requests that fail with a block": (
        ["--sage-host-gb", "1", "--kv-transfer-config", FAILS],
        "must be recompute",
    ),
    "no JSON": (["--kv-transfer-config", "{"], "is no JSON"),
    "a flag without its value": (["--kv-transfer-config"], "is no JSON"),
    "no object": (["--kv-transfer-config", "[]"], "write a JSON object"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_ends_with_2(cli: Any, arguments: list[str], message: str) -> None:
    result = cli("vllm", "serve", "folder/model", *arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_extra_is_named(cli: Any) -> None:
    result = cli("vllm", "serve", "folder/model")
    assert result.exit_code == 2
    assert "[vllm]" in result.output
