"""Chips of other vendors: a data row each, and their torch behind hooks."""
