"""Every port number of sageLLM. No other file holds one."""

from __future__ import annotations

from enum import IntEnum


class SagePorts(IntEnum):
    """Default TCP ports. The configuration may override each; 0 asks the system for a free one."""

    HTTP = 8000
    KV_EVENTS = 5557
    KV_EVENTS_REPLAY = 5558
    KV_TRANSFER = 5600
    INSTANCE = 5700
    ROUTER = 8100
