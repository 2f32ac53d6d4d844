"""The section `fleet`: what it takes and refuses."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.core.config_layers import given_layer, resolve
from sagellm.core.errors import ConfigError
from sagellm.core.fleet_config import FleetConfig
from sagellm.core.protocols.router import InstanceType


def fleet_of(**values: Any) -> FleetConfig:
    layer = given_layer({f"fleet.{name}": value for name, value in values.items()})
    return resolve([layer]).config.fleet


def test_without_groups_there_is_no_fleet() -> None:
    assert fleet_of().groups == {}


def test_a_group_counts_its_instances() -> None:
    fleet = fleet_of(
        shared_key="k" * 16,
        groups={
            "prefill": {"type": "prefilling"},
            "decode": {"type": "decoding", "count": 2},
            "far": {"addresses": ["tcp://10.0.0.7:5000", "tcp://node-2:5000"]},
            "vllm": {"servers": [{"url": "http://10.0.0.8:80", "events": "tcp://10.0.0.8:5000"}]},
        },
    )
    assert [group.num_instances for group in fleet.groups.values()] == [1, 2, 2, 1]
    assert [group.is_local for group in fleet.groups.values()] == [True, True, False, False]
    assert fleet.groups["prefill"].type is InstanceType.PREFILLING
    assert FleetConfig.model_validate(fleet.model_dump(mode="json")) == fleet  # as processes get it


def test_a_fleet_goes_to_another_process_as_json() -> None:
    groups = {
        "far": {"addresses": ["tcp://10.0.0.7:5000"]},
        "vllm": {"servers": [{"url": "http://10.0.0.8:80"}]},
        "here": {"chips": 2, "settings": {"kv.num_blocks": 9}},
    }
    fleet = fleet_of(shared_key="k" * 16, groups=groups)
    assert FleetConfig.model_validate(fleet.model_dump(mode="json")) == fleet


GROUP = "a"


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"count": 1, "addresses": ["tcp://a:1"]}, "count and addresses exclude each other"),
        ({"type": "embedding"}, "no engine computes embeddings yet"),
        ({"type": "prefill"}, "'prefilling'"),
        ({"addresses": ["tcp://a:1"], "chips": 2}, "chips: only for instances that are started here"),
        ({"servers": [{"url": "http://a"}], "settings": {"kv.num_blocks": 9}}, "settings: only for"),
        ({"servers": [{"url": "http://a"}], "type": "decoding"}, "their type is general, not decoding"),
        ({"min_count": 2}, "min_count needs max_count"),
        ({"count": 5, "max_count": 4}, "count .5. lies between min_count .1. and max_count .4."),
        ({"count": 0}, "all groups are empty"),
        ({"count": True}, "should not be true or false"),
        ({"addresses": ["tcp://*:1"]}, "match pattern"),
        ({"addresses": ["tcp://a:1", "tcp://a:1"]}, "named twice"),
        ({"servers": [{"url": "http://user:word@a"}]}, "match pattern"),
        ({"servers": [{"url": "http://a", "replay": "tcp://a:1"}]}, "replay needs events"),
        ({"cuont": 2}, r"unknown key 'fleet.groups.a.cuont' in command line. Did you mean 'count'\?"),
        ({"servers": [{"url": "http://a"}, {"ulr": "b"}]}, r"fleet.groups.a.servers.1.ulr.*mean 'url'\?"),
        ({"q": "red"}, "unknown key 'fleet.groups.a.q' in command line. Known: addresses,"),
        ({"kv.num_blocks": 9}, "keys of the configuration stand in fleet.groups.a.settings"),
        ({"count": 2000}, "less than or equal to 1024"),
    ],
)
def test_a_group_that_cannot_be(group: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fleet_of(groups={GROUP: group}, shared_key="k" * 16)


@pytest.mark.parametrize("name", ["", "A", "1a", "a_b", "a-", "a.b", "a" * 41, "a\n"])
def test_a_group_is_named_as_a_part_of_a_host_name(name: str) -> None:
    with pytest.raises(ConfigError, match="small letters, digits and hyphens"):
        fleet_of(groups={name: {}})


def test_one_server_at_two_places() -> None:
    groups = {"a": {"servers": [{"url": "http://h/"}]}, "b": {"servers": [{"url": "http://h"}]}}
    with pytest.raises(ConfigError, match="http://h is named twice"):
        fleet_of(groups=groups)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lease_s": 0.3}, "must be at least 3 times heartbeat_s"),
        ({"shared_key": "short"}, "too short: 16 characters at least"),
        ({"shared_key": "k" * 16, "shared_key_file": "key"}, "exclude each other"),
        ({"groups": {"a": {"addresses": ["tcp://a:1"]}}}, "SAGELLM_FLEET_SHARED_KEY"),
        ({"groups": {"a": {"count": 1000}, "b": {"max_count": 1000}}}, "at most 1024"),
    ],
)
def test_a_fleet_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fleet_of(**values)


def test_the_key_is_not_shown() -> None:
    key = "secret-secret-secret"
    assert key not in repr(fleet_of(shared_key=key))
    with pytest.raises(ConfigError) as error:
        fleet_of(shared_key="hush-hush")
    assert "hush-hush" not in str(error.value)
