"""Names of what not every backend or engine can do: entries of `CapabilityDescriptor.features`."""

from __future__ import annotations

PROMPT_LOGPROBS = "prompt_logprobs"
"""The feature of a backend that computes log-probabilities of prompt tokens."""
REASONING_BUDGETS = "reasoning_budgets"
"""The feature of a backend that ends reasoning by the budgets of `SamplingParams`."""
SYNTHETIC_DRAWS = "synthetic_draws"
"""The feature of a backend whose answers are made-up tokens, for benchmarks."""
APPROXIMATE_REUSE = "approximate_reuse"
"""The feature of an engine that copies KV to other positions, for requests that ask for it."""
