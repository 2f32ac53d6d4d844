"""The group that chooses: its table, wire formats and their bounds, fused tensors, and what it counts."""

from __future__ import annotations

import itertools
import json
import os
import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sagellm.comm.collectives import auto as auto_module
from sagellm.comm.collectives import shared_memory
from sagellm.comm.collectives._buffers import Broken, no_copy
from sagellm.comm.collectives.auto import AutoBackend, _buckets
from sagellm.comm.collectives.metrics import CollectiveKind, CommMeter, bus_factor
from sagellm.comm.collectives.selection import ONE_SHOT, SHARED, TORCH, TWO_SHOT, WAYS, SelectionTable
from sagellm.comm.collectives.torch_distributed import StreamWork, recorded
from sagellm.comm.collectives.wire import INT8_BLOCK
from sagellm.core.blocks import cdiv
from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError, CommError, ConfigError, KernelError
from sagellm.core.protocols.collectives import ReduceOp, WireFormat, WorkStatus
from tests.comm.collectives.ranks import group, passed, run_ranks

KIND = CollectiveKind.ALL_REDUCE


def auto(rank: int, world_size: int, folder: str, **options: Any) -> AutoBackend:
    backend = group("auto", rank, world_size, folder, **options)
    assert isinstance(backend, AutoBackend)
    return backend


def table_of(way: str) -> SelectionTable:
    """Every operation by torch, but all_reduce up to 100 bytes."""
    rows = dict.fromkeys(WAYS, ((), (TORCH,)))
    return SelectionTable({**rows, KIND: ((100,), (way, TORCH))})


def chosen(rank: int, world_size: int, folder: str, path: str) -> list[str]:
    """The ways that operations of several sizes took. Only rank 0 reads the table."""
    backend = auto(rank, world_size, folder, table=path if rank == 0 else None)
    assert backend.shared is not None
    taken: list[str] = []

    def spy(target: Any, name: str, label: str) -> None:
        call = getattr(target, name)

        def spied(*given: Any, **named: Any) -> Any:
            taken.append(f"{name} {label} {named.get('num_shots', '')}".strip())
            return call(*given, **named)

        setattr(target, name, spied)

    for name in ("all_reduce", "broadcast", "all_to_all", "all_gather", "reduce_scatter"):
        spy(backend.shared, name, "shared")
        spy(backend.torch, name, "torch")
    for size in (25, 26):
        buffer = torch.ones(size)
        backend.all_reduce(buffer).wait()
        assert buffer.tolist() == [float(world_size)] * size
    backend.broadcast(torch.ones(3), 1).wait()
    backend.all_gather(torch.ones(2 * world_size), torch.ones(2)).wait()
    backend.reduce_scatter(torch.ones(2), torch.ones(2 * world_size)).wait()
    backend.all_to_all(torch.ones(2 * world_size), torch.ones(2 * world_size)).wait()
    return taken


@pytest.mark.parametrize(("way", "shots"), [(ONE_SHOT, "1"), (TWO_SHOT, "2")])
def test_the_table_of_rank_0_decides(tmp_path: Path, way: str, shots: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table_of(way).as_json()), encoding="utf-8")
    expected = [f"all_reduce shared {shots}", "all_reduce torch", "broadcast torch", "all_gather torch"]
    expected += ["reduce_scatter torch", "all_to_all torch"]
    assert passed(run_ranks(2, chosen, str(path))) == [expected] * 2


def test_the_fastest_way_of_each_size_makes_the_table() -> None:
    medians: dict[int, dict[str, float]] = {
        1 << 10: {ONE_SHOT: 1.0, TWO_SHOT: 2.0, TORCH: 9.0},
        1 << 14: {ONE_SHOT: 3.0, TWO_SHOT: 2.0, TORCH: 9.0},
        1 << 20: {ONE_SHOT: 9.0, TWO_SHOT: 8.0, TORCH: 9.0},
        1 << 22: {ONE_SHOT: 9.0, TWO_SHOT: 8.0, TORCH: 7.0},
    }
    others = {kind: {1024: {SHARED: 1.0, TORCH: 2.0}} for kind in WAYS if kind is not KIND}
    table = SelectionTable.fastest({KIND: medians, **others})
    assert table.rows[KIND] == ((1 << 12, 1 << 21), (ONE_SHOT, TWO_SHOT, TORCH))
    ways = [table.way(KIND, size) for size in (0, 4096, 4097, 1 << 21, 1 << 30)]
    assert ways == [ONE_SHOT, ONE_SHOT, TWO_SHOT, TWO_SHOT, TORCH]
    assert SelectionTable.of_json(json.loads(json.dumps(table.as_json()))) == table


def test_the_table_that_comes_with_it_is_whole() -> None:
    table = SelectionTable.read()
    assert {table.way(kind, 1 << power) for kind in WAYS for power in range(30)} <= {
        ONE_SHOT,
        TWO_SHOT,
        SHARED,
        TORCH,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "has format 'other'"),
        ({"rows": {}}, "no rows for all_reduce"),
        (
            {"all_reduce": [[None, "shared_memory.three_shot"]]},
            "no way 'shared_memory.three_shot'. Did you mean",
        ),
        ({"all_reduce": [[5, TORCH]]}, "the last row must have size null"),
        ({"all_reduce": [[9, TORCH], [5, ONE_SHOT], [None, TORCH]]}, "sizes must ascend"),
        ({"all_reduce": []}, "no table of collectives"),
        ({"nonsense": [[None, TORCH]]}, "no table of collectives"),
    ],
)
def test_a_wrong_table_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    value = table_of(ONE_SHOT).as_json()
    if change.keys() <= value.keys():
        value.update(change)
    else:
        value["rows"].update(change)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        SelectionTable.read(path)
    assert message in str(raised.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        SelectionTable.read(tmp_path / "none.json")


def rounded(rank: int, world_size: int, folder: str) -> list[float]:
    """The largest error as a share of its bound, by wire format, dtype and reduction."""
    backend = auto(rank, world_size, folder)
    cases = itertools.product(
        (WireFormat.BF16, WireFormat.INT8),
        (torch.float32, torch.float64, torch.float16),
        ReduceOp,
        (0, 1, 255, 5000),
    )
    shares = [_share_of_bound(backend, *case) for case in cases]
    with pytest.raises(ValueError, match=r"for floating-point buffers, got torch\.int32"):
        backend.all_reduce(torch.ones(3, dtype=torch.int32), wire=WireFormat.INT8)
    poisoned = torch.ones(2 * INT8_BLOCK)
    poisoned[5] = torch.inf if rank == 0 else 1.0
    backend.all_reduce(poisoned, wire=WireFormat.INT8).wait()
    assert poisoned[:INT8_BLOCK].isnan().all()
    assert ((poisoned[INT8_BLOCK:] - world_size).abs() <= world_size / 127).all()
    return shares


def _share_of_bound(
    backend: AutoBackend, wire: WireFormat, dtype: torch.dtype, op: ReduceOp, size: int
) -> float:
    generators = [torch.Generator().manual_seed(7 * rank + size) for rank in range(backend.world_size)]
    scales = torch.logspace(-2, 2, size, dtype=torch.float64)
    parts = [(torch.randn(size, generator=g, dtype=torch.float64) * scales).to(dtype) for g in generators]
    given = [part.double() for part in parts]
    buffer = torch.zeros(size, 2, dtype=dtype)[:, 0].copy_(parts[backend.rank])
    backend.all_reduce(buffer, op, wire=wire).wait()
    everywhere = torch.empty(size * backend.world_size, dtype=dtype)
    backend.all_gather(everywhere, buffer).wait()
    assert torch.equal(everywhere.view(backend.world_size, size)[0], buffer), "ranks differ"
    stacked = torch.stack(given)
    exact = {ReduceOp.SUM: stacked.sum(0), ReduceOp.MAX: stacked.amax(0), ReduceOp.MIN: stacked.amin(0)}[op]
    magnitudes = (
        stacked.abs() if wire is WireFormat.BF16 else torch.stack([_of_blocks(part) for part in given])
    )
    total = magnitudes.sum(0) if op is ReduceOp.SUM else magnitudes.amax(0)
    bound = total / 127
    if dtype is torch.float16:
        bound = bound + exact.abs() * 2**-11 + 2**-25  # the result is rounded to float16 too
    return float(((buffer.double() - exact).abs() / bound).max()) if size else 0.0


def _of_blocks(part: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(cdiv(len(part), INT8_BLOCK) * INT8_BLOCK, dtype=part.dtype)
    padded[: len(part)] = part.abs()
    return padded.view(-1, INT8_BLOCK).amax(1).repeat_interleave(INT8_BLOCK)[: len(part)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_wire_formats_keep_their_bounds(world_size: int) -> None:
    for shares in passed(run_ranks(world_size, rounded)):
        assert max(shares) <= 1.0
        assert max(shares) > 0.3  # the bound says something


def fused(rank: int, world_size: int, folder: str) -> int:
    backend = auto(rank, world_size, folder, bucket_bytes=4000)
    sizes = [(3,), (5, 7), (), (0,), (1200,), (40, 20), (100,)]
    dtypes = [
        torch.float32,
        torch.int64,
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.float32,
        torch.int64,
    ]
    buffers = [
        torch.arange(1 + rank, 1 + rank + max(1, torch.Size(size).numel()))[: torch.Size(size).numel()]
        .view(size)
        .to(dtype)
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    buffers[5] = buffers[5].T
    alone = [buffer.clone() for buffer in buffers]
    work = backend.all_reduce_many(buffers)
    assert work.wait(10)
    assert work.poll() is WorkStatus.DONE
    num_calls = backend.meter.counts[KIND].num_calls
    for buffer, expected in zip(buffers, alone, strict=True):
        backend.all_reduce(expected).wait()
        assert torch.equal(buffer, expected)
    assert backend.all_reduce_many([]).wait()
    return num_calls


def test_many_tensors_travel_in_few_calls() -> None:
    """Three buckets of float32, one each of int64 and bfloat16."""
    assert passed(run_ranks(2, fused)) == [5, 5]


def test_a_bucket_is_full_at_its_size() -> None:
    buffers = [torch.empty(size) for size in (10, 10, 5, 30, 1)]
    assert [[len(b) for b in bucket] for bucket in _buckets(buffers, 80)] == [[10, 10], [5], [30], [1]]


def counted(rank: int, world_size: int, folder: str) -> None:
    backend = auto(rank, world_size, folder)
    with backend.meter.step():
        backend.all_reduce(torch.ones(100)).wait()
        if rank == 0:
            backend.send(torch.ones(10), 1).wait()
        else:
            backend.recv(torch.ones(10), 0).wait()
    backend.barrier().wait()
    meter = backend.meter
    meter.check()
    assert meter.counts[KIND].num_bytes == 400
    assert meter.counts[CollectiveKind.RECV if rank else CollectiveKind.SEND].num_calls == 1
    assert 0 < meter.step_share <= 1
    assert meter.bus_bytes_per_s(KIND) > 0


def test_a_group_counts_what_it_does() -> None:
    passed(run_ranks(2, counted))


def breaking_together(rank: int, world_size: int, folder: str, half: str) -> str:
    """Rank 0 is interrupted in one half; then neither half works, on no rank."""
    backend = auto(rank, world_size, folder)
    assert backend.shared is not None
    backend.barrier().wait()
    if rank == 0:
        handler = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(ZeroDivisionError):
            getattr(backend, half).barrier().wait()
        signal.signal(signal.SIGALRM, handler)
    else:
        time.sleep(1.0)
        with pytest.raises(CommError):  # with gloo, rank 0 may have done its part before
            [getattr(backend, half).barrier().wait() for _ in range(2)]
    for call in (backend.torch.barrier, backend.shared.barrier, backend.barrier):
        with pytest.raises(CommError):
            call().wait()
    backend.close()
    return str(backend._broken.reason)


def interrupt(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("half", ["shared", "torch"])
def test_the_halves_of_a_group_break_together(half: str) -> None:
    first, _ = passed(run_ranks(2, breaking_together, half))
    assert "was interrupted: ZeroDivisionError()" in first


def without_shared_memory(
    rank: int, world_size: int, folder: str, obstacle: str
) -> tuple[list[str], list[float]]:
    """Rank 1 cannot use shared memory, so no rank does. What it had mapped is free again."""
    patch = pytest.MonkeyPatch()
    messages: list[str] = []
    patch.setattr(auto_module.log, "warning", lambda text, *given: messages.append(text % given))
    if obstacle == "no kernel" and rank == 1:
        patch.setattr(shared_memory, "native_library", raising(KernelError("no C++ compiler on PATH")))
        patch.setattr(platform, "machine", lambda: "aarch64")
    if obstacle == "no memory" and rank == 0:
        patch.setattr(os, "memfd_create", raising(OSError("no memory")))
    if obstacle == "not opened" and rank == 1:
        patch.setattr(os, "open", raising(PermissionError("not permitted")))
    backend = auto(rank, world_size, folder)
    patch.undo()
    assert backend.shared is None
    buffer = torch.ones(3)
    backend.all_reduce(buffer).wait()
    backend.barrier().wait()
    assert "sagellm-collectives" not in Path("/proc/self/maps").read_text(encoding="ascii")
    backend.close()
    return messages, buffer.tolist()


def messages_then_torch(rank: int, world_size: int, folder: str, path: str) -> float:
    """A message larger than the ring is under way when torch makes its sender wait."""
    backend = auto(rank, world_size, folder, table=path)
    memory, total = torch.full((1 << 20,), 7.0 - 7.0 * rank), torch.ones(26)
    works = [backend.recv(memory, 0) if rank else backend.send(memory, 1)]
    if rank:
        assert works[0].wait()
    works.append(backend.all_reduce(total))
    assert all(work.wait() for work in works)
    with pytest.raises(ValueError, match="share memory"):
        backend.all_reduce_many([torch.ones(1).expand(3), torch.ones(1)])
    with pytest.raises(ValueError, match="share memory"):
        backend.all_reduce(torch.ones(1).expand(3), wire=WireFormat.BF16)
    return float(memory.min()) + float(total.sum())


def test_messages_end_before_torch_makes_a_rank_wait(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table_of(ONE_SHOT).as_json()), encoding="utf-8")
    assert passed(run_ranks(2, messages_then_torch, str(path))) == [59.0] * 2


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise error

    return call


@pytest.mark.parametrize("obstacle", ["no kernel", "no memory", "not opened"])
def test_without_shared_memory_torch_does_everything(obstacle: str) -> None:
    answers = passed(run_ranks(2, without_shared_memory, obstacle))
    assert [numbers for _, numbers in answers] == [[2.0] * 3] * 2
    warnings = [message for messages, _ in answers for message in messages]
    assert warnings
    assert all(message.startswith("ranks do not use shared memory: ") for message in warnings)


def refused_table(rank: int, world_size: int, folder: str) -> str:
    with pytest.raises(ConfigError) as raised:
        auto(rank, world_size, folder, table="/none.json")
    return str(raised.value)


def test_a_table_that_cannot_be_read_ends_all_ranks() -> None:
    first, second = passed(run_ranks(2, refused_table))
    assert first.startswith("/none.json cannot be read")
    assert second == f"rank 0: {first}"


class DeviceEvent:
    """Of a device whose time moves on request."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device, self.at_s = device, 0.0

    def record(self, stream: SimulatedDevice) -> None:
        self.at_s = stream.submitted_s

    def query(self) -> bool:
        return self.at_s <= self._device.now_s

    def elapsed_time(self, other: DeviceEvent) -> float:
        return (other.at_s - self.at_s) * 1e3


class SimulatedDevice:
    """One stream, and what it was given; also torch's module of it. It is at `now_s`."""

    def __init__(self) -> None:
        self.now_s = self.submitted_s = 0.0
        self.waited: list[DeviceEvent] = []

    def Event(self, *, enable_timing: bool) -> DeviceEvent:  # noqa: N802 - torch's name
        assert enable_timing
        return DeviceEvent(self)

    def current_stream(self) -> SimulatedDevice:
        return self

    def wait_event(self, event: DeviceEvent) -> None:
        self.waited.append(event)

    def operation(self, seconds: float, finish: Callable[[], object] = no_copy) -> StreamWork:
        """A collective of so many seconds in the stream."""
        begun = recorded(self)
        self.submitted_s += seconds
        ended = recorded(self)
        work = SimpleNamespace(wait=lambda: None, is_completed=ended.query)
        return StreamWork(work, finish, [], Broken(), self, begun)


def test_work_on_a_device_is_done_when_the_device_has_done_it() -> None:
    device, copies = SimulatedDevice(), list[int]()
    work = device.operation(2.0, lambda: copies.append(1))
    assert work.poll() is WorkStatus.PENDING
    assert work.wait()  # the stream waits, the host does not
    assert copies == [1]
    assert work.poll() is WorkStatus.PENDING
    assert work.wait(0.0) is False
    device.now_s = 2.0
    assert work.wait(0.0)
    assert work.poll() is WorkStatus.DONE
    assert device.waited  # also a stream that waits later
    assert copies == [1]


def test_seconds_of_a_device_are_counted_once() -> None:
    device, meter = SimulatedDevice(), CommMeter(ManualClock(), 4)
    for seconds in (1.0, 2.0):
        work = device.operation(seconds)
        work.wait()
        meter.follow(KIND, 1000, work)
    assert KIND not in meter.counts
    device.now_s = 1.0
    meter.settle()
    assert (meter.counts[KIND].num_calls, meter.counts[KIND].seconds) == (1, 1.0)
    device.now_s = 3.0
    overlapping = device.operation(0.0)
    overlapping.begun.at_s = 0.0
    meter.follow(KIND, 0, overlapping)
    assert meter.bus_bytes_per_s(KIND) == 1.5 * 2000 / 3
    failed = device.operation(1.0)
    failed._fail(RuntimeError("a fault"))
    meter.follow(KIND, 1000, failed)
    assert meter.counts[KIND].num_calls == 3
    meter.check()


def test_bandwidths_are_those_of_nccl_tests() -> None:
    clock = ManualClock()
    meter = CommMeter(clock, 4)
    with meter.step():
        clock.advance(3)
        meter.add(KIND, 1000, 1.0)
        meter.add(CollectiveKind.ALL_GATHER, 1000, 0.5)
    assert meter.bus_bytes_per_s(KIND) == 1500
    assert meter.bus_bytes_per_s(CollectiveKind.ALL_GATHER) == 1500
    assert meter.bus_bytes_per_s(CollectiveKind.BROADCAST) == 0
    assert meter.step_share == 0.5
    factors = {kind: bus_factor(kind, 8) for kind in CollectiveKind}
    assert factors[KIND] == 1.75
    assert factors[CollectiveKind.REDUCE_SCATTER] == factors[CollectiveKind.ALL_TO_ALL] == 0.875
    assert factors[CollectiveKind.BROADCAST] == factors[CollectiveKind.SEND] == 1
    meter.add(KIND, -2000, 0.0)
    with pytest.raises(BookkeepingError, match="all_reduce"):
        meter.check()
