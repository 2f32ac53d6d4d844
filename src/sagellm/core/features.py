"""Names of what not every backend or engine can do: entries of `CapabilityDescriptor.features`."""

from __future__ import annotations

PROMPT_LOGPROBS = "prompt_logprobs"
"""The feature of a backend that computes log-probabilities of prompt tokens."""
REASONING_BUDGETS = "reasoning_budgets"
"""The feature of a backend that ends reasoning by the budgets of `SamplingParams`."""
SYNTHETIC_DRAWS = "synthetic_draws"
"""The feature of a backend whose answers are made-up tokens, for benchmarks."""
DROPPED_BLOCKS = "dropped_blocks"
"""The feature of a backend whose rows go on without blocks out of the middle of their tables."""
REASONING_KV = "reasoning_kv"
"""The feature of an engine that drops KV of reasoning, for requests that ask for it."""
APPROXIMATE_REUSE = "approximate_reuse"
"""The feature of an engine that copies KV to other positions, for requests that ask for it."""
