"""Keys, ranges and presets of the configuration."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from sagellm.core.config import PRESETS, SECRET_KEYS, Config, KVConfig, SchedulerConfig
from sagellm.core.config_layers import KEYS, describe, given_layer, preset_layer, resolve
from sagellm.core.errors import ConfigError
from sagellm.core.ports import SagePorts


def test_defaults_are_those_of_the_specification() -> None:
    config = Config()
    assert config.model.name is None
    assert (config.kv.block_size, config.kv.index, config.kv.pool, config.kv.eviction) == (
        16,
        "radix",
        "free_list",
        "adaptive",
    )
    assert config.kv.prefix_caching is True
    assert (config.scheduler.max_num_seqs, config.scheduler.max_batched_tokens) == (64, 2048)
    assert (config.scheduler.strategy, config.scheduler.passes) == ("priority", None)
    assert config.server.port == SagePorts.HTTP


def test_frozen_and_closed() -> None:
    with pytest.raises(ValidationError):
        Config().kv.block_size = 32
    with pytest.raises(ValidationError):
        KVConfig.model_validate({"blocksize": 1})


@pytest.mark.parametrize("key", KEYS)
def test_every_key_says_what_it_means(key: str) -> None:
    assert len(describe(key)) > 8


def test_flat_has_every_key_in_order() -> None:
    assert tuple(Config().flat()) == KEYS


def test_the_api_key_is_not_in_the_repr() -> None:
    config = Config.model_validate({"server": {"api_key": "hush-hush"}})
    assert "hush-hush" not in repr(config)
    assert set(KEYS) >= SECRET_KEYS


@pytest.mark.parametrize(
    ("device", "given", "share"),
    [("cpu", None, 0.25), ("cuda:0", None, 0.8), ("cpu", 0.5, 0.5), ("cuda", 0.3, 0.3)],
)
def test_memory_share(device: str, given: float | None, share: float) -> None:
    assert KVConfig(memory_fraction=given).memory_share(device) == share


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5])
def test_memory_fraction_lies_between_nothing_and_everything(share: float) -> None:
    with pytest.raises(ValidationError):
        KVConfig(memory_fraction=share)


def test_the_token_budget_covers_the_rows() -> None:
    with pytest.raises(ValidationError, match="each running request computes one token"):
        SchedulerConfig(max_num_seqs=100, max_batched_tokens=99)
    assert SchedulerConfig(max_num_seqs=100, max_batched_tokens=100).max_num_seqs == 100


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", "npu:0"])
def test_devices(device: str) -> None:
    assert Config.model_validate({"model": {"device": device}}).model.device == device


def test_a_device_that_is_no_name_is_refused() -> None:
    with pytest.raises(ValidationError):
        Config.model_validate({"model": {"device": "GPU 0"}})


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name: str) -> None:
    resolved = resolve([preset_layer(name)])
    for key in PRESETS[name]:
        assert resolved.origins[key] == f"preset {name}"


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'laptop'"):
        preset_layer("lap_top")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"kv.tenant_shares": {"a": {"guaranteed": 0.6}, "b": {"guaranteed": 0.6}}}, "sum to 1.2"),
        ({"kv.tenant_shares": {"a": {"guaranteed": 0.6, "ceiling": 0.5}}}, "below what is guaranteed"),
        ({"kv.tenant_shares": "a=1"}, "given as JSON"),
        ({"kv.sharing_groups": {"g": ["a"], "h": ["a"]}}, "named twice"),
        ({"kv.sharing_groups": {"g": [""]}}, "without a name"),
        ({"events.replay_endpoint": "tcp://*:1"}, "needs endpoint"),
        ({"events.endpoint": "tcp://*:99999"}, "port 99999"),
    ],
)
def test_wrong_shares_groups_and_endpoints_are_told(values: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve([given_layer(values)])


def test_shares_can_be_given_in_any_form() -> None:
    shares = {"a": {"guaranteed": 0.25, "ceiling": 0.5}}
    for given in (
        {"kv.tenant_shares": shares},
        {"kv": {"tenant_shares": shares}},
        {"kv.tenant_shares": '{"a": {"guaranteed": 0.25, "ceiling": 0.5}}'},
    ):
        found = resolve([given_layer(given)]).config.kv.tenant_shares
        assert (found["a"].guaranteed, found["a"].ceiling) == (0.25, 0.5)
