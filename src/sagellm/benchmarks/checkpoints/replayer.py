"""Replays a trace on a hybrid model's cache: rules for checkpoints x budgets.

Rules of the replay: a cold start; requests are served at their arrival, take no time, and insert no outputs.
A prompt counts its full blocks without its last token, which is always computed. A request reuses the deepest
checkpoint on its path, computes the rest, and may keep the state behind each block that it computes. After
each request the cache has at most the budget, in bytes of attention blocks and checkpoints together; working
memory of running requests is not counted.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sagellm.benchmarks.checkpoints.bound import upper_bound
from sagellm.benchmarks.checkpoints.cache import HybridCache
from sagellm.benchmarks.checkpoints.groups import KVGroups
from sagellm.benchmarks.checkpoints.keepers import BlockLRU, CheckpointLRU, Keeper, ValueKeeper
from sagellm.benchmarks.checkpoints.rules import Served, rule
from sagellm.benchmarks.checkpoints.tree import paths
from sagellm.benchmarks.replay.block_trace import BlockTrace
from sagellm.benchmarks.replay.replayer import first_counted
from sagellm.core.errors import ConfigError

GIB = 1 << 30
VALUE, BOUND, UNLIMITED = "value", "bound", "unlimited"
SGLANG_CAP = 3
POLICIES = ("vllm-sparse", "three-per-path", VALUE, BOUND)


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """What to replay.

    A capacity is `10%` of the attention bytes of the trace's unique blocks, `40GiB`, or
    `unlimited`. `bound` is the upper bound of all policies, without a warm-up."""

    groups: KVGroups
    policies: tuple[str, ...] = POLICIES
    capacities: tuple[str, ...] = ("1%", "2%", "5%", "10%", "25%", UNLIMITED)
    warmup: str = "0%"


@dataclass(frozen=True, slots=True)
class CheckpointResult:
    """One replay. `hits`: reused tokens of each request, empty for the bound, whose counts are None."""

    policy: str
    capacity: str
    budget_bytes: float
    tokens: int
    hit_tokens: int
    hits: array[int]
    peak_bytes: int | None = None
    peak_checkpoint_bytes: int | None = None
    num_made: int | None = None

    @property
    def token_ratio(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def saved_per_gib(self) -> float | None:
        """Saved tokens per GiB of the budget, of the peak where that is unlimited."""
        size = self.budget_bytes if math.isfinite(self.budget_bytes) else self.peak_bytes
        return self.hit_tokens * GIB / size if size else None


def run_checkpoints(
    trace: BlockTrace, plan: CheckpointPlan, on_done: Callable[[], None] = lambda: None
) -> list[CheckpointResult]:
    """Returns the results in order of capacity and policy.

    Calls `on_done` after each. Raises `ConfigError` for an unknown name or a bad capacity.
    """
    cases = [(text, budget(text, trace, plan.groups)) for text in dict.fromkeys(plan.capacities)]
    first = first_counted(trace, plan.warmup)
    for policy in plan.policies:
        if policy not in (VALUE, BOUND):
            rule(policy)
        if policy == BOUND and first:
            raise ConfigError("the bound counts all requests: leave out the warm-up, or the bound")
    results = []
    for text, num_bytes in cases:
        for policy in dict.fromkeys(plan.policies):
            results.append(_run(trace, plan.groups, policy, text, num_bytes, first))
            on_done()
    return results


def budget(text: str, trace: BlockTrace, groups: KVGroups) -> float:
    """Returns a capacity in bytes. Raises `ConfigError` for another text."""
    whole = trace.num_unique * trace.block_tokens * groups.attention_bytes
    try:
        if text == UNLIMITED:
            return math.inf
        if text.endswith("%"):
            size = whole * float(text[:-1]) / 100
        else:
            size = float(text.lower().removesuffix("gib")) * GIB if text.lower().endswith("gib") else 0.0
    except ValueError:
        size = 0.0
    if not (size > 0 and math.isfinite(size)):
        raise ConfigError(
            f"capacity {text!r}: write a share of the unique blocks' bytes as 1%, 40GiB, or unlimited"
        )
    return size


def keeper(name: str, cache: HybridCache) -> Keeper:
    """Returns what makes and keeps checkpoints under that name. Raises `ConfigError` for an unknown one."""
    if name == VALUE:
        return ValueKeeper(cache)
    if name == "vllm-sparse":
        return BlockLRU(cache, rule(name))
    return CheckpointLRU(cache, rule(name), SGLANG_CAP if name == "three-per-path" else None)


def serve_all(
    trace: BlockTrace, groups: KVGroups, budget_bytes: float, make: Callable[[HybridCache], Keeper]
) -> Iterator[tuple[Served, HybridCache]]:
    """Yields what each request found, and the cache after it."""
    cache = HybridCache(groups, trace.block_tokens)
    kept = make(cache)
    for number, (request, path) in enumerate(zip(trace.requests, paths(trace), strict=True), start=1):
        served = Served(
            num_reused=cache.reused(path),
            num_resident=cache.resident(path),
            num_known=cache.known(path),
            num_blocks=path.num_blocks,
            block_tokens=trace.block_tokens,
        )
        cache.insert(path, number)
        kept.serve(request, path, served)
        kept.shrink(budget_bytes)
        yield served, cache


def _run(
    trace: BlockTrace, groups: KVGroups, policy: str, text: str, budget_bytes: float, first: int
) -> CheckpointResult:
    tokens = sum(request.num_input_tokens for request in trace.requests[first:])
    if policy == BOUND:
        most = int(upper_bound(paths(trace), groups, trace.block_tokens, budget_bytes))
        return CheckpointResult(policy, text, budget_bytes, tokens, most, array("q"))
    hits, peak, peak_checkpoints, num_made = array("q"), 0, 0, 0
    for served, cache in serve_all(trace, groups, budget_bytes, lambda cache: keeper(policy, cache)):
        hits.append(served.num_reused * trace.block_tokens)
        peak = max(peak, cache.used_bytes)
        peak_checkpoints = max(peak_checkpoints, cache.checkpoint_bytes)
        num_made = cache.num_made
    return CheckpointResult(
        policy, text, budget_bytes, tokens, sum(hits[first:]), hits, peak, peak_checkpoints, num_made
    )
