"""Evaluates predictors of output length and block reuse, beside trivial baselines."""
