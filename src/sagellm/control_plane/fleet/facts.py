"""What the facts of a fleet's instances say together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sagellm.core.protocols.fleet import InstanceFacts
from sagellm.core.types import CapabilityDescriptor


def joint_capability(known: Sequence[InstanceFacts]) -> CapabilityDescriptor:
    """Of all instances together; there is at least one."""
    capabilities = [facts.capability for facts in known]
    first = next((each for each in capabilities if each.dtype), capabilities[0])
    return replace(
        first,
        max_num_seqs=sum(each.max_num_seqs for each in capabilities),
        num_blocks=sum(each.num_blocks * each.block_size for each in capabilities) // first.block_size,
        features=frozenset.intersection(*(each.features for each in capabilities)),
    )


def mismatch(facts: InstanceFacts, others: Iterable[InstanceFacts]) -> str:
    """Why requests cannot move between this instance and the others; empty if they can."""
    for other in others:
        if other.instance_id == facts.instance_id:
            continue
        ours, theirs = other.capability, facts.capability
        for name in ("vocab_size", "dtype"):
            told = getattr(ours, name), getattr(theirs, name)
            if all(told) and told[0] != told[1]:
                text = f"its {name} is {told[1]}, that of {other.instance_id} {told[0]}"
                return f"{text}: a fleet serves one model"
        schemas = ours.kv_schema, theirs.kv_schema
        if all(schemas) and len({each.model_fingerprint for each in schemas if each}) > 1:
            return f"its model is another one than that of {other.instance_id}"
    return ""
