"""Typed events, and a synchronous bus that hands them to listeners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from sagellm.core.blocks import Tier
from sagellm.core.types import Namespace, Request


class Event:
    """Something that happened in an engine."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RequestReceived(Event):
    """An engine accepted a request; the event holds it as it was given. The next event is its
    `RequestQueued`. Emitted only if there is a listener."""

    request: Request
    time_s: float


@dataclass(frozen=True, slots=True)
class RequestQueued(Event):
    request_id: str
    num_prompt_tokens: int
    time_s: float


@dataclass(frozen=True, slots=True)
class RequestScheduled(Event):
    """A request got a row in the batch; `num_cached_tokens` came from the prefix index."""

    request_id: str
    num_cached_tokens: int
    time_s: float


@dataclass(frozen=True, slots=True)
class RequestPreempted(Event):
    request_id: str
    num_computed_tokens: int
    time_s: float


@dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    request_id: str
    reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queued_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float


@dataclass(frozen=True, slots=True)
class BlocksStored(Event):
    """Blocks entered the prefix index of a tier below `parent_hash` (None: at the beginning). `hashes` are
    chained content hashes, one per block; `tokens` the int32 bytes of the blocks' tokens."""

    block_ids: tuple[int, ...]
    num_tokens_before: int
    hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    tokens: bytes
    namespace: Namespace
    tier: Tier = Tier.HBM


@dataclass(frozen=True, slots=True)
class BlocksRemoved(Event):
    """Blocks left the prefix index of a tier, deepest first. `cause` is 'capacity', 'cleared' or a policy's
    own word."""

    block_ids: tuple[int, ...]
    cause: str
    hashes: tuple[bytes, ...]
    namespace: Namespace
    tier: Tier = Tier.HBM


@dataclass(frozen=True, slots=True)
class IndexCleared(Event):
    """The device's prefix index is empty."""


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    """One engine step: sizes of what ran and the time that it took."""

    step: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    duration_s: float


E = TypeVar("E", bound=Event)


class EventBus:
    """Listeners by event type, called in order of subscription on the thread that emits. A listener must not
    raise. If it does, the error reaches the emitter, so that no failure is silent."""

    def __init__(self) -> None:
        self._listeners: dict[type, list[Callable[..., None]]] = {}

    def subscribe(self, kind: type[E], listener: Callable[[E], None]) -> Callable[[], None]:
        """Call `listener` with each event of exactly this type; returns a function that unsubscribes."""
        listeners = self._listeners.setdefault(kind, [])
        listeners.append(listener)
        return lambda: listeners.remove(listener)

    def wants(self, kind: type) -> bool:
        """Whether there is a listener. Lets an emitter skip building an event on a hot path."""
        return bool(self._listeners.get(kind))

    def emit(self, event: Event) -> None:
        for listener in tuple(self._listeners.get(type(event), ())):
            listener(event)


class TierEvents(EventBus):
    """Passes on the block events of a tier's index, with its name."""

    def __init__(self, bus: EventBus, tier: Tier) -> None:
        super().__init__()
        self._bus, self._tier = bus, tier

    def wants(self, kind: type) -> bool:
        return self._bus.wants(kind)

    def emit(self, event: Event) -> None:
        if isinstance(event, BlocksStored | BlocksRemoved):
            self._bus.emit(replace(event, tier=self._tier))
