"""The section `fleet` of the configuration: instances, and what joins them.

A fleet file is a configuration file with this section. `control_plane/fleet_instances.py` makes a list of
instances of it, each with a configuration of its own.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from sagellm.core.protocols.fleet import FailurePolicy
from sagellm.core.protocols.router import InstanceType
from sagellm.core.sections import Positive, Seconds, Section, Word, key

GROUP_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""A part of a host name, since Kubernetes names hosts after groups."""
ADDRESS = r"^tcp://[^\s/@:*]+(:[^\s/@:*]+)*:[0-9]{1,5}$"
URL = r"^https?://[^\s/@?#]+(/[^\s@?#]*)?$"
MAX_INSTANCES = 1024
MIN_KEY_CHARACTERS = 16
BEATS_PER_LEASE = 3
"""A lease outlives two heartbeats that are lost."""
_WITHOUT_ENGINE = (InstanceType.EMBEDDING, InstanceType.LLM_EMBEDDING)


class TenantQuota(Section):
    """What one tenant may use of the whole fleet; none: no limit."""

    max_requests: Positive | None = key(None, "requests that it has at a time")
    tokens_per_s: float | None = key(
        None, "tokens of its prompts and answers, in the long run", gt=0.0, le=1e9
    )
    burst_tokens: Positive | None = key(None, "such tokens at once; none: those of ten seconds")

    @model_validator(mode="after")
    def _burst_fills_again(self) -> TenantQuota:
        if self.burst_tokens is not None and self.tokens_per_s is None:
            raise ValueError("burst_tokens needs tokens_per_s, at which it fills again")
        return self

    @property
    def burst(self) -> float:
        if self.burst_tokens is not None:
            return self.burst_tokens
        return math.inf if self.tokens_per_s is None else 10 * self.tokens_per_s


class PlainServerConfig(Section):
    """A server of another engine (vLLM, SGLang) with OpenAI's API."""

    url: str = Field(description="its address, as http://HOST:PORT", pattern=URL)
    model: Word | None = key(None, "the model's name there; none: the name that our clients use")
    api_key_variable: Word | None = key(None, "environment variable with the key that it wants")
    events: Word | None = key(
        None, "where it publishes KV events, as tcp://HOST:PORT; none: its cache is guessed"
    )
    replay: Word | None = key(None, "where it replays them")
    topic: str = key("", "topic of its events")
    max_num_seqs: Positive = key(64, "requests that it runs together")

    @model_validator(mode="after")
    def _replay_needs_events(self) -> PlainServerConfig:
        if self.replay is not None and self.events is None:
            raise ValueError("replay needs events: give the endpoint of its KV events too")
        return self


class GroupConfig(Section):
    """Equal instances: started here (`count`), elsewhere (`addresses`), or plain servers (`servers`)."""

    type: InstanceType = key(InstanceType.GENERAL, "general, prefilling, decoding or hybrid")
    count: int | None = key(None, "instances that are started here; none: 1", ge=0, le=MAX_INSTANCES)
    addresses: tuple[Annotated[str, Field(pattern=ADDRESS)], ...] = key(
        (), "addresses of instances that run elsewhere, as tcp://HOST:PORT"
    )
    servers: tuple[PlainServerConfig, ...] = key(
        (), "plain vLLM or SGLang servers: [{url: ..., events: ...}]"
    )
    settings: dict[str, Any] = key({}, "keys of the configuration that differ for these instances")
    chips: int | None = key(
        None, "chips of each instance; 0: it runs on CPU cores; none: one for each rank", ge=0, le=64
    )
    chip_kind: Literal["any", "gpu", "npu"] = key("any", "kind of these chips")
    chip_names: tuple[Word, ...] = key((), "chips to choose from, as `sagellm fleet chips` names them")
    shares_chips: bool = key(False, "instances of groups that say so may be on one chip; it is not isolated")
    cores: Positive | None = key(None, "CPU cores of each instance; none: an equal share of what is left")
    memory_gb: float | None = key(
        None,
        "memory of each of its chips, or host memory on CPU cores, that an instance keeps to (GiB)",
        gt=0.0,
    )
    ray_resources: dict[Word, Annotated[float, Field(gt=0.0)]] = key(
        {}, "with --ray: resources of each instance beside CPU and GPU, or in place of them: {h100: 1}"
    )
    min_count: Positive | None = key(None, "fewest instances with autoscaling; none: 1")
    max_count: int | None = key(
        None, "most instances with autoscaling; none: the number stays", ge=1, le=MAX_INSTANCES
    )

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> GroupConfig:
        given = [name for name in ("count", "addresses", "servers") if getattr(self, name) not in (None, ())]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: make a group for each")
        if self.type in _WITHOUT_ENGINE:
            raise ValueError(
                f"no engine computes embeddings yet, so there is no instance of type {self.type.value}: "
                "general, prefilling, decoding or hybrid"
            )
        if self.servers and self.type is not InstanceType.GENERAL:
            raise ValueError(
                f"plain servers exchange no KV with others: their type is general, not {self.type.value}"
            )
        if not self.is_local:
            keys = [*_LOCAL_KEYS, "settings"] if self.servers else _LOCAL_KEYS
            given = [name for name in keys if getattr(self, name) != type(self).model_fields[name].default]
            if given:
                raise ValueError(f"{', '.join(given)}: only for instances that are started here")
        return self

    @model_validator(mode="after")
    def _shared_chips_are_parts(self) -> GroupConfig:
        if self.shares_chips and (self.memory_gb is None or (self.chips or 1) > 1 or self.chips == 0):
            raise ValueError("shares_chips: give memory_gb, the part of a chip, and no more than chips: 1")
        return self

    @model_validator(mode="after")
    def _bounds_fit(self) -> GroupConfig:
        if self.max_count is None:
            if self.min_count is not None:
                raise ValueError("min_count needs max_count: give both to scale the group")
        elif not self.fewest <= self.num_instances <= self.max_count:
            raise ValueError(
                f"count ({self.num_instances}) lies between min_count ({self.fewest}) and max_count "
                f"({self.max_count})"
            )
        return self

    @property
    def is_local(self) -> bool:
        """Whether this host starts the instances."""
        return not self.addresses and not self.servers

    @property
    def num_instances(self) -> int:
        if self.is_local:
            return 1 if self.count is None else self.count
        return len(self.addresses) or len(self.servers)

    @property
    def fewest(self) -> int:
        """Instances that a group which is scaled always has."""
        return 1 if self.min_count is None else self.min_count


_LOCAL_KEYS = (
    "chips",
    "chip_kind",
    "chip_names",
    "shares_chips",
    "cores",
    "memory_gb",
    "ray_resources",
    "min_count",
    "max_count",
)


class FleetConfig(Section):
    """Instances, the router and what holds them together."""

    groups: dict[str, GroupConfig] = key({}, "instances by group; none: one engine in the server's process")
    router: Word = key("cost", "what chooses the instance of a request")
    router_options: dict[str, Any] = key({}, "its options")
    separation: Word = key("adaptive", "when prefill and decode are on different instances, by a name")
    separation_options: dict[str, Any] = key({}, "its options")
    admission: Word = key("fifo", "which waiting request goes to an instance next, by a name")
    admission_options: dict[str, Any] = key({}, "its options")
    replication: bool = key(False, "copy prefixes that many requests use to instances that have little to do")
    replication_options: dict[str, Any] = key({}, "its options")
    tenant_quotas: dict[str, TenantQuota] = key(
        {},
        "limits by tenant, over all instances: {NAME: {max_requests: 8, tokens_per_s: 2000, burst_tokens: "
        "20000}}; the name * stands for each other tenant",
    )
    quota_patience_s: Seconds = key(
        60.0, "seconds that a request waits for its tenant's quota; then it is refused (429)"
    )
    heartbeat_s: Seconds = key(0.25, "seconds between signs of life, and between load reports")
    lease_s: Seconds = key(2.0, "seconds without a sign of life after which the other side counts as gone")
    silence_s: Seconds = key(
        300.0,
        "seconds without a report after which an engine counts as hung; above its longest step",
    )
    handover_lease_s: Seconds = key(10.0, "seconds that a decode instance waits for a sign of a transfer")
    handover_policy: FailurePolicy = key(
        FailurePolicy.RECOMPUTE, "when KV does not come: recompute it there, or fail the request"
    )
    start_timeout_s: Seconds = key(
        600.0, "seconds in which an instance loads its model; a fleet ends that has none then"
    )
    listen_host: Word | None = key(
        None, "address on which `serve --instance` listens, `*` for all; none: that of the fleet file, if it "
        "is one of this host's, else all"
    )  # fmt: skip
    patience_s: Seconds = key(
        300.0,
        "seconds that a request waits while no instance serves, then it fails; full ones are waited for",
    )
    drain_timeout_s: Seconds = key(
        60.0, "seconds that a drained instance has for its requests; the rest goes on elsewhere"
    )
    autoscaling: Literal["off", "dry_run", "on"] = key(
        "off", "change the number of instances within min_count and max_count; dry_run: only say so"
    )
    autoscaling_options: dict[str, Any] = key({}, "its options")
    chips_file: Word | None = key(
        None, "measured chips, as `sagellm fleet chips --measure --save FILE` writes them; none: data sheets"
    )
    ray_strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = key(
        "pack", "with --ray: on few nodes, or on many; strict: on one, or on as many as there are instances"
    )
    ray_timeout_s: Seconds = key(60.0, "with --ray: seconds in which the cluster has room for an instance")
    shared_key: Word | None = key(
        None, f"key that front and instances share, {MIN_KEY_CHARACTERS} characters or more; none: a new one "
        "at each start", repr=False,
    )  # fmt: skip
    shared_key_file: Word | None = key(None, "file with that key")

    @field_validator("groups")
    @classmethod
    def _names_are_parts_of_host_names(cls, groups: dict[str, GroupConfig]) -> dict[str, GroupConfig]:
        for name in groups:
            if not GROUP_NAME.fullmatch(name):
                raise ValueError(
                    f"group {name!r}: a name has up to 40 small letters, digits and hyphens, and begins with "
                    "a letter"
                )
        total = sum(max(group.num_instances, group.max_count or 0) for group in groups.values())
        if total > MAX_INSTANCES:
            raise ValueError(f"{total} instances: a fleet has at most {MAX_INSTANCES}")
        ends = Counter(end for group in groups.values() for end in _ends(group))
        twice = [end for end, times in ends.items() if times > 1]
        if twice:
            raise ValueError(f"{twice[0]} is named twice: each instance has an address of its own")
        return groups

    @field_validator("shared_key")
    @classmethod
    def _key_is_long(cls, given: str | None) -> str | None:
        if given is not None and len(given) < MIN_KEY_CHARACTERS:
            raise ValueError(
                f"too short: {MIN_KEY_CHARACTERS} characters at least, as from openssl rand -hex 32"
            )
        return given

    @model_validator(mode="after")
    def _leases_outlive_beats(self) -> FleetConfig:
        if self.lease_s < BEATS_PER_LEASE * self.heartbeat_s:
            raise ValueError(
                f"lease_s ({self.lease_s}) must be at least {BEATS_PER_LEASE} times heartbeat_s "
                f"({self.heartbeat_s}), so that a late heartbeat ends no lease"
            )
        if self.shared_key is not None and self.shared_key_file is not None:
            raise ValueError("shared_key and shared_key_file exclude each other: give one")
        has_key = self.shared_key is not None or self.shared_key_file is not None
        if not has_key and any(group.addresses for group in self.groups.values()):
            raise ValueError(
                "instances with addresses need a key that both sides have: set SAGELLM_FLEET_SHARED_KEY or "
                "fleet.shared_key_file"
            )
        if self.groups and not any(group.num_instances for group in self.groups.values()):
            raise ValueError("all groups are empty: at least one instance must serve")
        return self


def _ends(group: GroupConfig) -> list[str]:
    return [*group.addresses, *(server.url.rstrip("/") for server in group.servers)]
