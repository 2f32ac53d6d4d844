"""Reasoning that costs less: budgets, early stops and reuse of shared steps."""
