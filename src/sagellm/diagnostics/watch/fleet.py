"""The terminal's view of a fleet: what GET /v1/fleet says, as tables and lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sagellm.benchmarks.reporting import Table
from sagellm.diagnostics.watch.page import duration

Status = Mapping[str, Any]
"""The JSON of `FleetStatus`, or of one of its instances."""
COUNTS = (
    "num_placed", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_handed_over",
    "num_failed_hand_overs", "num_evicted_blocks", "num_preemptions", "num_lost",
)  # fmt: skip
COLUMNS = (
    "instance", "type", "state", "up", "running", "waiting", "placed", "KV used", "cached", "hits", "evicted",
    "tokens/s", "KV moves", "moved", "busy", "lost",
)  # fmt: skip


class FleetGrowth:
    """Adds up what the counts of a fleet grow by, across restarts."""

    def __init__(self) -> None:
        self._last: dict[str, Counter[str]] = {}
        self._grown: dict[str, Counter[str]] = {}

    def update(self, status: Status) -> None:
        is_first = not self._last
        for each in status["instances"]:
            name, now = each["name"], Counter({count: each.get(count, 0) for count in COUNTS})
            last = now if is_first else self._last.get(name, Counter())
            grown = self._grown.setdefault(name, Counter())
            for count in COUNTS:  # one that has fallen began anew at 0
                grown[count] += now[count] - last[count] if now[count] >= last[count] else now[count]
            self._last[name] = now

    def applied(self, status: Status) -> Status:
        """The status with these counts in place of those since the front began."""
        instances = [{**each, **self._grown.get(each["name"], {})} for each in status["instances"]]
        return {**status, "instances": instances}


def fleet_table(status: Status, title: str = "Instances") -> Table:
    """A row for each instance, and their sums."""
    instances = status["instances"]
    rows = [_row(each) for each in instances]
    if len(instances) > 1:
        rows.append(_row(_total(instances)))
    return Table(title, COLUMNS, rows, num_names=3)


def _row(each: Status) -> tuple[str, ...]:
    is_there = each.get("reported_s_ago") is not None
    return (
        each["name"],
        each["type"],
        each["state"],
        "" if each.get("uptime_s") is None else duration(each["uptime_s"]),
        str(each["num_running"]) if is_there else "",
        str(each["num_waiting"]) if is_there else "",
        f"{each['num_placed']:,}",
        f"{each['kv_cache_usage']:.0%}" if is_there else "",
        "" if each.get("kv_cached") is None else f"{each['kv_cached']:.0%}",
        share(each["num_cached_tokens"], each["num_prompt_tokens"]),
        f"{each['num_evicted_blocks']:,}" if is_there else "",
        f"{each['tokens_per_s']:,.0f}",
        str(each["num_hand_overs"]),
        f"{each['num_handed_over']:,}",
        f"{each['utilization']:.0%}" if is_there else "",
        str(each["num_lost"]),
    )


_SUMS = (*COUNTS, "num_running", "num_waiting", "tokens_per_s", "num_hand_overs")


def _total(instances: Sequence[Status]) -> Status:
    """Shares of the KV cache are weighted by its size; `busy` is the mean. A hand-over has two sides."""
    there = [each for each in instances if each.get("reported_s_ago") is not None]
    cached = [each for each in there if each.get("kv_cached") is not None]
    num_ready = sum(each["state"] == "ready" for each in instances)
    return {
        **{name: sum(each[name] for each in instances) for name in _SUMS},
        "name": "total",
        "type": "",
        "state": f"{num_ready} of {len(instances)} ready",
        "reported_s_ago": 0.0 if there else None,
        "kv_cache_usage": _weighted(there, "kv_cache_usage"),
        "kv_cached": _weighted(cached, "kv_cached") if cached else None,
        "utilization": sum(each["utilization"] for each in there) / max(1, len(there)),
    }


def _weighted(instances: Sequence[Status], name: str) -> float:
    num_blocks = sum(int(each["num_blocks"]) for each in instances)
    return sum(float(each[name]) * int(each["num_blocks"]) for each in instances) / max(1, num_blocks)


def fleet_lines(status: Status) -> Iterator[str]:
    """The fleet in a sentence, then what is wrong with it.

    The last line says where it publishes KV events."""
    model = status["model"] or "a fleet that starts"
    yield (
        f"{model} on sageLLM {status['version']}, front up {duration(status['uptime_s'])}: "
        f"{status['num_requests']} requests, {status['num_queued']} of them wait for an instance; "
        f"{status['num_retries']} were retried"
    )
    if status["num_queued"]:
        reason = f": {status['queued_reason']}" if status["queued_reason"] else ""
        yield f"the longest wait is {duration(status['queued_s'])}{reason}"
    for each in status["instances"]:
        if each["fault"]:
            yield f"{each['name']} is {each['state']}: {each['fault']}"
        if each["last_failure"]:
            yield f"{each['name']}, {duration(each['last_failure_s_ago'])} ago: {each['last_failure']}"
        yield from (f"{each['name']}: {fault}" for fault in each["tier_faults"])
    publishing = [each for each in status["instances"] if each["kv_events"]]
    if publishing:
        ends = " ".join(
            ",".join(filter(None, (each["kv_events"], each["kv_replay"]))) for each in publishing
        ).replace("0.0.0.0", "HOST")
        yield f"KV events: sagellm watch {ends}"


def state_changes(before: Status | None, now: Status) -> Iterator[str]:
    """What a log should hold of the time between two looks."""
    former = {} if before is None else {each["name"]: each["state"] for each in before["instances"]}
    for each in now["instances"]:
        if each["state"] != former.pop(each["name"], None):
            reason = each["fault"] or (each["last_failure"] if each["state"] == "lost" else "")
            yield f"{each['name']} is {each['state']}" + (f": {reason}" if reason else "")
    yield from (f"{name} has left the fleet" for name in former)


def fleet_line(status: Status) -> str:
    """The state in one line, for logs."""
    total = _total(status["instances"])
    hits = share(total["num_cached_tokens"], total["num_prompt_tokens"]) or "?"
    return (
        f"{total['state']}; {total['num_running']} requests running, "
        f"{total['num_waiting'] + status['num_queued']} waiting; {total['tokens_per_s']:,.0f} tokens/s; "
        f"hits {hits}; KV used {total['kv_cache_usage']:.0%}"
    )


def instance_tables(detail: Status) -> Iterator[Table]:
    """One instance: its blocks and requests, why blocks were computed, its tiers and tenants."""
    rows: list[tuple[str, ...]]
    yield Table(detail["instance"]["name"], ("figure", ""), list(_figures(detail)), num_names=1)
    for title, counts in (
        ("prompt blocks that had to be computed, by cause", detail["misses"]),
        ("cached blocks that were evicted, by cause", detail["evicted_blocks"]),
    ):
        rows = [(cause, f"{count:,}", share(count, sum(counts.values()))) for cause, count in counts.items()]
        if rows:
            yield Table(title, ("cause", "blocks", "share"), rows, num_names=1)
    if detail["tiers"]:
        names = ("total", "cached", "held", "stored", "loaded", "evicted", "dropped")
        rows = [
            (each["tier"], each["fault"], *(f"{each[name]:,}" for name in names)) for each in detail["tiers"]
        ]
        yield Table("blocks in tiers below the device", ("tier", "fault", *names), rows, num_names=2)
    if detail["hot_prefixes"]:
        rows = [
            (each["digest"], f"{each['num_tokens']:,}", f"{each['num_blocks']:,}", f"{each['num_uses']:,}",
             duration(each["idle_s"]))
            for each in detail["hot_prefixes"]
        ]  # fmt: skip
        columns = ("digest", "tokens", "blocks of its own", "uses", "not used for")
        yield Table("cached prefixes that saved most blocks", columns, rows, num_names=1)
    if len(detail["tenants"]) > 1:
        rows = [
            (each["tenant"] or "(none)", f"{each['num_prompt_tokens']:,}",
             share(each["num_hit_tokens"], each["num_prompt_tokens"]))
            for each in detail["tenants"]
        ]  # fmt: skip
        yield Table("tenants", ("tenant", "prompt tokens", "hits"), rows, num_names=1)


def _figures(detail: Status) -> Iterator[tuple[str, str]]:
    each, total = detail["instance"], sum(detail["blocks"].values())
    yield "state", each["state"] + (f": {each['fault']}" if each["fault"] else "")
    yield "version, process", f"{each['version']}, {each['pid'] or '?'}, {each['endpoint']}"
    model = f"{detail['dtype'] or '?'}, context {detail['max_model_len']:,} tokens"
    yield "device", f"{each['device']}, {model}, {detail['max_num_seqs']} sequences"
    for state, count in detail["blocks"].items():
        yield f"KV blocks {state}", f"{count:,} of {total:,} ({share(count, total)})"
    hits = share(detail["num_hit_tokens"], detail["num_prompt_tokens"]) or "?"
    yield "hits since its start", f"{hits} of {detail['num_prompt_tokens']:,} prompt tokens"
    yield "requests", f"{each['num_running']} running, {each['num_waiting']} waiting"
    yield "prompt tokens that wait", f"{each['num_queued_tokens']:,}"
    yield "steps, preemptions", f"{detail['num_steps']:,}, {each['num_preemptions']:,}"
    if each["step_s"]:
        yield "a decode step takes", f"{1000 * each['step_s']:.3g} ms"
    yield "tokens/s", f"{each['tokens_per_s']:,.0f}"
    moves = f"{each['num_hand_overs']} under way, {each['num_handed_over']:,} done"
    yield "KV hand-overs", f"{moves}, {each['num_failed_hand_overs']:,} failed"
    if not detail["has_diagnostics"]:
        return
    yield "pinned", f"{detail['num_pinned_prefixes']} prefixes, {detail['num_pinned_blocks']:,} blocks"
    inside, outside = f"{detail['internal_fragmentation']:.0%}", f"{detail['external_fragmentation']:.0%}"
    yield "fragmentation", f"{inside} of running blocks, {outside} of free ones"


def share(part: float, whole: float) -> str:
    """A percentage; empty where there is nothing to share."""
    return f"{100 * part / whole:.1f} %" if whole else ""
