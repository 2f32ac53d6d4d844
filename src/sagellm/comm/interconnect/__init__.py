"""Chips of vendors other than NVIDIA: a data row each, and their torch behind five hooks."""
