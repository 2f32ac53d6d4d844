"""A fleet file: names of instances, configurations of groups, the shared key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sagellm.control_plane.fleet_instances import (
    FLEET_WIDE,
    INSTANCE_SECTIONS,
    check_groups,
    counted_groups,
    fleet_instances,
    group_of,
    instance_config,
    number_on_host,
    offset_port,
    publishing,
    shared_key,
)
from sagellm.core.config_layers import KEYS, Resolved, given_layer, resolve
from sagellm.core.errors import ConfigError
from sagellm.engines.build import load_config

FILE = """
model: {max_model_len: 2048}
kv: {num_blocks: 100, remote_url: "redis://host"}
events: {endpoint: "tcp://*:0"}
fleet:
  router: round_robin
  groups:
    prefill:
      type: prefilling
      settings: {parallel.tensor: 2, scheduler: {max_batched_tokens: 8192}}
    decode: {type: decoding, count: 2, settings: {kv.num_blocks: 400}}
    vllm: {servers: [{url: "http://host:80", events: "tcp://host:1"}]}
"""


@pytest.fixture
def resolved(tmp_path: Path) -> Resolved:
    file = tmp_path / "fleet.yaml"
    file.write_text(FILE, encoding="utf-8")
    return load_config(file, environ={})


def test_instances_are_numbered_in_their_group(resolved: Resolved) -> None:
    found = fleet_instances(resolved.config.fleet)
    assert [instance.name for instance in found] == ["prefill-0", "decode-0", "decode-1", "vllm-0"]
    assert [instance.is_local for instance in found] == [True, True, True, False]
    assert found[-1].server is not None
    assert found[-1].server.url == "http://host:80"


def test_a_groups_settings_win_over_the_fleets(resolved: Resolved) -> None:
    prefill, decode = instance_config(resolved, "prefill"), instance_config(resolved, "decode")
    assert (prefill.parallel.tensor, decode.parallel.tensor) == (2, 1)
    assert (prefill.kv.num_blocks, decode.kv.num_blocks) == (100, 400)
    assert (prefill.scheduler.max_batched_tokens, decode.scheduler.max_batched_tokens) == (8192, 2048)
    assert prefill.kv.remote_url == decode.kv.remote_url == "redis://host"
    assert prefill.model.max_model_len == 2048


def test_an_instance_has_no_fleet_and_no_event_endpoint(resolved: Resolved) -> None:
    config = instance_config(resolved, "decode")
    assert config.fleet.groups == {}
    assert config.events.endpoint is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv.num_block": 1}, "Did you mean 'kv.num_blocks'"),
        ({"kv.num_blocks": 0}, "fleet.groups.a.settings"),
        ({"server.port": 1}, "instances may differ in keys of"),
        ({"kv.remote_url": "redis://h"}, "a secret is given once"),
        ({"kv": {"num_blocks": 1}, "kv.num_blocks": 2}, "given twice"),
        ({"model.name": "other"}, "the same for all instances"),
    ],
)
def test_settings_that_a_group_cannot_have(settings: dict[str, Any], message: str) -> None:
    given = resolve([given_layer({"fleet.groups": {"a": {"settings": settings}}})])
    with pytest.raises(ConfigError, match=message):
        check_groups(given)


def test_keys_of_the_whole_fleet_exist() -> None:
    assert set(KEYS) >= FLEET_WIDE
    assert {key.partition(".")[0] for key in KEYS} >= INSTANCE_SECTIONS


def test_the_group_of_an_instance(resolved: Resolved) -> None:
    fleet = resolved.config.fleet
    assert group_of("decode-7", fleet) == "decode"
    for name in ("decode", "decode-", "decode-x", "other-0", "-1"):
        with pytest.raises(ConfigError, match="the fleet has prefill-0"):
            group_of(name, fleet)


def test_counted_groups_are_those_of_a_file() -> None:
    counted = counted_groups({"prefilling": 1, "decoding": 2})
    assert counted == {
        "prefill": {"type": "prefilling", "count": 1},
        "decode": {"type": "decoding", "count": 2},
    }
    fleet = resolve([given_layer({"fleet.groups": counted})]).config.fleet
    assert [instance.name for instance in fleet_instances(fleet)] == ["prefill-0", "decode-0", "decode-1"]


def test_the_shared_key_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n", encoding="utf-8")
    given = load_config(environ={"SAGELLM_FLEET_SHARED_KEY": "fedcba9876543210"})
    assert shared_key(given.config.fleet) == "fedcba9876543210"
    given = load_config(environ={"SAGELLM_FLEET_SHARED_KEY_FILE": str(file)})
    assert shared_key(given.config.fleet) == "0123456789abcdef"
    assert shared_key(load_config(environ={}).config.fleet) is None


@pytest.mark.parametrize("text", [None, "short", "x" * 5000])
def test_a_key_file_that_cannot_be_used(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    given = load_config(environ={"SAGELLM_FLEET_SHARED_KEY_FILE": str(file)})
    with pytest.raises(ConfigError, match=r"fleet.shared_key_file"):
        shared_key(given.config.fleet)


@pytest.mark.parametrize(
    ("endpoint", "number", "offset"),
    [
        ("tcp://*:6557", 0, "tcp://*:6557"),
        ("tcp://*:6557", 2, "tcp://*:6559"),
        ("tcp://[fe80::1]:6557", 1, "tcp://[fe80::1]:6558"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("ipc:///tmp/events", 1, "ipc:///tmp/events_dp1"),
        (None, 1, None),
    ],
)
def test_each_instance_publishes_at_a_port_of_its_own(
    endpoint: str | None, number: int, offset: str | None
) -> None:
    """As vLLM's data-parallel ranks do."""
    assert offset_port(endpoint, number) == offset


def test_an_instance_has_its_name_in_the_topic(resolved: Resolved) -> None:
    layer = given_layer({"events.endpoint": "tcp://*:6557", "events.topic": "kv@{instance}@m"})
    events = resolve([layer]).config.events
    made = publishing(instance_config(resolved, "decode"), events, "decode-1", 2)
    assert (made.events.endpoint, made.events.topic) == ("tcp://*:6559", "kv@decode-1@m")
    assert made.kv.num_blocks == 400


FAR = {"addresses": ["tcp://a:1", "tcp://b:1", "tcp://a:2"]}


def test_instances_elsewhere_are_numbered_on_their_host() -> None:
    layer = given_layer({"fleet.groups": {"far": FAR, "here": {}}, "fleet.shared_key": "k" * 16})
    fleet = resolve([layer]).config.fleet
    assert [number_on_host(f"far-{number}", fleet) for number in range(3)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("endpoint", "replay", "groups", "message"),
    [
        ("tcp://*:65534", None, {"a": {"count": 3}}, "3 instances publish at ports from 65534 on"),
        ("tcp://*:6557", "tcp://*:6558", {"a": {"max_count": 2}}, r"replay_endpoint=tcp://\*:6559 or higher"),
        ("tcp://*:6557", "tcp://*:6558", {"far": FAR}, "2 instances take the ports"),
        ("tcp://*:6557", "tcp://*:6559", {"a": {"count": 2}}, ""),
        ("tcp://*:0", "tcp://*:0", {"a": {"count": 9}}, ""),
    ],
)
def test_ports_that_collide_are_refused(
    endpoint: str, replay: str | None, groups: dict[str, Any], message: str
) -> None:
    values = {"fleet.groups": groups, "fleet.shared_key": "k" * 16, "events.endpoint": endpoint}
    made = resolve([given_layer({**values, "events.replay_endpoint": replay or "none"})])
    if not message:
        check_groups(made)
        return
    with pytest.raises(ConfigError, match=message):
        check_groups(made)
