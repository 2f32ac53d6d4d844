"""Hosts without tensors: an exact fake now; the cost model that simulates devices stands on the same
contract."""

from sagellm.engines.simulator.token_memory import TokenMemoryBackend

__all__ = ["TokenMemoryBackend"]
