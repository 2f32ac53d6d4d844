"""`Communication`: calls, bytes and seconds of LMDeploy's collectives and KV transfers.

LMDeploy with our patch 0004 calls `begin` and `end` around each collective of `torch.distributed`, and around
each transfer of KV between instances. Its model runs in one process per GPU, and each process counts its own.

The seconds are those of the calling thread. On a GPU, and for an asynchronous collective, that is the time of
the launch and not of the transfer: such calls are counted as `num_launched` too. A CUDA graph calls no Python
when it is replayed, so collectives in it are counted once, when it is captured; compiled code is not counted.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError
from sagellm.engines.guests.settings import GuestSettings

logger = logging.getLogger("lmdeploy.sagellm")


class CommOperation(NamedTuple):
    """A kind of call. `group`: the name of a process group or of a remote instance; "" for all ranks."""

    name: str
    group: str


class Call(NamedTuple):
    """A call that has begun at `began_s` of the clock."""

    operation: CommOperation
    num_bytes: int
    is_launch: bool
    began_s: float


@dataclass(slots=True)
class CallCount:
    """Sums over the calls of one operation. `num_launched`: calls that did not wait for their transfer."""

    num_calls: int = 0
    num_launched: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        launched = f", {self.num_launched} of them launches only" if self.num_launched else ""
        return f"{self.num_calls} calls{launched}, {self.num_bytes / 1e6:.1f} MB, {self.seconds:.3f} s"


class Communication:
    """Counts of one process, logged every `report_s` seconds; 0 for never."""

    def __init__(self, clock: Clock, report_s: float = 0.0) -> None:
        self._clock, self._report_s, self._reported_s = clock, report_s, clock.now()
        self.counts: dict[CommOperation, CallCount] = {}

    def begin(self, name: str, num_bytes: int, group: Any, *, is_launch: bool) -> Call:
        """Before a call.

        `num_bytes`: the larger of what it reads and what it writes on this rank.
        """
        label = group if isinstance(group, str) else getattr(group, "group_name", "")
        return Call(CommOperation(name, label), num_bytes, is_launch, self._clock.now())

    def end(self, call: Call) -> None:
        """After it. A collective that failed is counted too; a transfer that failed is not."""
        now_s = self._clock.now()
        count = self.counts.setdefault(call.operation, CallCount())
        count.num_calls += 1
        count.num_launched += call.is_launch
        count.num_bytes += call.num_bytes
        count.seconds += now_s - call.began_s
        if self._report_s and now_s - self._reported_s >= self._report_s:
            self.report()

    def report(self) -> None:
        """One line in the log."""
        self._reported_s = self._clock.now()
        parts = [f"{name} {group}: {count}" for (name, group), count in sorted(self.counts.items())]
        logger.info("sageLLM: communication: %s", "; ".join(parts) or "none")

    def check(self) -> None:
        """Raise `BookkeepingError` where counts contradict each other."""
        for operation, count in self.counts.items():
            if not 0 <= count.num_launched <= count.num_calls or count.num_bytes < 0 or count.seconds < 0:
                raise BookkeepingError(f"{operation.name}: {count} cannot be")


def watch_communication() -> Communication:
    """What `LMDEPLOY_COMM_PLUGIN` names. Of `SAGELLM_LMDEPLOY` it heeds `report_s`."""
    given = json.loads(os.environ.get("SAGELLM_LMDEPLOY", "{}"))
    report_s = GuestSettings.of({"report_s": given["report_s"]} if "report_s" in given else {}).report_s
    return Communication(MonotonicClock(), report_s)
