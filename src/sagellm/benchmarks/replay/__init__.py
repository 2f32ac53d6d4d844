"""Replays traces: what a policy hits at a capacity, and the upper bound."""
