"""Micro benchmarks of KV management: single operations, also of other engines."""
