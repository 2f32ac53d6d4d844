"""`Member`: an instance as its front knows it."""

from __future__ import annotations

from dataclasses import dataclass

from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats
from sagellm.core.protocols.fleet import EngineClient, HandOverReport, InstanceFacts
from sagellm.core.protocols.router import ExecutionInstance


@dataclass(slots=True)
class Member:
    """An instance as this front knows it. `draining`: it gets no new requests; None: neither the front nor
    the instance has said whether it does. `stats`, `diagnostics`: the last of this connection."""

    client: EngineClient
    facts: InstanceFacts | None = None
    load: ExecutionInstance | None = None
    stats: EngineStats | None = None
    diagnostics: EngineDiagnostics | None = None
    draining: bool | None = None
    fault: str = ""
    num_lost: int = 0
    last_report: HandOverReport | None = None

    @property
    def is_ready(self) -> bool:
        return self.facts is not None and not self.fault

    @property
    def is_here(self) -> bool:
        """Whether it is ready and has reported its load."""
        return self.is_ready and self.load is not None

    @property
    def why(self) -> str:
        """Why it gets no requests; empty if it is connected."""
        return self.fault or str(getattr(self.client, "fault", ""))
