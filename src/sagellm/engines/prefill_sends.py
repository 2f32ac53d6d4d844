"""`PrefillSends`: prompts whose KV goes to another instance while they are computed.

    a step begins       its blocks are named to the channel, and kept in the pool
    a layer is written  it may be sent, of all blocks so far; on the backend's thread
    the step commits    the last layer may be sent, too

So the target has a block whole only after the step that computed it was committed: nothing of a step that
fails, or that draws no token, is ever served there.

If a block that was named is freed (its request ends or is preempted, or the block equals another's), no other
request gets it until the channel has reported the end of the transfer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from sagellm.core.errors import RequestError
from sagellm.core.plan import Chunk, Draft, RequestState
from sagellm.core.protocols.kv_transfer import KVPath, KVTransferChannel, Ticket
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import BlockIds, RequestStatus, Tokens
from sagellm.kvmgr.manager import KVCacheManager

OnLayer: TypeAlias = Callable[[int], None]
"""Called with n once the first n layers of a step are written."""


@dataclass(slots=True)
class _Send:
    """A prompt of `num_blocks` whole blocks.

    `block_ids`: those that the channel knows. The pool keeps them or, once all are in the index, `hit` pins
    them there.
    """

    ticket: Ticket
    path: KVPath
    num_blocks: int
    block_ids: BlockIds = field(default_factory=lambda: array("i"))
    hit: PrefixHit | None = None

    @property
    def request_id(self) -> str:
        return self.path.request_id


class PrefillSends:
    """Sends the prompts of an engine's requests while it computes them.

    All methods but what `begin_step` returns are for the engine's thread. Nothing is sent before `attach`.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._sends: dict[str, _Send] = {}
        """By request, of prompts that are not computed whole."""
        self._by_ticket: dict[Ticket, _Send] = {}

    def attach(
        self,
        channel: KVTransferChannel,
        num_layers: int,
        follow_steps: Callable[[], None],
        *,
        by_layer: bool,
    ) -> None:
        """Send over this channel. `num_layers`: of the model's KV.

        `follow_steps`: has copies come behind what the device still computes. `by_layer`: parts of a block
        can be sent alone; otherwise blocks go when their step has committed.
        """
        self._channel, self._num_layers = channel, num_layers
        self._follow_steps, self._by_layer = follow_steps, by_layer

    def begin(self, state: RequestState, target: str, note: bytes) -> Ticket:
        """Offer the prompt of a request that waits or runs. No step is in flight.

        Raises `RequestError` for a prompt that is sent already, and what the channel raises.
        """
        if state.request_id in self._sends:
            raise RequestError(f"the prompt of {state.request_id!r} is being sent", "request_id")
        request = state.request
        path = KVPath(
            state.request_id, Tokens(request.tokens), self._kv.namespace_of(request.namespace), array("i"),
            note,
        )  # fmt: skip
        num_blocks = state.num_prompt_tokens // self._kv.block_size
        ticket = self._channel.transfer(path, target, by_layer=True, num_blocks=num_blocks)
        send = _Send(ticket, path, num_blocks)
        self._sends[state.request_id] = self._by_ticket[ticket] = send
        if state.status is RequestStatus.RUNNING and self._is_exact(state):
            self._name(send, state.num_computed)
            self._committed(send, state.num_computed)
        return ticket

    def begin_step(self, draft: Draft) -> OnLayer | None:
        """A step is about to be computed. Returns what to call with each of its layers, if anything."""
        parts = []
        for chunk, send in self._of(draft):
            if self._is_exact(chunk.state):
                self._name(send, chunk.end)
                parts.append((send.ticket, len(send.block_ids)))
        return partial(self._written, parts) if parts and self._by_layer else None

    def commit_step(self, draft: Draft) -> None:
        """What the step has computed is right."""
        for chunk, send in self._of(draft):
            self._committed(send, chunk.end)

    def fail_step(self, draft: Draft) -> None:
        """The step has failed: its requests may compute the same again, in other blocks."""
        for _, send in self._of(draft):
            self._cancel(send)

    def leave(self, state: RequestState, *, keep: bool) -> None:
        """The request leaves the batch. Its transfer goes on if its prompt is whole, and with `keep`."""
        send = self._sends.get(state.request_id)
        if send is not None and not (keep and state.num_computed >= state.num_prompt_tokens):
            self._cancel(send)

    def give_way(self, state: RequestState) -> bool:
        """The request lacks memory: cancel its transfer. Returns whether transfers hold blocks of others."""
        send = self._sends.get(state.request_id)
        if send is not None:
            self._cancel(send)
        return self._kv.pool.num_unowned > 0 or self._kv.pins.num_sent > 0

    def end(self, ticket: Ticket) -> None:
        """The channel has reported the end of a transfer."""
        send = self._by_ticket.pop(ticket)
        if self._sends.get(send.request_id) is send:
            del self._sends[send.request_id]
        if send.hit is None:
            self._kv.pool.let_go(send.block_ids)
        else:
            self._kv.pins.let_go(send.hit)

    def _of(self, draft: Draft) -> Iterator[tuple[Chunk, _Send]]:
        """The parts of prompts in a step that are sent."""
        for chunk in list(draft.chunks.values()) if self._sends else ():
            send = self._sends.get(chunk.state.request_id)
            if send is not None:
                yield chunk, send

    def _is_exact(self, state: RequestState) -> bool:
        """Whether all its KV is computed; else the transfer is cancelled."""
        if state.num_approximate:
            self._cancel(self._sends[state.request_id])
        return not state.num_approximate

    def _name(self, send: _Send, num_tokens: int) -> None:
        """Name the blocks that are whole with so many tokens."""
        num_blocks, num_known = self._num_blocks(send, num_tokens), len(send.block_ids)
        if num_blocks > num_known:
            new = self._kv.block_table(send.request_id)[num_known:num_blocks]
            self._kv.pool.keep(new)
            send.block_ids.extend(new)
            self._channel.extend(send.ticket, new)

    def _committed(self, send: _Send, num_tokens: int) -> None:
        num_blocks = self._num_blocks(send, num_tokens)
        self._follow_steps()
        self._channel.computed(send.ticket, self._num_layers, num_blocks)
        if num_blocks == send.num_blocks:
            del self._sends[send.request_id]
            self._pin(send)

    def _pin(self, send: _Send) -> None:
        """The prompt is cached now. Pinned blocks are not evicted, which would make none free."""
        kv, path = self._kv, send.path
        hit = kv.quotes.lookup(path.tokens, path.namespace)
        if kv.index.block_ids(hit) == send.block_ids:
            send.hit = kv.pins.hold(hit)
            kv.pool.let_go(send.block_ids)

    def _num_blocks(self, send: _Send, num_tokens: int) -> int:
        return min(num_tokens // self._kv.block_size, send.num_blocks)

    def _written(self, parts: list[tuple[Ticket, int]], num_layers: int) -> None:
        """On the backend's thread."""
        if num_layers < self._num_layers:
            self._follow_steps()
            for ticket, num_blocks in parts:
                self._channel.computed(ticket, num_layers, num_blocks)

    def _cancel(self, send: _Send) -> None:
        del self._sends[send.request_id]
        self._channel.cancel(send.ticket)
