"""Hosts without tensors: an exact fake for tests, and devices that exist as a cost model and a clock."""

from sagellm.engines.simulator.token_memory import TokenMemoryBackend

__all__ = ["TokenMemoryBackend"]
