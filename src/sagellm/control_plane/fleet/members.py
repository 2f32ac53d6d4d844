"""`Member`: an instance as its front knows it; and what several have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats
from sagellm.core.protocols.fleet import EngineClient, HandOverReport, InstanceFacts
from sagellm.core.protocols.router import ExecutionInstance
from sagellm.core.types import CapabilityDescriptor


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


def joint_capability(known: Sequence[CapabilityDescriptor]) -> CapabilityDescriptor:
    """Of several instances: their rows and blocks together, and the features that all have."""
    first = next((each for each in known if each.dtype), known[0])
    return replace(
        first,
        max_num_seqs=sum(each.max_num_seqs for each in known),
        num_blocks=sum(each.num_blocks * each.block_size for each in known) // first.block_size,
        features=frozenset.intersection(*(each.features for each in known)),
    )


def mismatch(facts: InstanceFacts, others: Sequence[InstanceFacts]) -> str:
    """Why requests cannot move between an instance and the others; empty if they can."""
    for other in others:
        if other.instance_id == facts.instance_id:
            continue
        ours, theirs = other.capability, facts.capability
        for name in ("vocab_size", "dtype"):
            found = getattr(ours, name), getattr(theirs, name)
            if all(found) and found[0] != found[1]:
                return (
                    f"its {name} is {found[1]}, that of {other.instance_id} {found[0]}: a fleet serves one "
                    "model"
                )
        schemas = ours.kv_schema, theirs.kv_schema
        if all(schemas) and len({each.model_fingerprint for each in schemas if each}) > 1:
            return f"its model is another one than that of {other.instance_id}"
    return ""
