"""Strategies by name: which passes, in which order, with which options.

Passes that reorder the waiting outrank those before them: the last one decides, and leaves the order of its
equals to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sagellm.core.errors import ConfigError, UnknownNameError, nearest
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.registry import registry

Recipe = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of passes with their options, in order."""

CLOSING: Recipe = (("chunked_prefill", {}), ("memory_aware_preemption", {}))
"""Token budget and memory: the end of every strategy that sees to them nowhere else."""

PRESETS: Mapping[str, Recipe] = {
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
"""`fifo`: order of arrival. `priority`: classes with ageing, the urgent push out. `slo`: deadlines.
`adaptive`: deadlines within priorities, and nobody is let in whom memory will not hold. `throughput`: reuse
and full steps. `fair`: tenants by weight. `vllm-like`: vLLM's own order, as a baseline."""


def make(name: str, options: Mapping[str, Mapping[str, Any]] | None = None) -> list[SchedulerPass]:
    """New passes of a preset, in order; `options` by name of pass go over those of the preset.

    New passes begin clean: what they learn and count (speeds, virtual tokens, turns) is theirs. Whoever swaps
    strategies and wants to keep it hands the same objects over again. Raises `UnknownNameError` for a preset
    that there is not, and for options of a pass that the preset does not have.
    """
    if name not in PRESETS:
        listed = f" Known: {', '.join(sorted(PRESETS))}."
        guess = nearest(name, PRESETS)
        unknown = f"unknown preset of the scheduler {name!r}"
        raise UnknownNameError(f"{unknown}.{guess if guess != listed else ''}{listed}")
    recipe, given = PRESETS[name], options or {}
    names = [one for one, _ in recipe]
    for one in given:
        if one not in names:
            raise UnknownNameError(f"preset {name!r} has no pass {one!r}; it has {', '.join(names)}")
    return [make_pass(one, {**known, **given.get(one, {})}) for one, known in recipe]


def make_pass(name: str, options: Mapping[str, Any]) -> SchedulerPass:
    """A new pass; `ConfigError` where it refuses the value of an option."""
    passes = registry("pass")
    try:
        made: SchedulerPass = passes.create(name, **options)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ConfigError(f"pass {name!r} with {dict(options)}: {error}") from error
    passes.check_values(name, options)
    return made
