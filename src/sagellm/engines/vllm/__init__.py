"""Our KV cache policies inside a vLLM server. `register` is vLLM's entry point for plug-ins."""

from __future__ import annotations

CONNECTOR = "SageConnector"
MODULE = "sagellm.engines.vllm.connector"


def register() -> None:
    """Make the name `SageConnector` known to vLLM, once per process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
