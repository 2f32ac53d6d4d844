"""Contracts of a fleet: a request that moves from one instance to another.

    front     -> prefill   HandOver(PREFILL, peer="decode-1")     compute the prompt, send KV to the peer
    front     -> decode    HandOver(DECODE, peer="prefill-1")     wait for KV, then go on from `generated`
    prefill   -> decode    KV of whole blocks, by a transfer

The transfer only saves work: the instance that decodes has all tokens, so where KV does not come it computes
it, or the request fails, as the policy says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class HandOverPart(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class HandOverState(Enum):
    """BOOTSTRAPPING: the decode side knows the request, and nothing of its KV has come. PREALLOCATED: blocks
    are reserved. TRANSFERRING: chunks come. READY: the KV is there, the request is in the engine. FAILED:
    it did not come in time or was damaged."""

    BOOTSTRAPPING = "bootstrapping"
    PREALLOCATED = "preallocated"
    TRANSFERRING = "transferring"
    READY = "ready"
    FAILED = "failed"


class FailurePolicy(Enum):
    """What becomes of a request whose KV does not come: compute it again here, or end with an error."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class HandOver:
    """One instance's part in a hand-over. `lease_s`: the decode side waits so long for a sign of the
    transfer; each sign renews it."""

    part: HandOverPart
    peer: str
    lease_s: float = 10.0
    policy: FailurePolicy = FailurePolicy.RECOMPUTE


@dataclass(frozen=True, slots=True)
class HandOverReport:
    """A change of a hand-over. `num_layers`: arrived so far, of a transfer by layer. `num_tokens`: what has
    come in the end."""

    request_id: str
    part: HandOverPart
    state: HandOverState
    num_layers: int = 0
    num_tokens: int = 0
    reason: str = ""
