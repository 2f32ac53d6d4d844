"""Collectives over `torch.distributed`: gloo, nccl, or the backend of a chip's maker, by name.

The process group is the backend's own: it is neither the default group of `torch.distributed` nor needs one,
so several groups (tensor, pipeline, expert parallelism) live beside each other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from sagellm.comm.collectives._backend import CheckedBackend
from sagellm.comm.collectives._buffers import Broken, Finish, as_bytes, as_result, check_reducible, no_copy
from sagellm.core.errors import CommError, UnknownNameError, nearest
from sagellm.core.protocols.collectives import ReduceOp, WorkStatus

TIMEOUT_S = 300.0
_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
}
_SHOWN_CHARS = 200
_LONGEST_TIMEOUT_S = 365 * 86400.0
_POLL_S = 50e-6
_GROUP_ID = "sagellm/group_id"
ProcessGroup = Any
"""A `torch.distributed` backend: `ProcessGroupGloo`, `ProcessGroupNCCL`, or what a plug-in made."""


def process_group(
    backend: str, rank: int, world_size: int, store: Any, timeout_s: float = TIMEOUT_S,
    hostname: str | None = None,
) -> ProcessGroup:  # fmt: skip
    """A process group of its own, as `torch.distributed` would make it for this backend.

    Gloo listens at `hostname`; without it, at the interface that GLOO_SOCKET_IFNAME or the name of this host
    gives, where strangers may connect.

    Backends of other packages are known by `torch.distributed.Backend.register_backend`, which a chip's torch
    module calls when it is imported. Raises `UnknownNameError` for any other name.
    """
    timeout = timedelta(seconds=min(timeout_s, _LONGEST_TIMEOUT_S))
    if backend == "gloo" and dist.is_gloo_available():
        if hostname is None:
            return dist.ProcessGroupGloo(store, rank, world_size, timeout)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=hostname)]
        gloo._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, world_size, gloo)
    if backend == "nccl" and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        known = [name.lower() for name in dist.Backend._plugins]
        known += [
            name
            for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()))
            if there
        ]
        raise UnknownNameError(
            f"this torch has no backend {backend!r}: import the torch module that brings it first."
            f"{nearest(backend, known)}"
        )
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, world_size, timeout)
    given = c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
    given.store, given.group_rank, given.group_size, given.timeout = store, rank, world_size, timeout
    if rank == 0:
        store.set(_GROUP_ID, f"sagellm-{secrets.token_hex(8)}")
    given.group_id, given.global_ranks_in_group = store.get(_GROUP_ID).decode(), list(range(world_size))
    return plugin.creator_fn(given, None)


class TorchDistributedBackend(CheckedBackend):
    """One rank of a group over a process group of torch.

    `backend` names the transport; gloo listens at `hostname`: give the loopback address where all ranks are
    on this host. `store` is a `torch.distributed.Store`; groups that share one need a `PrefixStore` each.
    `group` is a process group that exists already, and replaces both. `broken`: of another backend,
    with which this one fails. Raises `CommError` where a rank dies or does not come while the group is made.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Any = None,
        *,
        backend: str = "gloo",
        timeout_s: float = TIMEOUT_S,
        hostname: str | None = None,
        group: ProcessGroup | None = None,
        broken: Broken | None = None,
    ) -> None:
        super().__init__(rank, world_size, broken)
        self.backend = backend
        self._group: ProcessGroup = group
        if group is None:
            if store is None:
                raise ValueError("give a store that all ranks share, or a process group")
            try:
                self._group = process_group(backend, rank, world_size, store, timeout_s, hostname)
            except RuntimeError as error:
                raise CommError(f"rank {rank} could not join its group: {_first_line(error)}") from error
        self._broken.on_failure.append(lambda _: self._leave())

    def barrier(self) -> TorchWork:
        return self._submit(lambda: self._group.barrier(), no_copy)

    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> TorchWork:
        op = check_reducible(buffer, op)
        self._check(buffer)
        data, finish = as_result(buffer)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        sent = _summable(data)

        def copy_back() -> None:
            if sent is not data:
                with torch.no_grad():
                    data.copy_(sent)
            finish()

        return self._submit(lambda: self._group.allreduce([sent], options), copy_back, sent)

    def _all_gather(self, output: torch.Tensor, part: torch.Tensor, finish: Finish) -> TorchWork:
        return self._submit(
            lambda: self._group._allgather_base(as_bytes(output), as_bytes(part)), finish, output, part
        )

    def _reduce_scatter(
        self, output: torch.Tensor, data: torch.Tensor, op: ReduceOp, finish: Finish
    ) -> TorchWork:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        sent = _summable(data)
        if sent is data:
            sent = data.clone()  # gloo reduces in place
        piece = torch.empty(output.numel(), dtype=sent.dtype, device=sent.device)

        def copy_back() -> None:
            with torch.no_grad():
                output.copy_(piece.view(output.shape))
            finish()

        return self._submit(
            lambda: self._group._reduce_scatter_base(piece, sent, options), copy_back, piece, sent
        )

    def _broadcast(self, data: torch.Tensor, source: int, finish: Finish) -> TorchWork:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._submit(lambda: self._group.broadcast([as_bytes(data)], options), finish, data)

    def _all_to_all(
        self,
        output: torch.Tensor,
        data: torch.Tensor,
        expected: Sequence[int],
        sent: Sequence[int],
        finish: Finish,
    ) -> TorchWork:
        options = dist.AllToAllOptions()
        return self._submit(
            lambda: self._group.alltoall_base(
                as_bytes(output), as_bytes(data), list(expected), list(sent), options
            ),
            finish,
            output,
            data,
        )

    def _send(self, memory: torch.Tensor, target: int, tag: int) -> TorchWork:
        return self._submit(lambda: self._group.send([memory], target, tag), no_copy, memory)

    def _recv(self, memory: torch.Tensor, source: int, tag: int, finish: Finish) -> TorchWork:
        return self._submit(lambda: self._group.recv([memory], source, tag), finish, memory)

    def _leave(self) -> None:
        """Abort the group and drop it.

        Gloo's `abort` does nothing: its connections are closed with the last reference to the group. Then
        the others stop waiting for this rank. Dropping it waits for a collective under way, so a thread drops
        it.
        """
        if self._group is None:
            return
        _abort(self._group)
        held, self._group = [self._group], None
        with suppress(RuntimeError):  # the interpreter ends and starts no thread
            Thread(target=held.clear, daemon=True).start()

    def _submit(self, call: Callable[[], Any], finish: Finish, *held: torch.Tensor) -> TorchWork:
        """Submit an operation that uses the tensors `held`."""
        self._check()
        streams = None if not held or held[0].is_cpu else streams_of(held[0])
        begun = None if streams is None else recorded(streams)
        try:
            work = call()
        except BaseException as error:
            failure = self._broken.fail(_failure(error))
            if isinstance(error, RuntimeError):
                raise failure from error
            raise
        if streams is None:
            return TorchWork(work, finish, list(held), self._broken)
        return StreamWork(work, finish, list(held), self._broken, streams, begun)


class TorchWork:
    """A work of torch, with the tensors that it uses and what ends it.

    Works of gloo's sends and receives complete in `wait` only, so a thread waits for one that is polled.
    """

    def __init__(self, work: Any, finish: Finish, held: list[torch.Tensor], broken: Broken) -> None:
        self._work, self._finish, self._held, self._broken = work, finish, held, broken
        self._status = WorkStatus.PENDING
        self._error: CommError | None = None
        self._waiting: Thread | None = None
        self._ended = Event()

    def poll(self) -> WorkStatus:
        if self._status is WorkStatus.PENDING and self._waiting is None:
            if self._work.is_completed():
                self._wait()
            else:
                self._waiting = Thread(target=self._wait, daemon=True)
                self._waiting.start()
        return self._status

    def wait(self, timeout_s: float | None = None) -> bool:
        if self._status is WorkStatus.PENDING and timeout_s is None and self._waiting is None:
            self._wait()
        elif self.poll() is WorkStatus.PENDING and not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def error(self) -> Exception | None:
        return self._error

    def then(self, copy: Finish) -> None:
        """Copy the result once more when it is there. To be called before `poll` and `wait`."""
        finish = self._finish

        def both() -> None:
            finish()
            copy()

        self._finish = both

    def _wait(self) -> None:
        if self._carried_out():
            self._status = WorkStatus.DONE
        self._ended.set()

    def _carried_out(self) -> bool:
        """Wait for torch's work and copy its result. Whatever raises there breaks the group."""
        try:
            self._work.wait()
            self._finish()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, RuntimeError):
                raise
            return False
        finally:
            self._work = None  # it keeps the connections of its group open
        self._held.clear()
        return True

    def _fail(self, error: BaseException) -> None:
        self._error = self._broken.fail(_failure(error))
        self._status = WorkStatus.FAILED
        self._held.clear()


class StreamWork(TorchWork):
    """A work in a stream of its device, between the events `begun` and `ended`.

    `wait` without a timeout makes the current stream wait, as torch's does, and not the host. With one the
    host waits too. `poll` tells what the device has done.
    """

    def __init__(
        self, work: Any, finish: Finish, held: list[torch.Tensor], broken: Broken, streams: Any, begun: Any,
        ended: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(work, finish, held, broken)
        self._streams, self.begun, self.ended = streams, begun, ended

    def poll(self) -> WorkStatus:
        if self._status is WorkStatus.PENDING:
            try:
                if self.ended is None and self._work.is_completed():
                    self._order()
                if self.ended is not None and self.ended.query():
                    self._status = WorkStatus.DONE
            except RuntimeError as error:  # of the device
                self._fail(error)
        return self._status

    def wait(self, timeout_s: float | None = None) -> bool:
        if self.ended is None:
            self._order()
        else:  # what ordered it may have been another stream
            self._streams.current_stream().wait_event(self.ended)
        if timeout_s is not None:
            end_s = time.monotonic() + timeout_s
            while self.poll() is WorkStatus.PENDING:
                if time.monotonic() >= end_s:
                    return False
                time.sleep(_POLL_S)
        if self._error is not None:
            raise self._error
        return True

    def _order(self) -> None:
        """Let the current stream wait for the result and copy it."""
        if self._status is WorkStatus.PENDING and self._carried_out():
            self.ended = recorded(self._streams)


def streams_of(tensor: torch.Tensor) -> Any:
    """Torch's module of a device with streams: `torch.cuda`, `torch.npu`, ..."""
    return getattr(torch, tensor.device.type)


def recorded(streams: Any) -> Any:
    """An event of the current stream's time."""
    event = streams.Event(enable_timing=True)
    event.record(streams.current_stream())
    return event


def _summable(data: torch.Tensor) -> torch.Tensor:
    """The values in a dtype that torch sums.

    No backend sums int16; sums in int32 wrap around alike when they are cut to 16 bits.
    """
    return data.to(torch.int32) if data.dtype == torch.int16 else data


def _abort(group: ProcessGroup) -> None:
    abort = getattr(group, "abort", None)
    if abort is not None:
        with suppress(RuntimeError):  # not every vendor's can
            abort()


def _failure(error: BaseException) -> CommError:
    if not isinstance(error, RuntimeError):
        return CommError(f"this rank was interrupted: {error!r}")
    return CommError(f"a rank died, left or did not answer in time: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    [first, *_] = str(error).splitlines() or [""]
    return first[:_SHOWN_CHARS]


PLUGIN = TorchDistributedBackend
