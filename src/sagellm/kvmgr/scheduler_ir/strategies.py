"""Strategies by name: which passes, in which order, with which options.

Passes that reorder the waiting requests sort stably: the last of them decides, and its equals keep the order
of the passes before it. A strategy is not an eviction policy, though one of each is called `adaptive`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sagellm.core.errors import ConfigError, UnknownNameError, nearest
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.registry import registry

Recipe = Sequence[tuple[str, Mapping[str, Any]]]
"""Pass names with their options, in order."""

CLOSING: Recipe = (("chunked_prefill", {}), ("memory_aware_preemption", {}))
"""The passes that keep token budget and memory: the end of every strategy without a closing pass."""

STRATEGIES: Mapping[str, Recipe] = {
    "fifo": CLOSING,
    "priority": (("prefix_cache_aware", {}), ("priority_based", {"preempt": True, "fair": True}), *CLOSING),
    "slo": (("prefix_cache_aware", {}), ("slo_aware", {}), *CLOSING),
    "adaptive": (
        ("prefix_cache_aware", {}),
        ("slo_aware", {"ttft_s": 10.0}),
        ("priority_based", {"preempt": True, "fair": True}),
        ("admission", {}),
        *CLOSING,
    ),
    "throughput": (("prefix_cache_aware", {"max_wait_s": 10.0}), ("batching_efficiency", {}), *CLOSING),
    "fair": (("prefix_cache_aware", {}), ("fairness", {}), *CLOSING),
    "vllm-like": (("vllm_like", {}),),
}
"""`fifo`: order of arrival. `priority`: priorities with ageing and preemption. `slo`: deadlines. `adaptive`:
deadlines within priorities; admits only what predicted memory holds. `throughput`: reuse and full steps.
`fair`: tenants by weight. `vllm-like`: vLLM's own order, as a baseline."""


def make(name: str, options: Mapping[str, Mapping[str, Any]] | None = None) -> list[SchedulerPass]:
    """New passes of a strategy, in order. `options`, by pass name, override those of the strategy.

    New passes have learned and counted nothing (step times, virtual tokens, waits); to keep that when a
    strategy is replaced, use the same objects again. Raises `UnknownNameError` for an unknown strategy, and
    for options of a pass that the strategy does not have.
    """
    if name not in STRATEGIES:
        listed = f" Known: {', '.join(sorted(STRATEGIES))}."
        guess = nearest(name, STRATEGIES)
        unknown = f"unknown strategy {name!r}"
        raise UnknownNameError(f"{unknown}.{guess if guess != listed else ''}{listed}")
    recipe, given = STRATEGIES[name], options or {}
    names = [pass_name for pass_name, _ in recipe]
    for pass_name in given:
        if pass_name not in names:
            raise UnknownNameError(f"strategy {name!r} has no pass {pass_name!r}; it has {', '.join(names)}")
    return [make_pass(each, {**known, **given.get(each, {})}) for each, known in recipe]


def make_pass(name: str, options: Mapping[str, Any]) -> SchedulerPass:
    """A new pass. Raises `ConfigError` if it refuses the value of an option."""
    passes = registry("pass")
    try:
        made: SchedulerPass = passes.create(name, **options)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ConfigError(f"pass {name!r} with {dict(options)}: {error}") from error
    passes.check_values(name, options)
    return made
