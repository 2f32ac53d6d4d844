"""The ranks of a model as threads of one process: as their processes, but they start in no time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore

from sagellm.comm.collectives.torch_distributed import TorchDistributedBackend
from sagellm.core.processes import ProcessGroup
from sagellm.core.protocols.collectives import CommBackendProtocol
from sagellm.engines.native.parallel.backends import AttentionRank, FirstRank, FollowingRank
from sagellm.engines.native.parallel.ffn_rank import FfnRank
from sagellm.engines.native.parallel.ranks import Ranks
from sagellm.engines.native.parallel.split import Split
from tests.engines.native.driver import RecordingBackend

OPTIONS: dict[str, Any] = {"num_blocks": 96, "max_num_seqs": 6, "block_size": 8, "threads": 1}


class RecordingFirstRank(RecordingBackend, FirstRank):
    """`RecordingBackend` as the first rank."""


class RecordingAttentionRank(RecordingBackend, AttentionRank):
    """`RecordingBackend` as the first rank, where others have the MLPs."""


class ThreadGroup(ProcessGroup):
    """Gives messages to threads."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.inboxes = [queue.SimpleQueue[bytes | None]() for _ in range(count)]

    def send(self, message: bytes | memoryview) -> None:
        self.check()
        for inbox in self.inboxes:
            inbox.put(bytes(message))

    def close(self, grace_s: float = 0.0) -> None:
        for inbox in self.inboxes:
            inbox.put(None)


@contextmanager
def first_rank(
    folder: Path,
    split: Split,
    kind: Callable[..., CommBackendProtocol] = TorchDistributedBackend,
    **options: Any,
) -> Iterator[RecordingFirstRank | RecordingAttentionRank]:
    """The first rank, with the others on threads. An error of theirs is raised at the end.

    Micro-batches have three tokens or more.
    """
    options, errors = {**OPTIONS, **options}, list[BaseException]()
    store, group = HashStore(), ThreadGroup(split.num_ranks - 1)

    def ranks(rank: int, processes: ProcessGroup | None = None) -> Ranks:
        collectives = kind(rank, split.num_ranks, store, timeout_s=60.0)
        return Ranks(split.with_rank(rank), collectives, processes)

    def follow(rank: int) -> None:
        own = ranks(rank)
        try:
            backend: FollowingRank | FfnRank
            if split.ffn:
                given = {k: options[k] for k in ("dtype", "threads", "kernels") if k in options}
                records = options.get("capture") is not None
                backend = FfnRank(folder, ranks=own, records=records, **given)
            else:
                backend = FollowingRank(folder, ranks=own, **options)
            while (message := group.inboxes[rank - 1].get()) is not None:
                backend.follow(message)
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread of the test
            errors.append(error)
            group.failure = str(error)
            group._ended.set()
            own.close()  # as the end of its process

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, split.num_ranks)]
    for thread in threads:
        thread.start()
    try:
        backend: RecordingFirstRank | RecordingAttentionRank
        if split.ffn:
            own = ranks(0, group)
            backend = RecordingAttentionRank(folder, ranks=own, micro_batch_tokens=3, **options)
        else:
            backend = RecordingFirstRank(folder, ranks=ranks(0, group), **options)
        yield backend
    finally:
        group.close()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
    backend.close()
