"""The instances that a fleet section describes, with their names and configurations.

fleet = resolved.config.fleet
for instance in fleet_instances(fleet):       # prefill-0, decode-0, decode-1
    config = instance_config(resolved, instance.group)
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.core.config import SECRET_KEYS, Config, EventsConfig
from sagellm.core.config_layers import Layer, Resolved, flatten, resolve
from sagellm.core.errors import ConfigError, nearest
from sagellm.core.files import read_text
from sagellm.core.fleet_config import MIN_KEY_CHARACTERS, FleetConfig, PlainServerConfig
from sagellm.core.ports import SagePorts
from sagellm.core.protocols.router import InstanceType

INSTANCE_SECTIONS = frozenset({"model", "kv", "scheduler", "speculative", "engine", "parallel"})
"""Sections that a group's settings may change; the others are the front's."""
FLEET_WIDE = frozenset(
    {
        "engine.backend", "engine.seed", "kv.block_size", "model.chat_template", "model.dtype",
        "model.max_model_len", "model.name", "model.quantization", "model.revision", "model.served_name",
        "model.special_tokens_in_messages",
    }
)  # fmt: skip
"""Keys in which instances may not differ: a request may go on at another instance with the same tokens, and
the front counts blocks for all."""
MAX_KEY_BYTES = 4096
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class FleetInstance:
    """One instance of a fleet file.

    `name`: its group and number, as `decode-1`. `address`: of one that runs elsewhere. `server`: a plain
    server. With neither, this host starts the instance.
    """

    name: str
    group: str
    type: InstanceType
    address: str = ""
    server: PlainServerConfig | None = None

    @property
    def is_local(self) -> bool:
        return not self.address and self.server is None


def fleet_instances(fleet: FleetConfig) -> tuple[FleetInstance, ...]:
    """Every instance at the start, by group in the file's order."""
    found = []
    for name, group in fleet.groups.items():
        for number in range(group.num_instances):
            address = group.addresses[number] if group.addresses else ""
            server = group.servers[number] if group.servers else None
            found.append(FleetInstance(instance_name(name, number), name, group.type, address, server))
    return tuple(found)


def instance_name(group: str, number: int) -> str:
    """As Kubernetes names the hosts of a StatefulSet."""
    return f"{group}-{number}"


def group_of(name: str, fleet: FleetConfig) -> str:
    """The group of an instance, also of one that autoscaling adds. Raises `ConfigError` for another name."""
    group, _, number = name.rpartition("-")
    if group not in fleet.groups or not (number.isascii() and number.isdigit()):
        names = ", ".join(instance.name for instance in fleet_instances(fleet)[:20])
        raise ConfigError(f"no instance {name!r}: the fleet has {names or 'none'}")
    return group


def elsewhere(name: str, fleet: FleetConfig) -> FleetInstance:
    """An instance with an address, by name. Raises `ConfigError` for another name."""
    group_of(name, fleet)
    for instance in fleet_instances(fleet):
        if instance.name == name and instance.address:
            return instance
    raise ConfigError(
        f"{name} has no address in the fleet file: list its host in fleet.groups.GROUP.addresses, as "
        f"tcp://HOST:{int(SagePorts.INSTANCE)}; those with `count` are started by the front's host"
    )


def instance_config(resolved: Resolved, group: str) -> Config:
    """The configuration of a group's instances: the fleet's, with the group's settings over it.

    Its section `fleet` is empty, and it publishes no KV events (see `publishing`). Raises
    `ConfigError` for settings that instances of a fleet cannot have.
    """
    settings = _settings(resolved.config.fleet, group)
    values = {
        key: value
        for key, value in resolved.config.flat().items()
        if key.partition(".")[0] not in ("fleet", "events") and (value or key not in SECRET_KEYS)
    }
    layers = [
        Layer("the fleet's configuration", values, resolved.origins),
        Layer(f"fleet.groups.{group}.settings", settings),
    ]
    return resolve(layers).config


def check_groups(resolved: Resolved) -> None:
    """Raises `ConfigError` if a group's settings cannot be used, before anything is started."""
    for name in resolved.config.fleet.groups:
        instance_config(resolved, name)
    _check_event_ports(resolved.config)


def publishing(config: Config, events: EventsConfig, name: str, number: int) -> Config:
    """An instance's configuration with the KV events that the fleet's says. `number`: on its host.

    The ports are those of vLLM's data-parallel ranks: the configured one plus the number. `{instance}` in the
    topic is its name.
    """
    ends = {end: offset_port(getattr(events, end), number) for end in _EVENT_ENDS}
    topic = events.topic.replace("{instance}", name)
    return config.model_copy(update={"events": events.model_copy(update={**ends, "topic": topic})})


_EVENT_ENDS = ("endpoint", "replay_endpoint")


def offset_port(endpoint: str | None, number: int) -> str | None:
    """An endpoint for the instance of this number: tcp://*:5557 and 2 -> tcp://*:5559.

    The rule of vLLM's `ZmqEventPublisher.offset_endpoint_port`. A path gets an ending, port 0 stays any port.
    """
    if endpoint is None or not number or _port(endpoint) == 0:
        return endpoint
    if (port := _port(endpoint)) is None:
        return f"{endpoint}_dp{number}"
    return f"{endpoint.rpartition(':')[0]}:{port + number}"


def _port(endpoint: str) -> int | None:
    text = endpoint.rpartition(":")[2]
    return int(text) if endpoint.startswith("tcp:") and text.isascii() and text.isdigit() else None


def number_on_host(name: str, fleet: FleetConfig) -> int:
    """How many instances of the file come before this one on its host."""
    hosts = {each.name: _host(each) for each in fleet_instances(fleet) if each.address}
    before = itertools.takewhile(lambda other: other != name, hosts)
    return sum(hosts[other] == hosts[name] for other in before)


def _host(instance: FleetInstance) -> str:
    return instance.address.rpartition(":")[0]


def _check_event_ports(config: Config) -> None:
    """Raises `ConfigError` if the ports for KV events of one host collide."""
    first, replay = (_port(getattr(config.events, end) or "") for end in _EVENT_ENDS)
    groups = config.fleet.groups.values()
    num_local = sum(max(group.num_instances, group.max_count or 0) for group in groups if group.is_local)
    hosts = Counter(_host(each) for each in fleet_instances(config.fleet) if each.address)
    num = max(num_local, *hosts.values(), 1)
    if first and max(first, replay or 0) + num - 1 > MAX_PORT:
        raise ConfigError(
            f"events: {num} instances publish at ports from {first} on, each at its own: choose lower ones, "
            f"as the highest port is {MAX_PORT}"
        )
    if first and replay and abs(first - replay) < num:
        raise ConfigError(
            f"events.endpoint and events.replay_endpoint: {num} instances take the ports from {first} on and "
            f"from {replay} on, each the first one plus its number; set events.replay_endpoint=tcp://*:"
            f"{first + num} or higher"
        )


def _settings(fleet: FleetConfig, group: str) -> dict[str, Any]:
    if group not in fleet.groups:
        raise ConfigError(f"no group {group!r}.{nearest(group, fleet.groups)}")
    where = f"fleet.groups.{group}.settings"
    settings = flatten(fleet.groups[group].settings, where)
    for key in settings:
        if key in SECRET_KEYS:
            raise ConfigError(f"{key} in {where}: a secret is given once, for the whole fleet")
        if key in FLEET_WIDE:
            raise ConfigError(
                f"{key} in {where}: it is the same for all instances; set it for the whole fleet"
            )
        if key.partition(".")[0] not in INSTANCE_SECTIONS:
            sections = ", ".join(sorted(INSTANCE_SECTIONS))
            raise ConfigError(f"{key} in {where}: instances may differ in keys of {sections}")
    return settings


def counted_groups(counts: Mapping[str, int]) -> dict[str, Any]:
    """The value of `fleet.groups` for instances counted by type, as by `--prefill 1`.

    `counts`: by the value of an `InstanceType`; each is a group of that name without its ending.
    """
    names = {InstanceType.PREFILLING: "prefill", InstanceType.DECODING: "decode"}
    groups = {}
    for word, count in counts.items():
        kind = InstanceType(word)
        groups[names.get(kind, kind.value)] = {"type": kind.value, "count": count}
    return groups


def shared_key(fleet: FleetConfig) -> str | None:
    """The key of front and instances; None: the front makes one. Raises `ConfigError` for its file."""
    if fleet.shared_key_file is None:
        return fleet.shared_key
    try:
        found = read_text(Path(fleet.shared_key_file), MAX_KEY_BYTES).strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"fleet.shared_key_file {fleet.shared_key_file} cannot be read: {error}") from None
    if len(found) < MIN_KEY_CHARACTERS:
        raise ConfigError(
            f"fleet.shared_key_file {fleet.shared_key_file} holds {len(found)} characters: at least "
            f"{MIN_KEY_CHARACTERS}, as from openssl rand -hex 32"
        )
    return found


def api_key(name: str, server: PlainServerConfig) -> str | None:
    """The key that a plain server wants. Raises `ConfigError` for one that is not there."""
    variable = server.api_key_variable
    if variable is None:
        return None
    found = os.environ.get(variable, "").strip()
    if not (found and found.isascii() and found.isprintable()):
        raise ConfigError(
            f"{name}: its key is in the environment variable {variable}, which is not set or no key"
        )
    return found
