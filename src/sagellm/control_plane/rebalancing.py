"""Which cached prefixes to copy to which instances."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.router import ExecutionInstance


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix and its recent use, as the caller counts requests.

    `uses_per_s`: requests that begin with it. `holders`: instances that have all of it. `coming`: those to
    which it was copied lately, whether it has arrived or not.
    """

    key: bytes
    num_tokens: int
    uses_per_s: float
    holders: frozenset[str]
    coming: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Replication:
    """Copy a prefix from an instance to another. `gain`: seconds of computing saved per second of use."""

    key: bytes
    source: str
    target: str
    gain: float
    reason: str


@dataclass(frozen=True, slots=True)
class RebalancingOptions:
    """`bytes_per_token` and `bytes_per_s`: of KV and of the link between instances. A copy must pay for
    itself within `payback_s`. An instance is cold below `cold` of the mean utilization, and hot above
    `hot` of it. `max_copies`: at once. `link_share`: what of one link all copies may take in the long run.
    `least_uses_per_s`: a prefix that is used less often is not looked at."""

    bytes_per_token: float = 0.0
    bytes_per_s: float = 1e9
    payback_s: float = 30.0
    cold: float = 0.8
    hot: float = 1.1
    max_copies: int = 4
    link_share: float = 0.1
    least_uses_per_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("bytes_per_token", "cold", "hot", "least_uses_per_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is a number from 0 on, got {getattr(self, name)}")
        for name in ("bytes_per_s", "payback_s", "max_copies", "link_share"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is a number above 0, got {getattr(self, name)}")


def cold_instances(instances: Sequence[ExecutionInstance], cold: float = 0.8) -> list[ExecutionInstance]:
    """Instances that are used less than `cold` of the mean, the least used first."""
    if not instances:
        return []
    mean = sum(each.utilization for each in instances) / len(instances)
    found = [each for each in instances if each.utilization < cold * mean]
    return sorted(found, key=lambda each: (each.utilization, each.num_requests, each.instance_id))


def replications(
    prefixes: Sequence[HotPrefix],
    instances: Sequence[ExecutionInstance],
    options: RebalancingOptions,
    busy: Collection[str] = (),
) -> list[Replication]:
    """Copies worth making, from hot instances to cold ones, the best gain first.

    With a copy, requests with the prefix that go to the target need not compute it; they are taken to be
    spread over its holders evenly. The source is the least used holder. Each target gets one copy at a time,
    and those that are `busy` get none.
    """
    by_name = {each.instance_id: each for each in instances}
    mean = sum(each.utilization for each in instances) / max(1, len(instances))
    targets = [each for each in cold_instances(instances, options.cold) if each.instance_id not in busy]
    found = []
    for prefix in prefixes:
        holders = [by_name[name] for name in sorted(prefix.holders) if name in by_name]
        having = holders + [by_name[name] for name in prefix.coming - prefix.holders if name in by_name]
        if not holders or min(each.utilization for each in having) <= options.hot * mean:
            continue  # lost, or one of those that have it has room for its requests
        source = min(holders, key=lambda each: (each.utilization, each.instance_id))
        copy_s = prefix.num_tokens * options.bytes_per_token / options.bytes_per_s
        for target in targets:
            if target in having:
                continue
            moved_per_s = prefix.uses_per_s / (len(having) + 1)
            gain = moved_per_s * prefix.num_tokens * target.prefill_token_s
            if gain * options.payback_s > copy_s:
                reason = (
                    f"{moved_per_s:.2g} requests/s would compute {prefix.num_tokens} tokens there; "
                    f"the copy takes {copy_s:.2g} s"
                )
                found.append(Replication(prefix.key, source.instance_id, target.instance_id, gain, reason))
    found.sort(key=lambda each: (-each.gain, each.key))  # of equal gains the coldest target is first
    return _one_each(found)[: options.max_copies]


def _one_each(found: Sequence[Replication]) -> list[Replication]:
    """The best copy for each target and of each prefix."""
    chosen: list[Replication] = []
    targets: set[str] = set()
    keys: set[bytes] = set()
    for each in found:
        if each.target not in targets and each.key not in keys:
            chosen.append(each)
            targets.add(each.target)
            keys.add(each.key)
    return chosen
