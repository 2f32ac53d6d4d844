"""Micro benchmarks of the KV books: one operation at a time, beside the same operation of other engines."""
