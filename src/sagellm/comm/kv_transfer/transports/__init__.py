"""What moves the messages of a channel. A transport is one file here; its name is the file's name.

transport = TRANSPORTS.create("tcp", key=key, host="10.0.0.1")
"""

from __future__ import annotations

from sagellm.core.protocols.kv_transfer import TransportEngine
from sagellm.core.registry import Registry

TRANSPORTS: Registry[TransportEngine] = Registry(
    "transport", __name__, "sagellm.kv_transports", TransportEngine
)
