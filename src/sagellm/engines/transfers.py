"""`KVTransfers`: an engine's cached prefixes to other instances, and theirs into its cache.

    prefill.send("request 1", prompt, "decode-1")          after its prefill
    prefill.send_prefill("request 1", "decode-1")          before it: layer by layer, while it is computed
    for received in decode.poll(): decode.engine.add(...)  finds the prompt cached

Between two steps, on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sagellm.core.errors import RequestError
from sagellm.core.protocols.kv_transfer import (
    KVPath,
    KVTransferChannel,
    ReceivedKV,
    Ticket,
    TransferReport,
)
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.engine import Engine


class KVTransfers:
    """Joins an engine with a channel. Blocks that are sent are pinned until their transfer has ended.

    `follow_steps`: has the channel's copies come behind the steps that a device still computes. `by_layer`:
    the channel reads layers of a block alone.
    """

    def __init__(
        self,
        engine: Engine,
        channel: KVTransferChannel,
        follow_steps: Callable[[], None],
        *,
        by_layer: bool = False,
    ) -> None:
        self.engine, self.channel, self._follow_steps = engine, channel, follow_steps
        num_layers = engine.backend.get_kv_schema().num_layers
        engine.prefill_sends.attach(channel, num_layers, follow_steps, by_layer=by_layer)
        self._sent: dict[Ticket, PrefixHit] = {}
        self.reports: list[TransferReport] = []
        """Of transfers from here that have ended; the caller takes them away."""

    def send(
        self,
        request_id: str,
        tokens: Tokens,
        target: str,
        namespace: Namespace = Namespace(),
        note: bytes = b"",
    ) -> Ticket:
        """Send what is cached of a prompt, in whole blocks.

        A step in flight is completed first: what it has published might still fail.
        """
        kv = self.engine.kv
        self.engine.drain()
        hit = kv.pins.hold(kv.quotes.lookup(tokens, kv.namespace_of(namespace)))
        self._follow_steps()
        path = KVPath(request_id, tokens, hit.namespace, kv.index.block_ids(hit), note)
        try:
            ticket = self.channel.transfer(path, target)
        except Exception:
            kv.pins.let_go(hit)
            raise
        self._sent[ticket] = hit
        return ticket

    def send_prefill(self, request_id: str, target: str, note: bytes = b"") -> Ticket:
        """Send the prompt of a request, in whole blocks, while the engine computes it.

        The target makes room for all of it now. Layers go as they are computed, of each chunk of the prompt;
        the report comes once the prompt is there. If the request ends before, or a step of it fails, the
        transfer is cancelled; `send` sends what is cached then. The note goes now, so it names no token that
        the prefill draws. Raises `RequestError` for a request that the engine does not have.
        """
        self.engine.drain()
        state = self.engine.find(request_id)
        if state is None:
            raise RequestError(f"no request {request_id!r} to send: add it first", "request_id")
        return self.engine.prefill_sends.begin(state, target, note)

    def poll(self) -> Sequence[ReceivedKV]:
        """Move transfers on; returns what has come.

        A step in flight is completed first if blocks are reserved or published here: it may write to those
        that are free now, and what it has published may fail. What comes after that waits for the next call.
        """
        may_take = self.channel.wants_blocks
        if may_take:
            self.engine.drain()
            self._follow_steps()
        self._take_reports(may_take=may_take)
        return self.channel.received()

    def close(self) -> None:
        """End all transfers, and close the channel; `reports` has how they ended.

        A step in flight is completed first, since what has come is published.
        """
        try:
            self.engine.drain()
        finally:
            self.channel.close()
            self._take_reports(may_take=True)

    def _take_reports(self, *, may_take: bool) -> None:
        for report in self.channel.poll(may_take=may_take):
            hit = self._sent.pop(report.ticket, None)
            if hit is None:
                self.engine.prefill_sends.end(report.ticket)
            else:
                self.engine.kv.pins.let_go(hit)
            self.reports.append(report)
