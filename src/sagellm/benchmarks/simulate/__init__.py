"""Simulation: the real engine on a clock that a cost model moves."""
