"""A group that picks backend and algorithm by size.

It also fuses small tensors, rounds on the wire where asked, and counts what it does.

Ranks on one host use shared memory for CPU tensors where the table says so; everything else goes through
`torch.distributed`.
"""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from sagellm.comm.collectives._buffers import (
    Broken,
    FinishedWork,
    check_apart,
    check_group,
    no_copy,
)
from sagellm.comm.collectives.metrics import CollectiveCount, CollectiveKind, CommMeter
from sagellm.comm.collectives.selection import ONE_SHOT, TORCH, TWO_SHOT, WAYS, SelectionTable
from sagellm.comm.collectives.shared_memory import (
    CELL_BYTES,
    ONE_SHOT_BYTES,
    SLOT_BYTES,
    SharedMemoryBackend,
    usable_kernel,
)
from sagellm.comm.collectives.shared_region import MOST_RANKS, RegionLayout, SharedRegion
from sagellm.comm.collectives.torch_distributed import (
    TIMEOUT_S,
    StreamWork,
    TorchDistributedBackend,
    recorded,
    streams_of,
)
from sagellm.comm.collectives.wire import all_reduce_rounded
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import CapacityError, CommError, ConfigError, KernelError
from sagellm.core.protocols.collectives import (
    CommBackendProtocol,
    ReduceOp,
    WireFormat,
    Work,
    WorkStatus,
)

log = logging.getLogger("sagellm.collectives")
BUCKET_BYTES = 25 << 20
_SHOTS = {ONE_SHOT: 1, TWO_SHOT: 2}  # 0: torch


class AutoBackend:
    """One rank of a group. The table and `bucket_bytes` are those of rank 0.

    Its two halves, `shared` and `torch`, fail together: else ranks could go on with different operations.
    Where a rank cannot use shared memory, no rank does, and a warning says why.

    `backend` names torch's transport. `table` is the path of a selection table; without it, the one that
    comes with sageLLM counts. `meter` counts calls, bytes and seconds. `adds_in_order`: sums of CPU
    tensors are formed in order of rank.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Any,
        *,
        backend: str = "gloo",
        table: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
        hostname: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        check_group(rank, world_size)
        self.rank, self.world_size = rank, world_size
        self._clock = clock or MonotonicClock()
        self._now = self._clock.now
        self.meter = CommMeter(self._clock, world_size)
        self._all_reduces = self.meter.counts[CollectiveKind.ALL_REDUCE] = CollectiveCount()
        settings = _settings_of_rank_0(rank, store, table, bucket_bytes)
        self.table, self._bucket_bytes = SelectionTable.of_json(settings["table"]), settings["bucket_bytes"]
        self._shot_sizes, ways = self.table.rows[CollectiveKind.ALL_REDUCE]
        self._shots = [_SHOTS.get(way, 0) for way in ways]
        self._broken = Broken()
        self.shared: SharedMemoryBackend | None = None
        self.torch = TorchDistributedBackend(
            *(rank, world_size, c10d.PrefixStore("torch", store)),
            backend=backend, timeout_s=timeout_s, hostname=hostname, broken=self._broken,
        )  # fmt: skip
        try:
            self.shared = self._joined(c10d.PrefixStore("shared", store), timeout_s)
        except BaseException:
            self.torch.close()
            raise
        self.adds_in_order = self.shared is not None and all(self._shots)

    def _joined(self, store: Any, timeout_s: float) -> SharedMemoryBackend | None:
        """This rank of a group in shared memory, if all ranks can join."""
        rank, world_size = self.rank, self.world_size
        place, reason = _place(world_size)
        places = _of_all_ranks(store, "place", rank, world_size, place)
        if not place or any(other != place for other in places):
            if reason:
                log.warning("ranks do not use shared memory: %s", reason)
            return None
        layout, region = RegionLayout(world_size, SLOT_BYTES, CELL_BYTES, ONE_SHOT_BYTES), None
        try:
            region = SharedRegion(rank, store, layout, min(timeout_s, TIMEOUT_S), self._clock)
        except (CommError, CapacityError, OSError) as error:
            reason = f"rank {rank}: {error}"
        try:
            reasons = _of_all_ranks(store, "region", rank, world_size, reason)
            if region is not None and not any(reasons):
                return SharedMemoryBackend(
                    *(rank, world_size, store),
                    timeout_s=timeout_s, clock=self._clock, region=region, broken=self._broken,
                )  # fmt: skip
        except BaseException:
            if region is not None:
                region.close()
            raise
        if region is not None:
            region.close()
        log.warning("ranks do not use shared memory: %s", next(filter(None, reasons)))
        return None

    def all_reduce(
        self,
        buffer: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        wire: WireFormat = WireFormat.EXACT,
    ) -> Work:
        kind, num_bytes, shared = CollectiveKind.ALL_REDUCE, buffer.nbytes, self.shared
        if wire != WireFormat.EXACT:
            return self._timed(kind, num_bytes, self._rounded, buffer, ReduceOp(op), WireFormat(wire))
        shots = self._shots[bisect_left(self._shot_sizes, num_bytes)]
        if shared is None or not shots or not buffer.is_cpu:
            return self._run(kind, buffer, buffer, op)
        began_s = self._now()  # from here on few calls: a small buffer takes 5 us
        work = shared.all_reduce(buffer, op, num_shots=shots)
        count = self._all_reduces
        count.num_calls += 1
        count.num_bytes += num_bytes
        count.seconds += self._now() - began_s
        return work

    def all_reduce_many(self, buffers: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM) -> Work:
        for buffer in buffers:
            check_apart(buffer)
        works = [self._reduce_bucket(bucket, op) for bucket in _buckets(buffers, self._bucket_bytes)]
        return _AllOf(works)

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> Work:
        return self._run(CollectiveKind.ALL_GATHER, output, output, part)

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Work:
        return self._run(CollectiveKind.REDUCE_SCATTER, buffer, output, buffer, op)

    def broadcast(self, buffer: torch.Tensor, source: int) -> Work:
        return self._run(CollectiveKind.BROADCAST, buffer, buffer, source)

    def all_to_all(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
    ) -> Work:
        """With sizes, the ranks' buffers differ, so the way is that of size 0."""
        kind, sizes = CollectiveKind.ALL_TO_ALL, (output_sizes, input_sizes)
        way = self.table.way(kind, buffer.nbytes if sizes == (None, None) else 0)
        return self._run(kind, buffer, output, buffer, *sizes, way=way)

    def send(self, buffer: torch.Tensor, target: int, *, tag: int = 0) -> Work:
        return self._run(CollectiveKind.SEND, buffer, buffer, target, tag=tag)

    def recv(self, buffer: torch.Tensor, source: int, *, tag: int = 0) -> Work:
        return self._run(CollectiveKind.RECV, buffer, buffer, source, tag=tag)

    def barrier(self) -> Work:
        return self._run(CollectiveKind.BARRIER, torch.empty(0))

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()
        self.torch.close()

    def _backend(self, buffer: torch.Tensor, way: str = "") -> CommBackendProtocol:
        """The half that takes the buffer, by torch if the table says so.

        Messages in shared memory move when ranks call it, so they end before torch's half makes ranks wait.
        """
        if self.shared is None:
            return self.torch
        if way != TORCH and buffer.is_cpu:
            return self.shared
        self.shared.end_messages()
        return self.torch

    def _run(
        self, kind: CollectiveKind, sized: torch.Tensor, *given: Any, way: str | None = None, **named: Any
    ) -> Work:
        """Carry an operation out on the half for the size of `sized`."""
        if way is None and kind in WAYS:
            way = self.table.way(kind, sized.nbytes)
        call: Callable[..., Work] = getattr(self._backend(sized, way or ""), kind.value)
        return self._timed(kind, sized.nbytes, call, *given, **named)

    def _rounded(self, buffer: torch.Tensor, op: ReduceOp, wire: WireFormat) -> Work:
        if buffer.is_cpu:
            all_reduce_rounded(self._backend(buffer), buffer, op, wire)
            return FinishedWork()
        backend = self._backend(buffer)
        streams = streams_of(buffer)
        begun = recorded(streams)
        all_reduce_rounded(backend, buffer, op, wire)
        return StreamWork(None, no_copy, [], self._broken, streams, begun, recorded(streams))

    def _reduce_bucket(self, bucket: list[torch.Tensor], op: ReduceOp) -> Work:
        if len(bucket) == 1:
            return self.all_reduce(bucket[0], op)
        flat = torch.cat([buffer.reshape(-1) for buffer in bucket])
        parts = torch.split(flat, [buffer.numel() for buffer in bucket])
        work: Any = self.all_reduce(flat, op)

        def copy_back() -> None:
            with torch.no_grad():
                for buffer, part in zip(bucket, parts, strict=True):
                    buffer.copy_(part.view(buffer.shape))

        work.then(copy_back)
        reduced: Work = work
        return reduced

    def _timed(
        self, kind: CollectiveKind, num_bytes: int, call: Callable[..., Work], *given: Any, **named: Any
    ) -> Work:
        began_s = self._now()
        work = call(*given, **named)
        if isinstance(work, StreamWork):
            self.meter.follow(kind, num_bytes, work)
            return work
        self.meter.add(kind, num_bytes, self._now() - began_s)
        return work if isinstance(work, FinishedWork) else _Timed(work, self.meter, kind)


class _Timed:
    """A work that goes on after its submission; waiting for it counts too."""

    def __init__(self, work: Work, meter: CommMeter, kind: CollectiveKind) -> None:
        self._work, self._meter, self._kind = work, meter, kind
        self.poll, self.error, self.then = work.poll, work.error, getattr(work, "then", None)

    def wait(self, timeout_s: float | None = None) -> bool:
        began_s = self._meter.clock.now()
        try:
            return self._work.wait(timeout_s)
        finally:
            self._meter.add(self._kind, 0, self._meter.clock.now() - began_s, num_calls=0)


class _AllOf:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def poll(self) -> WorkStatus:
        found = {work.poll() for work in self._works}
        return next((s for s in (WorkStatus.FAILED, WorkStatus.PENDING) if s in found), WorkStatus.DONE)

    def wait(self, timeout_s: float | None = None) -> bool:
        """The timeout is for each of them."""
        return all(work.wait(timeout_s) for work in self._works)

    def error(self) -> Exception | None:
        return next((error for work in self._works if (error := work.error()) is not None), None)


def _buckets(buffers: Iterable[torch.Tensor], most_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Buffers of one dtype and device, in order, up to so many bytes together."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    num_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for buffer in buffers:
        key = buffer.dtype, buffer.device
        num_bytes[key] = num_bytes.get(key, 0) + buffer.nbytes
        if key in open_buckets and num_bytes[key] > most_bytes:
            yield open_buckets.pop(key)
            num_bytes[key] = buffer.nbytes
        open_buckets.setdefault(key, []).append(buffer)
    yield from open_buckets.values()


def _settings_of_rank_0(rank: int, store: Any, table: str | None, bucket_bytes: int) -> dict[str, Any]:
    """The ranks must choose alike, so the others read no file. Raises `ConfigError` on all of
    them."""
    if rank == 0:
        try:
            chosen = SelectionTable.read(Path(table) if table is not None else None).as_json()
        except ConfigError as error:
            store.set("sagellm/selection", json.dumps({"error": str(error)}))
            raise
        store.set("sagellm/selection", json.dumps({"table": chosen, "bucket_bytes": bucket_bytes}))
    settings: dict[str, Any] = json.loads(store.get("sagellm/selection"))
    if "error" in settings:
        raise ConfigError(f"rank 0: {settings['error']}")
    return settings


def _of_all_ranks(store: Any, name: str, rank: int, world_size: int, value: str) -> list[str]:
    """What each rank says, in order."""
    store.set(f"sagellm/{name}/{rank}", value)
    return [store.get(f"sagellm/{name}/{other}").decode() for other in range(world_size)]


def _place(world_size: int) -> tuple[str, str]:
    """Where a rank runs: equal for ranks that can open each other's memory. Empty where it cannot be shared,
    and then why, if that is worth a warning."""
    if world_size > MOST_RANKS:
        return "", f"it takes at most {MOST_RANKS} ranks"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        place = f"{boot} {Path('/proc/self/ns/pid').stat().st_ino} {os.getuid()}"
        usable_kernel()
    except OSError:  # not Linux
        return "", ""
    except KernelError as error:
        return "", str(error)
    return place, ""


PLUGIN = AutoBackend
