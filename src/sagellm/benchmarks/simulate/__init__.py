"""Simulation: the real engine on a clock that a cost model moves, one instance or many."""
