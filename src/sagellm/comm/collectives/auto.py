"""A group that picks backend and algorithm by size.

It also fuses small tensors, rounds on the wire where asked, and counts what it does.

Ranks on one host use shared memory for CPU tensors where the table says so; everything else goes through
`torch.distributed`.
"""

from __future__ import annotations

import json
import os
import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from sagellm.comm.collectives._buffers import FinishedWork, check_group
from sagellm.comm.collectives.metrics import CollectiveCount, CollectiveKind, CommMeter
from sagellm.comm.collectives.selection import ONE_SHOT, TORCH, TWO_SHOT, SelectionTable
from sagellm.comm.collectives.shared_memory import SharedMemoryBackend
from sagellm.comm.collectives.torch_distributed import TIMEOUT_S, TorchDistributedBackend
from sagellm.comm.collectives.wire import all_reduce_rounded
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.protocols.collectives import (
    CommBackendProtocol,
    ReduceOp,
    WireFormat,
    Work,
    WorkStatus,
)

BUCKET_BYTES = 25 << 20
_SHOTS = {ONE_SHOT: 1, TWO_SHOT: 2}  # 0: torch


class AutoBackend:
    """One rank of a group. The table and `bucket_bytes` are those of rank 0.

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
        self.torch = TorchDistributedBackend(
            rank, world_size, c10d.PrefixStore("torch", store), backend=backend, timeout_s=timeout_s,
            hostname=hostname,
        )  # fmt: skip
        self.shared: SharedMemoryBackend | None = None
        if _are_on_one_host(rank, world_size, store):
            self.shared = SharedMemoryBackend(
                rank, world_size, c10d.PrefixStore("shared", store), timeout_s=timeout_s, clock=self._clock
            )
        self.adds_in_order = self.shared is not None and all(self._shots)

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
            return self._timed(kind, num_bytes, self.torch.all_reduce, buffer, op)
        began_s = self._now()  # from here on few calls: a small buffer takes 5 us
        work = shared.all_reduce(buffer, op, num_shots=shots)
        count = self._all_reduces
        count.num_calls += 1
        count.num_bytes += num_bytes
        count.seconds += self._now() - began_s
        return work

    def all_reduce_many(self, buffers: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM) -> Work:
        works = [self._reduce_bucket(bucket, op) for bucket in _buckets(buffers, self._bucket_bytes)]
        return _AllOf(works)

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> Work:
        backend = self._backend(CollectiveKind.ALL_GATHER, output, output.nbytes)
        return self._timed(CollectiveKind.ALL_GATHER, output.nbytes, backend.all_gather, output, part)

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Work:
        kind = CollectiveKind.REDUCE_SCATTER
        backend = self._backend(kind, buffer, buffer.nbytes)
        return self._timed(kind, buffer.nbytes, backend.reduce_scatter, output, buffer, op)

    def broadcast(self, buffer: torch.Tensor, source: int) -> Work:
        backend = self._backend(CollectiveKind.BROADCAST, buffer, buffer.nbytes)
        return self._timed(CollectiveKind.BROADCAST, buffer.nbytes, backend.broadcast, buffer, source)

    def all_to_all(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
    ) -> Work:
        """With sizes, the ranks' buffers differ, so the way is that of size 0."""
        kind = CollectiveKind.ALL_TO_ALL
        is_equal = output_sizes is None and input_sizes is None
        backend = self._backend(kind, buffer, buffer.nbytes if is_equal else 0)
        return self._timed(kind, buffer.nbytes, backend.all_to_all, output, buffer, output_sizes, input_sizes)

    def send(self, buffer: torch.Tensor, target: int, *, tag: int = 0) -> Work:
        backend = self._any_backend(buffer)
        return self._timed(CollectiveKind.SEND, buffer.nbytes, backend.send, buffer, target, tag=tag)

    def recv(self, buffer: torch.Tensor, source: int, *, tag: int = 0) -> Work:
        backend = self._any_backend(buffer)
        return self._timed(CollectiveKind.RECV, buffer.nbytes, backend.recv, buffer, source, tag=tag)

    def barrier(self) -> Work:
        backend = self.shared or self.torch
        return self._timed(CollectiveKind.BARRIER, 0, backend.barrier)

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()
        self.torch.close()

    def _way(self, kind: CollectiveKind, buffer: torch.Tensor, num_bytes: int) -> str:
        if self.shared is None or not buffer.is_cpu:
            return TORCH
        return self.table.way(kind, num_bytes)

    def _backend(self, kind: CollectiveKind, buffer: torch.Tensor, num_bytes: int) -> CommBackendProtocol:
        is_torch = self.shared is None or self._way(kind, buffer, num_bytes) == TORCH
        return self.torch if is_torch or self.shared is None else self.shared

    def _any_backend(self, buffer: torch.Tensor) -> CommBackendProtocol:
        return self.shared if self.shared is not None and buffer.is_cpu else self.torch

    def _rounded(self, buffer: torch.Tensor, op: ReduceOp, wire: WireFormat) -> Work:
        all_reduce_rounded(self._any_backend(buffer), buffer, op, wire)
        return FinishedWork()

    def _reduce_bucket(self, bucket: list[torch.Tensor], op: ReduceOp) -> Work:
        if len(bucket) == 1:
            return self.all_reduce(bucket[0], op)
        flat = torch.cat([buffer.reshape(-1) for buffer in bucket])
        parts = torch.split(flat, [buffer.numel() for buffer in bucket])
        work = self.all_reduce(flat, op)

        def copy_back() -> None:
            for buffer, part in zip(bucket, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))

        return _Followed(work, copy_back)

    def _timed(
        self, kind: CollectiveKind, num_bytes: int, call: Callable[..., Work], *given: Any, **named: Any
    ) -> Work:
        began_s = self._clock.now()
        work = call(*given, **named)
        self.meter.add(kind, num_bytes, self._clock.now() - began_s)
        return work if isinstance(work, FinishedWork) else _Timed(work, self.meter, kind)


class _Timed:
    """A work that goes on after its submission; waiting for it counts too."""

    def __init__(self, work: Work, meter: CommMeter, kind: CollectiveKind) -> None:
        self._work, self._meter, self._kind = work, meter, kind
        self.poll, self.error = work.poll, work.error

    def wait(self, timeout_s: float | None = None) -> bool:
        began_s = self._meter.clock.now()
        try:
            return self._work.wait(timeout_s)
        finally:
            self._meter.add(self._kind, 0, self._meter.clock.now() - began_s, num_calls=0)


class _Followed:
    """A work after which something is copied, once."""

    def __init__(self, work: Work, then: Callable[[], None]) -> None:
        self._work, self._then = work, then
        self._is_copied = False
        self.error = work.error

    def poll(self) -> WorkStatus:
        status = self._work.poll()
        if status is WorkStatus.DONE and not self._is_copied:
            self._is_copied = True
            self._then()
        return status

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._work.wait(timeout_s) and self.poll() is WorkStatus.DONE


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
    """The ranks must choose alike, so the others read no file."""
    if rank == 0:
        chosen = SelectionTable.read(Path(table) if table is not None else None)
        store.set("sagellm/selection", json.dumps({"table": chosen.as_json(), "bucket_bytes": bucket_bytes}))
    settings: dict[str, Any] = json.loads(store.get("sagellm/selection"))
    return settings


def _are_on_one_host(rank: int, world_size: int, store: Any) -> bool:
    """Whether all ranks can open each other's memory."""
    place = _place()
    store.set(f"sagellm/place/{rank}", place)
    return all(store.get(f"sagellm/place/{other}").decode() == place for other in range(world_size))


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino} {os.getuid()}"
    except OSError:
        return f"{platform.node()} {os.getpid()}"  # not Linux: no rank is on the same place


PLUGIN = AutoBackend
