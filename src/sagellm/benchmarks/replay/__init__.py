"""Replay of traces: what a policy hits at a capacity, and the bound that none can exceed."""
