"""Contracts of a fleet: instances seen from outside, and requests that move.

    front     -> prefill   HandOver(PREFILL, peer="decode-1")     compute the prompt, send its KV to the peer
    front     -> decode    HandOver(DECODE, peer="prefill-1")     wait for that KV, go on from `generated`
    prefill   -> decode    KV of whole blocks, by a transfer

The transfer only saves work: the instance that decodes has all tokens, so where KV does not come it computes
it, or the request fails, as the policy says.

A prefix that a peer has cached comes in the same way: the front has the peer send it, and submits the request
with HandOver(FETCH).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from sagellm.core.errors import ConfigError, SageError
from sagellm.core.events import BlocksRemoved, BlocksStored, IndexCleared
from sagellm.core.protocols.router import ExecutionInstance, InstanceType
from sagellm.core.types import CapabilityDescriptor, Request, RequestOutput

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

    @property
    def is_last(self) -> bool:
        """Whether no other report of this part follows."""
        return self.state in (HandOverState.READY, HandOverState.FAILED)


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What an instance says of itself when it is connected.

    `start_id`: another one after each start of its process; a cache of before is gone then. `transfers`: what
    others need to send KV to it (`KVTransferChannel.metadata`); empty: it takes none, and sends none.
    `capability.dtype` is empty where it is not known. `draws_by_position`: a sampled token depends on the
    request's seed and its position alone, so an answer may go on there as it would have gone on elsewhere.
    `version`: of its software. `uptime_s`: since it began to serve. `kv_events`, `kv_replay`: where it
    publishes KV events for others; empty: nowhere. `draining`: a front has drained it, and none has ended
    that.
    """

    instance_id: str
    start_id: str
    kind: InstanceType
    capability: CapabilityDescriptor
    max_model_len: int
    pid: int = 0
    transfers: bytes = b""
    draws_by_position: bool = True
    version: str = ""
    uptime_s: float = 0.0
    kv_events: str = ""
    kv_replay: str = ""
    draining: bool = False


class Connected(NamedTuple):
    """An instance is there, or there again; it has no request of this client."""

    facts: InstanceFacts


class InstanceLost(NamedTuple):
    """The connection has ended, and with it every request on it. The client tries to connect again."""

    reason: str


class RequestRefused(NamedTuple):
    """A request that the instance does not take. `again`: it has failed there, and may succeed elsewhere."""

    request_id: str
    error: SageError
    again: bool = False


class KVChanges(NamedTuple):
    """What entered and left the caches of an instance, in order. `is_complete`: nothing was left out."""

    events: Sequence[BlocksStored | BlocksRemoved | IndexCleared]
    is_complete: bool = True


class DrainChanged(NamedTuple):
    """A front, this or another one, has drained the instance or ended that."""

    draining: bool


class CallResult(NamedTuple):
    """The result of a call, or its error."""

    call_id: int
    result: Any = None
    error: SageError | None = None


InstanceEvent = (
    RequestOutput
    | ExecutionInstance
    | HandOverReport
    | KVChanges
    | Connected
    | InstanceLost
    | RequestRefused
    | DrainChanged
    | CallResult
)


class EngineClient(Protocol):
    """An engine instance as the control plane sees it. It may run in another process.

    No method waits. What is said of a request names it by the id with which it was submitted.
    """

    @property
    def instance_id(self) -> str: ...

    @property
    def facts(self) -> InstanceFacts | None:
        """None while it is not connected."""

    def submit(
        self, request: Request, hand_over: HandOver | None = None, onward: HandOver | None = None
    ) -> None:
        """Start a request. Does nothing while not connected: a `InstanceLost` has said so.

        `onward`: where it goes after its prefill, if `hand_over` fetches a prefix for that. `arrival_s` of
        the request is a time of this side's clock; the instance counts from the age of the request.
        """

    def abort(self, request_id: str) -> None:
        """Drop a request, wherever it is. It may have ended, or never have been there."""

    def call(self, name: str, arguments: Sequence[Any] = ()) -> int:
        """Ask something of `EngineCore`; an `Answer` with this number follows, or a `InstanceLost`."""

    def drain(self, *, draining: bool) -> None:
        """Have it tell each front that it is drained, or not any more.

        A server that is not ours keeps nothing in mind.
        """

    def add_peer(self, facts: InstanceFacts) -> None:
        """Tell it where another instance takes KV."""

    def lose_peer(self, instance_id: str) -> None:
        """Tell it that no KV will come from there."""

    def poll(self) -> Sequence[InstanceEvent]:
        """What has happened since the last call, in order."""

    def close(self) -> None: ...


class EngineClients(Protocol):
    """The instances that a front knows."""

    def wait(self, timeout_s: float) -> Sequence[EngineClient]:
        """Those with something to `poll`, after at most this time."""

    def wake(self) -> None:
        """Have `wait` return. For any thread."""

    def close(self) -> None: ...
