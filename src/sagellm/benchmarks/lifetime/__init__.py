"""How well output lengths and block reuse are predicted, workload by workload, beside trivial baselines."""
