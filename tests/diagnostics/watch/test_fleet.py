"""The text that `sagellm fleet status` and `sagellm watch --url` show."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from sagellm.diagnostics.watch.fleet import (
    FleetGrowth,
    Status,
    fleet_line,
    fleet_lines,
    fleet_table,
    instance_tables,
    state_changes,
)
from sagellm.serving.fleet.status import (
    FleetStatus,
    InstanceDetail,
    InstanceStatus,
    PrefixStatus,
    State,
    TenantStatus,
    TierStatus,
)

EVENTS, REPLAY = 16557, 16657


def instance(name: str, state: State = "ready", **given: Any) -> InstanceStatus:
    there: dict[str, Any] = {}
    if state in ("ready", "draining"):
        there = {
            "pid": 7, "version": "sageLLM 0.1.0", "device": "cpu", "uptime_s": 130.0, "connected_s": 100.0,
            "reported_s_ago": 0.2, "num_blocks": 1000,
        }  # fmt: skip
    return InstanceStatus(**{"name": name, "type": "decoding", "state": state, **there, **given})


READY = instance(
    "decode-0", num_running=3, num_waiting=1, num_placed=1200, kv_cache_usage=0.5, kv_cached=0.25,
    num_prompt_tokens=4000, num_cached_tokens=3000, num_evicted_blocks=70, tokens_per_s=123.4,
    num_hand_overs=2, num_handed_over=40, utilization=0.9, endpoint="ipc:///d/decode-0",
    kv_events=f"tcp://0.0.0.0:{EVENTS}", kv_replay=f"tcp://0.0.0.0:{REPLAY}",
)  # fmt: skip
LOST = instance(
    "decode-1", "lost", fault="nothing listens there", num_lost=1, num_placed=8,
    last_failure="decode-1 (process 9) was ended by SIGKILL", last_failure_s_ago=12.0,
)  # fmt: skip
DRAINING = instance(
    "decode-2", "draining", num_running=1, kv_cache_usage=0.1, kv_cached=0.75, num_prompt_tokens=1000,
    tier_faults=["disk: no space is left"], utilization=0.3,
)  # fmt: skip


def fleet(*instances: InstanceStatus, **given: Any) -> Status:
    values: dict[str, Any] = {
        "version": "0.1.0", "model": "demo", "uptime_s": 200.0, "num_requests": 6, "num_queued": 0,
        "num_retries": 2, "instances": list(instances), **given,
    }  # fmt: skip
    return FleetStatus(**values).model_dump()


def shown(*renderables: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200)
    for each in renderables:
        console.print(each)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_a_fleet_in_several_states() -> None:
    text = shown(fleet_table(fleet(READY, LOST, DRAINING)))
    assert [" ".join(line.split()) for line in text.splitlines()[2:]] == [
        "decode-0 decoding ready 2 min 3 1 1,200 50% 25% 75.0 % 70 123 2 40 90% 0",
        "decode-1 decoding lost 8 0 0 0 1",
        "decode-2 decoding draining 2 min 1 0 0 10% 75% 0.0 % 0 0 0 0 30% 0",
        "total 1 of 3 ready 4 1 1,208 30% 50% 60.0 % 70 123 2 40 60% 1",
    ]


def test_a_fleet_that_starts_shows_its_instances() -> None:
    status = fleet(instance("a-0", "starting", type="", fault="it has not been reached yet"))
    assert "a-0" in shown(fleet_table(status))
    assert list(fleet_lines(status))[1] == "a-0 is starting: it has not been reached yet"


def test_lines_say_what_is_wrong() -> None:
    status = fleet(READY, LOST, DRAINING, num_queued=2, queued_s=4.0, queued_reason="all are full")
    assert list(fleet_lines(status)) == [
        "demo on sageLLM 0.1.0, front up 3 min: 6 requests, 2 of them wait for an instance; 2 were retried",
        "the longest wait is 4 s: all are full",
        "decode-1 is lost: nothing listens there",
        "decode-1, 12 s ago: decode-1 (process 9) was ended by SIGKILL",
        "decode-2: disk: no space is left",
        f"KV events: sagellm watch tcp://HOST:{EVENTS},tcp://HOST:{REPLAY}",
    ]


def test_a_line_for_logs() -> None:
    assert fleet_line(fleet(READY, DRAINING, num_queued=2)) == (
        "1 of 2 ready; 4 requests running, 3 waiting; 123 tokens/s; hits 60.0 %; KV used 30%"
    )


def test_changes_of_states_are_told_once() -> None:
    before, now = fleet(READY, instance("decode-1")), fleet(READY, LOST)
    assert list(state_changes(None, fleet(READY))) == ["decode-0 is ready"]
    assert list(state_changes(before, now)) == ["decode-1 is lost: nothing listens there"]
    assert list(state_changes(now, now)) == []
    assert list(state_changes(now, fleet(READY))) == ["decode-1 has left the fleet"]


def test_growth_begins_with_the_watch_and_goes_on_after_a_restart() -> None:
    growth = FleetGrowth()

    def seen(**counts: int) -> dict[str, Any]:
        status = fleet(instance("a-0", "ready", **counts))
        growth.update(status)
        [found] = growth.applied(status)["instances"]
        return dict(found)

    assert seen(num_placed=100)["num_placed"] == 0
    assert seen(num_placed=130)["num_placed"] == 30
    assert seen(num_placed=7)["num_placed"] == 37  # the front began anew
    assert seen(num_placed=9)["num_placed"] == 39


def test_an_instance_that_comes_later_counts_from_its_start() -> None:
    growth = FleetGrowth()
    growth.update(fleet(READY))
    later = fleet(READY, instance("a-1", num_placed=5))
    growth.update(later)
    assert [each["num_placed"] for each in growth.applied(later)["instances"]] == [0, 5]


def test_one_instance_in_detail() -> None:
    tier = TierStatus(
        tier="DRAM", total=500, cached=200, held=3, stored=900, loaded=120, evicted=700, dropped=0
    )
    detail = InstanceDetail(
        instance=READY, dtype="bfloat16", block_size=16, max_num_seqs=64, max_model_len=4096,
        blocks={"active": 500, "cached": 250, "free": 250}, num_steps=321, num_prompt_tokens=8000,
        num_hit_tokens=6000, misses={"cold": 30, "capacity": 10}, asked_s_ago=0.1,
        has_diagnostics=True,
        evicted_blocks={"capacity": 70}, num_pinned_prefixes=1, num_pinned_blocks=4, tiers=[tier],
        hot_prefixes=[PrefixStatus(digest="0f", num_tokens=64, num_blocks=4, num_uses=9, idle_s=3.0)],
        tenants=[TenantStatus(tenant=name, num_prompt_tokens=10, num_hit_tokens=5) for name in ("", "b")],
    )  # fmt: skip
    text = " ".join(shown(*instance_tables(detail.model_dump())).split())
    for part in (
        "KV blocks active 500 of 1,000 (50.0 %)",
        "hits since its start 75.0 % of 8,000 prompt tokens",
        "KV hand-overs 2 under way, 40 done, 0 failed",
        "pinned 1 prefixes, 4 blocks",
        "capacity 10 25.0 %",
        "DRAM 500 200 3 900 120 700 0",
        "0f 64 4 9 3 s",
        "(none) 10 50.0 %",
    ):
        assert part in text, text


def test_a_plain_server_has_no_detail() -> None:
    plain = instance("vllm-0", type="general", version="vLLM 0.32.0")
    text = shown(*instance_tables(InstanceDetail(instance=plain).model_dump()))
    assert "vLLM 0.32.0" in text
    assert "pinned" not in text
