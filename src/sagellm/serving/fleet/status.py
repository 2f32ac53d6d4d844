"""What a front says of its fleet, from what the instances have reported. For the engine's thread."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import Field

import sagellm
from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.control_plane.fleet.members import Member
from sagellm.control_plane.fleet.record import RecordedClient
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats
from sagellm.serving.schema import Body

MAX_TENANTS = 20
"""Tenants that are shown of one instance, those with most tokens."""

State = Literal["starting", "ready", "draining", "drained", "lost", "refused"]


class InstanceStatus(Body):
    """One instance. `state`: `starting` until it is connected first, `lost` until it is again.

    `fault`: why it gets no requests. `last_failure`: of the instance or of one of its requests, and how long
    ago. `version`: of its software. `endpoint`: where the front reaches it. `kv_events`, `kv_replay`: where
    it publishes KV events; empty: nowhere. `reported_s_ago`: the age of the figures of its load.

    `num_requests`: of this front. What is counted is counted since the front began: `num_placed`: requests
    that it was given. `num_prompt_tokens` of requests whose first token came from there, and
    `num_cached_tokens` of them that it did not compute. `num_hand_overs`: transfers of KV in which it takes
    part now; `num_handed_over`, `num_failed_hand_overs`: in which it took part. `num_evicted_blocks` and
    `num_preemptions` begin with the instance. `tokens_per_s`: of answers, lately.
    """

    name: str
    type: str
    state: State
    pid: int | None = None
    version: str = ""
    device: str = ""
    endpoint: str = ""
    kv_events: str = ""
    kv_replay: str = ""
    uptime_s: float | None = None
    connected_s: float | None = None
    reported_s_ago: float | None = None
    fault: str = ""
    last_failure: str = ""
    last_failure_s_ago: float | None = None
    tier_faults: list[str] = Field(default_factory=list)
    num_requests: int = 0
    num_placed: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_queued_tokens: int = 0
    num_blocks: int = 0
    kv_cache_usage: float = 0.0
    kv_cached: float | None = None
    num_evicted_blocks: int = 0
    num_preemptions: int = 0
    utilization: float = 0.0
    step_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    tokens_per_s: float = 0.0
    num_hand_overs: int = 0
    num_handed_over: int = 0
    num_failed_hand_overs: int = 0
    num_lost: int = 0


class QuotaStatus(Body):
    """A tenant's requests that its quota counts, that wait for it, that were refused."""

    name: str
    num_requests: int
    num_waiting: int
    num_refused: int


class FleetStatus(Body):
    """The answer of GET /v1/fleet. `uptime_s`: of the front. `model`: empty while the fleet starts.

    `num_queued`: requests that wait for an instance; `queued_s`: the longest wait, and `queued_reason` why.
    `num_retries`: requests that were begun again after a failure. `quotas`: those of tenants with one of
    their own, and of all others together; none without quotas.
    """

    version: str
    model: str
    uptime_s: float
    instances: list[InstanceStatus]
    num_requests: int
    num_queued: int
    queued_s: float = 0.0
    queued_reason: str = ""
    num_retries: int
    quotas: list[QuotaStatus] = Field(default_factory=list)


class TierStatus(Body):
    """One tier below the device, in blocks.

    `stored`, `loaded`, `evicted` and `dropped` count since it began."""

    tier: str
    total: int
    cached: int
    held: int
    stored: int
    loaded: int
    evicted: int
    dropped: int
    fault: str = ""


class PrefixStatus(Body):
    """A cached prefix that was used again (`ReusedPrefix`). `digest` names it and shows no text."""

    digest: str
    num_tokens: int
    num_blocks: int
    num_uses: int
    idle_s: float


class TenantStatus(Body):
    """Tokens that a tenant's requests looked up, and those that were found."""

    tenant: str
    num_prompt_tokens: int
    num_hit_tokens: int


class InstanceDetail(Body):
    """The answer of GET /v1/admin/fleet/instances/{name}, from the instance's own counts since it began.

    `blocks`: of the device's KV pool by state: active, cached, free. `misses`: prompt blocks that had to be
    computed, and `evicted_blocks`, by cause. `hot_prefixes` came `asked_s_ago` seconds ago; null: they have
    not come, and of a plain server they never do. With `has_diagnostics`, what stands from there on is known,
    and some seconds old.
    """

    instance: InstanceStatus
    dtype: str = ""
    block_size: int = 0
    max_num_seqs: int = 0
    max_model_len: int = 0
    blocks: dict[str, int] = Field(default_factory=dict)
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    misses: dict[str, int] = Field(default_factory=dict)
    has_diagnostics: bool = False
    evicted_blocks: dict[str, int] = Field(default_factory=dict)
    internal_fragmentation: float = 0.0
    external_fragmentation: float = 0.0
    num_pinned_prefixes: int = 0
    num_pinned_blocks: int = 0
    tenants: list[TenantStatus] = Field(default_factory=list)
    tiers: list[TierStatus] = Field(default_factory=list)
    asked_s_ago: float | None = None
    hot_prefixes: list[PrefixStatus] = Field(default_factory=list)


def fleet_status(engine: FleetEngine, model: str, began_s: float) -> FleetStatus:
    """The state of each instance now. `began_s`: when the front began, by the engine's clock."""
    now_s = engine.clock.now()
    first = next(iter(engine.requests.waiting.values()), None)
    return FleetStatus(
        version=sagellm.__version__,
        model=model,
        uptime_s=now_s - began_s,
        instances=[instance_status(engine, name) for name in engine.members],
        num_requests=len(engine.requests),
        num_queued=len(engine.requests.waiting),
        queued_s=0.0 if first is None else now_s - first.queued_since_s,
        queued_reason="" if first is None else first.reason,
        num_retries=engine.num_retries,
        quotas=[QuotaStatus(name=name, **use._asdict()) for name, use in engine.tenants().items()],
    )


def instance_status(engine: FleetEngine, name: str) -> InstanceStatus:
    member, now_s = engine.members[name], engine.clock.now()
    client = cast(RecordedClient, member.client)
    record, num_requests = client.record, engine.requests.num_on(name)
    return InstanceStatus(
        name=name,
        state=_state(member, num_requests, engine.roles.is_changing(name)),
        endpoint=client.endpoint,
        fault=member.why,
        last_failure=record.last_failure,
        last_failure_s_ago=_ago(record.failed_s, now_s),
        num_requests=num_requests,
        num_placed=engine.placements.get(name, 0),
        num_prompt_tokens=record.num_prompt_tokens,
        num_cached_tokens=record.num_cached_tokens,
        num_output_tokens=record.num_output_tokens,
        tokens_per_s=record.tokens_per_s,
        num_hand_overs=record.num_under_way,
        num_handed_over=record.num_handed_over,
        num_failed_hand_overs=record.num_failed,
        num_lost=member.num_lost,
        **_of_process(member, _ago(record.connected_s, now_s)),
        **_of_load(member, now_s),
    )


def _of_process(member: Member, connected_s: float | None) -> dict[str, Any]:
    """What an instance said when it was connected."""
    facts, load = member.facts, member.load
    if facts is None:
        return {"type": ""}
    return {
        "type": (facts.kind if load is None else load.kind).value,
        "pid": facts.pid or None,
        "version": facts.version or facts.capability.device,  # of a plain server the engine and its version
        "device": facts.capability.device,
        "kv_events": facts.kv_events,
        "kv_replay": facts.kv_replay,
        "connected_s": connected_s,
        "uptime_s": facts.uptime_s + (connected_s or 0.0) if facts.version else None,
    }


def _of_load(member: Member, now_s: float) -> dict[str, Any]:
    """What it has reported since."""
    load, stats, found = member.load, member.stats, dict[str, Any]()
    if load is not None:
        found |= {
            "reported_s_ago": _ago(load.reported_s, now_s),
            "num_waiting": load.num_waiting,
            "num_running": load.num_running,
            "num_queued_tokens": load.num_queued_tokens,
            "num_blocks": load.num_blocks,
            "kv_cache_usage": load.kv_cache_usage,
            "utilization": load.utilization,
            "num_evicted_blocks": load.eviction_count,
            "step_s": load.step_s,
        }
    if stats is not None:
        num_blocks = sum(_blocks(stats).values())
        found |= {
            "tier_faults": list(stats.tier_faults),
            "num_preemptions": stats.num_preemptions,
            "kv_cached": stats.blocks_cached / num_blocks if num_blocks else None,
        }
    return found


def instance_detail(engine: FleetEngine, name: str) -> InstanceDetail:
    """What is known of one instance."""
    member = engine.members[name]
    client = cast(RecordedClient, member.client)
    detail = InstanceDetail(
        instance=instance_status(engine, name),
        asked_s_ago=_ago(client.record.seen_s, engine.clock.now()),
    )
    if member.facts is not None:
        capability = member.facts.capability
        detail.dtype, detail.block_size = capability.dtype, capability.block_size
        detail.max_num_seqs, detail.max_model_len = capability.max_num_seqs, member.facts.max_model_len
    if member.stats is not None:
        _add_stats(detail, member.stats)
    if member.diagnostics is not None:
        _add_diagnostics(detail, member.diagnostics)
    detail.hot_prefixes = [PrefixStatus(**each._asdict()) for each in client.record.hot_prefixes]
    return detail


def look(engine: FleetEngine, name: str) -> bool:
    """Ask an instance for its hot prefixes, which `instance_detail` shows. False: they will not come."""
    return cast(RecordedClient, engine.members[name].client).look()


def _add_stats(detail: InstanceDetail, stats: EngineStats) -> None:
    detail.blocks, detail.num_steps = _blocks(stats), stats.num_steps
    if stats.reuse is not None:
        detail.num_prompt_tokens = stats.reuse.num_tokens
        detail.num_hit_tokens = stats.reuse.num_hit_tokens
    if stats.misses is not None:
        detail.misses = stats.misses._asdict()


def _add_diagnostics(detail: InstanceDetail, found: EngineDiagnostics) -> None:
    detail.has_diagnostics, detail.evicted_blocks = True, dict(found.evicted_blocks)
    detail.internal_fragmentation = found.internal_fragmentation
    detail.external_fragmentation = found.external_fragmentation
    detail.num_pinned_prefixes, detail.num_pinned_blocks = found.num_pinned_prefixes, found.num_pinned_blocks
    tenants = sorted(found.reuse_by_tenant.items(), key=lambda each: -each[1].num_tokens)
    detail.tenants = [
        TenantStatus(tenant=name, num_prompt_tokens=reuse.num_tokens, num_hit_tokens=reuse.num_hit_tokens)
        for name, reuse in tenants[:MAX_TENANTS]
    ]
    detail.tiers = [
        TierStatus(
            tier=each.tier.name, total=each.total, cached=each.cached, held=each.held, stored=each.stored,
            loaded=each.loaded, evicted=each.evicted, dropped=each.dropped, fault=each.fault,
        )
        for each in found.tiers
    ]  # fmt: skip


def _blocks(stats: EngineStats) -> dict[str, int]:
    return {"active": stats.blocks_active, "cached": stats.blocks_cached, "free": stats.blocks_free}


def _ago(moment_s: float | None, now_s: float) -> float | None:
    return None if moment_s is None else max(0.0, now_s - moment_s)


def _state(member: Member, num_requests: int, is_changing: bool) -> State:
    if member.fault:
        return "refused"
    if member.facts is None:
        return "lost" if member.num_lost else "starting"
    if is_changing:
        return "draining"
    if member.draining:
        return "draining" if num_requests else "drained"
    return "ready"
