"""Backends without tensors: an exact fake for tests, and simulated devices."""

from sagellm.engines.simulator.token_memory import TokenMemoryBackend

__all__ = ["TokenMemoryBackend"]

PLUGIN = "sagellm.engines.simulator.backend:simulated_backend"
