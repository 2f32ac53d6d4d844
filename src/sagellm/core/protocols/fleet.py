"""Contracts of a fleet: a request that moves from one instance to another.

    front     -> prefill   HandOver(PREFILL, peer="decode-1")     compute the prompt, send its KV to the peer
    front     -> decode    HandOver(DECODE, peer="prefill-1")     wait for that KV, go on from `generated`
    prefill   -> decode    KV of whole blocks, by a transfer

The transfer only saves work: the instance that decodes has all tokens, so where KV does not come it computes
it, or the request fails, as the policy says.

A prefix that a peer has cached comes in the same way: the front has the peer send it, and submits the request
with HandOver(FETCH).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sagellm.core.errors import ConfigError

MAX_ATTEMPT = 2**63 - 1


class HandOverPart(Enum):
    """PREFILL: this instance computes the prompt and its KV goes to the peer. DECODE: the KV of the whole
    prompt comes from the peer. FETCH: what the peer has cached of the prompt comes from there."""

    PREFILL = "prefill"
    DECODE = "decode"
    FETCH = "fetch"


class HandOverState(Enum):
    """BOOTSTRAPPING: the instance knows the request, and nothing of its KV has come. PREALLOCATED: blocks
    are reserved. TRANSFERRING: chunks come, or are sent. READY: the KV is there; where it came to, the
    request is in the engine. FAILED: it did not come in time, not whole, or was damaged."""

    BOOTSTRAPPING = "bootstrapping"
    PREALLOCATED = "preallocated"
    TRANSFERRING = "transferring"
    READY = "ready"
    FAILED = "failed"


class FailurePolicy(Enum):
    """What becomes of a request whose KV does not come.

    RECOMPUTE: it is computed here. FAIL: the request ends with an error.
    """

    RECOMPUTE = "recompute"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class HandOver:
    """One instance's part in a hand-over. `lease_s`: an instance waits so long for a sign of a transfer to
    it; each sign renews it. `attempt`: the same at both instances; KV of another attempt settles nothing.
    `num_tokens`: how many tokens are expected; None: of a DECODE the whole prompt, of a FETCH any number."""

    part: HandOverPart
    peer: str
    lease_s: float = 10.0
    policy: FailurePolicy = FailurePolicy.RECOMPUTE
    attempt: int = 0
    num_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.attempt <= MAX_ATTEMPT:
            raise ConfigError(f"a hand-over has an attempt from 0 to 2**63 - 1, not {self.attempt}")
        if not self.lease_s > 0:
            raise ConfigError(f"the lease of a hand-over is a time above 0 s, not {self.lease_s}")


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
    attempt: int = 0
