"""Replay of traces: what a policy hits at a capacity, and what nobody can exceed."""
