"""Kernels that do in one pass over memory what plain operators do in several."""
