"""Our KV cache policies inside a vLLM server. `register` is vLLM's entry point for plug-ins."""

from __future__ import annotations

CONNECTORS = {
    "SageConnector": "sagellm.engines.vllm.connector",
    "SageStoreConnector": "sagellm.engines.vllm.store",
}
"""Our connectors, and the modules that have them."""


def register() -> None:
    """Make the names of our connectors known to vLLM, once per process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
