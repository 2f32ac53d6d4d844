"""Precedence, origins, and errors that say where a wrong key stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.config import Config
from sagellm.core.config_layers import (
    KEYS,
    Layer,
    env_layer,
    env_name,
    flatten,
    given_layer,
    preset_layer,
    resolve,
)
from sagellm.core.errors import ConfigError


def test_no_layer_gives_the_defaults() -> None:
    resolved = resolve([])
    assert resolved.config == Config()
    assert set(resolved.origins.values()) == {"default"}
    assert tuple(resolved.origins) == KEYS


def test_precedence_is_cli_over_env_over_file_over_preset_over_default() -> None:
    layers = [
        preset_layer("laptop"),
        Layer("file sage.yaml", {"scheduler": {"max_batched_tokens": 600, "max_num_seqs": 10}}),
        env_layer({"SAGELLM_SCHEDULER_MAX_NUM_SEQS": "11", "SAGELLM_ENGINE_SEED": "5"}),
        given_layer({"engine.seed": "6"}),
    ]
    resolved = resolve(layers)
    assert resolved.config.kv.memory_fraction == 0.15
    assert resolved.config.scheduler.max_batched_tokens == 600
    assert resolved.config.scheduler.max_num_seqs == 11
    assert resolved.config.engine.seed == 6
    assert resolved.config.kv.block_size == 16
    assert {key: resolved.origins[key] for key in ("kv.memory_fraction", "kv.block_size", "engine.seed")} == {
        "kv.memory_fraction": "preset laptop",
        "kv.block_size": "default",
        "engine.seed": "command line",
    }
    assert resolved.origins["scheduler.max_batched_tokens"] == "file sage.yaml"
    assert resolved.origins["scheduler.max_num_seqs"] == "environment SAGELLM_SCHEDULER_MAX_NUM_SEQS"


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=5))
def test_the_last_layer_wins(sizes: list[int]) -> None:
    resolved = resolve([Layer(f"layer {i}", {"kv.block_size": size}) for i, size in enumerate(sizes)])
    assert resolved.config.kv.block_size == sizes[-1]
    assert resolved.origins["kv.block_size"] == f"layer {len(sizes) - 1}"


def test_nested_and_dotted_keys_mean_the_same() -> None:
    assert (
        flatten({"kv": {"block_size": 8}}, "x") == flatten({"kv.block_size": 8}, "x") == {"kv.block_size": 8}
    )


def test_an_empty_section_of_a_file_is_nothing() -> None:
    assert resolve([Layer("file", {"kv": None, "log": {}})]).config == Config()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"kv": {"blok_size": 1}},
            r"unknown key 'kv.blok_size' in file sage.yaml. Did you mean 'kv.block_size'\?",
        ),
        (
            {"kvs": {"block_size": 1}},
            r"unknown key 'kvs.block_size' in file sage.yaml. Did you mean 'kv.block_size'\?",
        ),
        ({"block_size": 1}, r"unknown key 'block_size' in file sage.yaml. Did you mean 'kv.block_size'\?"),
        ({"kv": 3}, r"'kv' in file sage.yaml is a section, not a value; its keys are kv.block_size"),
        (
            {"kv": {"block_size": {"a": 1}}},
            r"kv.block_size = \{'a': 1\} \(file sage.yaml\).*valid integer.*tokens per block",
        ),
        ({"kv": {"block_size": 0}}, r"kv.block_size = 0 \(file sage.yaml\).*greater than or equal to 1"),
        ({"scheduler": {"max_num_seqs": 9999}}, r"scheduler: max_batched_tokens \(2048\) must be at least"),
        ({3: {"x": 1}}, r"unknown key '3.x' in file sage.yaml"),
    ],
)
def test_errors_name_key_value_and_layer(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve([Layer("file sage.yaml", values)])


def test_all_wrong_values_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"kv.block_size = 0 .*; server.port = 70000"):
        resolve([Layer("file", {"kv.block_size": 0, "server.port": 70000})])


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_a_variable_of_its_own(key: str) -> None:
    name = env_name(key)
    assert name.startswith("SAGELLM_")
    assert sum(env_name(other) == name for other in KEYS) == 1


def test_the_environment_reads_text() -> None:
    config = resolve(
        [
            env_layer(
                {
                    "SAGELLM_KV_PREFIX_CACHING": "false",
                    "SAGELLM_KV_NUM_BLOCKS": "None",
                    "SAGELLM_SCHEDULER_PASSES": "chunked_prefill, memory_aware_preemption",
                    "SAGELLM_KV_MEMORY_FRACTION": "0.5",
                    "PATH": "ignored",
                }
            )
        ]
    ).config
    assert config.kv.prefix_caching is False
    assert config.kv.num_blocks is None
    assert config.kv.memory_fraction == 0.5
    assert config.scheduler.passes == ("chunked_prefill", "memory_aware_preemption")


def test_an_unknown_variable_is_a_warning_that_names_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    assert env_layer({"SAGELLM_KV_BLOCKSIZE": "secret"}).values == {}
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert re.match(
        r"unknown environment variable SAGELLM_KV_BLOCKSIZE is ignored.*'SAGELLM_KV_BLOCK_SIZE'",
        record.getMessage(),
    )
    assert "secret" not in record.getMessage()


KUBERNETES = {
    "SERVICE_HOST": "10.0.0.11",
    "SERVICE_PORT": "8000",
    "SERVICE_PORT_HTTP": "8000",
    "PORT": "tcp://10.0.0.11:8000",
    "PORT_8000_TCP": "tcp://10.0.0.11:8000",
    "PORT_8000_TCP_PROTO": "tcp",
    "PORT_8000_TCP_PORT": "8000",
    "PORT_8000_TCP_ADDR": "10.0.0.11",
}
"""What a Service puts into the environment of every pod of its namespace, behind its name."""


@pytest.mark.parametrize("service", ["SAGELLM", "SAGELLM_SERVER", "SAGELLM_KV", "SAGELLM_A_B"])
def test_variables_of_a_kubernetes_service_are_ignored(
    service: str, caplog: pytest.LogCaptureFixture
) -> None:
    variables = {f"{service}_{name}": text for name, text in KUBERNETES.items()}
    assert env_layer(variables).values == {}
    assert not caplog.records


def test_a_wrong_value_of_a_known_variable_is_an_error_still() -> None:
    with pytest.raises(ConfigError, match="environment SAGELLM_SERVER_PORT"):
        resolve([env_layer({"SAGELLM_SERVER_PORT": "tcp://10.0.0.11:8000"})])


def test_a_port_without_the_section_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert env_layer({"SAGELLM_PORT": "8000"}).values == {}
    assert "'SAGELLM_SERVER_PORT'" in caplog.text


def test_reserved_variables_are_no_keys() -> None:
    reserved = {"SAGELLM_TRACES": "x", "SAGELLM_CONFIG": "y", "SAGELLM_PRESET": "z"}
    assert env_layer(reserved).values == {}


def test_a_text_that_is_no_number_is_an_error_with_its_variable() -> None:
    with pytest.raises(ConfigError, match="environment SAGELLM_KV_BLOCK_SIZE"):
        resolve([env_layer({"SAGELLM_KV_BLOCK_SIZE": "sixteen"})])


def test_command_line_values_may_be_texts_or_values() -> None:
    config = resolve([given_layer({"server": {"port": "0"}, "kv.num_blocks": 7})]).config
    assert (config.server.port, config.kv.num_blocks) == (0, 7)
    with pytest.raises(ConfigError, match="in command line"):
        given_layer({"kv.num_block": 7})


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_secret_is_an_error_in_every_layer(text: str) -> None:
    for layer in (
        Layer("file sage.yaml", {"server": {"api_key": text}}),
        Layer("file sage.yaml", {"server": {"api_key": None}}),
        env_layer({"SAGELLM_SERVER_API_KEY": text}),
    ):
        with pytest.raises(ConfigError, match=f"server.api_key in {layer.name} is empty"):
            resolve([layer])
    with pytest.raises(ConfigError, match="is empty"):
        given_layer({"server.api_key": text})


@pytest.mark.parametrize("text", ["none", "null", "x"])
def test_a_secret_is_the_text_itself(text: str) -> None:
    assert resolve([given_layer({"server.api_key": text})]).config.server.api_key == text


def test_a_secret_that_is_wrong_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"server\.api_key") as refused:
        resolve([Layer("file", {"server.api_key": 987654})])
    assert "987654" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("server.port", True, "should not be true or false"),
        ("engine.threads", False, "should not be true or false"),
        ("kv.memory_fraction", True, "should not be true or false"),
        ("model.name", False, "should not be true or false"),
        ("kv.prefix_caching", 1, "should be true or false"),
        ("kv.prefix_caching", 0.0, "should be true or false"),
        ("model.revision", 123, "valid string"),
        ("model.name", 1.5, "valid string"),
        ("log.level", 3, "should be 'debug'"),
        ("scheduler.passes", [1], "valid string"),
        ("server.cors_origins", ["page"], "match pattern"),
    ],
)
def test_a_value_of_another_kind_is_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        resolve([Layer("file sage.yaml", {key: value})])
    assert key in str(refused.value)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [Layer("file sage.yaml", {"kv": {"swap_space_gb": 4.0}})],
        lambda: [Layer("file sage.yaml", {"kv.swap_space_gb": 4.0})],
        lambda: [given_layer({"kv.swap_space_gb": "4"})],
        lambda: [env_layer({"SAGELLM_KV_SWAP_SPACE_GB": "4"})],
        lambda: [env_layer({"SAGELLM_KV_SWAP_SPACE_GB": ""})],
    ],
    ids=["file", "dotted in a file", "--set", "environment", "empty in the environment"],
)
def test_the_swap_space_of_earlier_versions_names_the_host_tier(layers: Callable[[], list[Layer]]) -> None:
    with pytest.raises(ConfigError, match=r"set kv\.host_gb, whose host memory") as refused:
        resolve(layers())
    assert "swap" in str(refused.value).lower()


def test_a_key_in_both_forms_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv.block_size is given twice in file"):
        resolve([Layer("file", {"kv.block_size": 8, "kv": {"block_size": 8}})])


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.name: '\\udcff' is not UTF-8"):
        env_layer({"SAGELLM_MODEL_NAME": "\udcff"})


@pytest.mark.parametrize("text", ["", "none"])
def test_an_empty_list_as_text(text: str) -> None:
    assert resolve([given_layer({"server.cors_origins": text})]).config.server.cors_origins == ()


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"a": 0.5}, r"kv.tenant_shares\['a'\] = 0.5 .*valid dictionary \[.*{NAME: {guaranteed: 0.25, "),
        ({"a": {"guarantee": 0.5}}, r"unknown key 'kv.tenant_shares.a.guarantee' in .*mean 'guaranteed'"),
    ],
)
def test_an_error_names_the_place_inside_of_a_value(shares: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve([given_layer({"kv.tenant_shares": shares}, "command line")])
