"""`EndedTransfers`: how transfers have ended here, until their senders know it.

If the END of a transfer is lost with its link, the sender offers the transfer again. It gets the same END
then, and the engine, which has been told, is not told again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sagellm.comm.kv_transfer.messages import End

MAX_SENDERS = 1024
"""Runs of senders that are remembered; of more, those that were not heard of for longest are forgotten."""


@dataclass(slots=True)
class _Sender:
    """Of one run of an instance. `oldest`: it knows how all transfers with smaller numbers have ended."""

    oldest: int = 0
    ends: dict[int, End] = field(default_factory=dict)


class EndedTransfers:
    """Keeps each END until an offer of its sender says that it is known."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}

    def keep(self, instance: str, end: End) -> None:
        sender = self._sender(instance)
        if end.transfer >= sender.oldest:
            sender.ends[end.transfer] = end

    def find(self, instance: str, transfer: int) -> End | None:
        return self._sender(instance).ends.get(transfer)

    def is_known(self, instance: str, transfer: int, oldest: int) -> bool:
        """Whether the sender knows its end, so that an offer of it is late.

        `oldest`: as the offer has it.
        """
        sender = self._sender(instance)
        if oldest > sender.oldest:
            sender.oldest = oldest
            sender.ends = {number: end for number, end in sender.ends.items() if number >= oldest}
        return transfer < sender.oldest

    def _sender(self, instance: str) -> _Sender:
        found = self._senders.pop(instance, None) or _Sender()
        self._senders[instance] = found
        if len(self._senders) > MAX_SENDERS:
            del self._senders[next(iter(self._senders))]
        return found
