"""Times the ways of each collective here, and writes the selection table.

    python -m sagellm.comm.collectives.measure --ranks 2 --output table.json

Ways take turns in every round, in an order that is drawn, so that other load of the machine affects all
alike. In its turn a way is called many times in a row, as a model calls it, after a call that is not counted:
the ranks move to their CPUs in it. The time of a turn is the median of its calls on the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C import _distributed_c10d as c10d

from sagellm.comm.collectives.auto import AutoBackend
from sagellm.comm.collectives.metrics import CollectiveKind
from sagellm.comm.collectives.selection import ONE_SHOT, TORCH, TWO_SHOT, WAYS, SelectionTable
from sagellm.comm.collectives.shared_memory import SLOT_BYTES
from sagellm.core.errors import CommError
from sagellm.core.protocols.collectives import CommBackendProtocol, WireFormat, Work

KB = 1024
SIZES_KB = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
AUTO, BF16, INT8 = "auto", "auto, bf16 wire", "auto, int8 wire"
COPY_WHOLE, COPY_SLOT = "memcpy in and out", "memcpy in and out by slot"
"""Two copies of the buffer on each rank at once, without waits: to memory of its size and back, or through a
slot, which stays in the cache."""
_TIMEOUT_S = 600.0
MOST_CALLS, _BYTES_IN_A_ROW = 50, 32 << 20
Seconds = Mapping[CollectiveKind, Mapping[int, Mapping[str, list[float]]]]
"""By kind, size in bytes and way: of each round."""


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """What to time. Large buffers get fewer calls in a row and fewer rounds.

    At 1 GB/s the rounds of a size take about `seconds_per_size` together.
    """

    kinds: tuple[CollectiveKind, ...] = tuple(WAYS)
    sizes_kb: tuple[int, ...] = SIZES_KB
    rounds: int = 20
    calls: int = MOST_CALLS
    seconds_per_size: float = 4.0
    with_limits: bool = False
    with_wire_formats: bool = False
    table: str | None = None

    def rounds_of(self, num_bytes: int) -> int:
        affordable = int(self.seconds_per_size * 1e9 / (10 * num_bytes * self.calls_in_a_row(num_bytes)))
        return max(min(self.rounds, 5), min(self.rounds, affordable))

    def calls_in_a_row(self, num_bytes: int) -> int:
        """So few that sums of sums stay finite, and at least 2."""
        return max(2, min(self.calls, MOST_CALLS, _BYTES_IN_A_ROW // num_bytes))


def measure(world_size: int, plan: MeasurementPlan) -> Seconds:
    """Times of the plan on so many new processes. Raises `CommError` where one of them fails."""
    seconds: Seconds = _on_ranks(world_size, plan)
    return seconds


def fastest_table(seconds: Seconds) -> SelectionTable:
    """The table of the ways with the least medians."""
    return SelectionTable.fastest(
        {
            kind: {
                size: {way: statistics.median(rounds) for way, rounds in ways.items() if way in WAYS[kind]}
                for size, ways in by_size.items()
            }
            for kind, by_size in seconds.items()
        }
    )


def _on_ranks(world_size: int, plan: MeasurementPlan) -> Any:
    """What rank 0 answers."""
    processes = multiprocessing.get_context("spawn")
    receiving, sending = processes.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            processes.Process(
                target=_run_rank, args=(sending, rank, world_size, f"{folder}/store", plan), daemon=True
            )
            for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            sending.close()
            if not receiving.poll(_TIMEOUT_S):
                raise CommError(f"the ranks took more than {_TIMEOUT_S:g} s")
            answer = receiving.recv()
        except EOFError:
            raise CommError("the ranks ended without an answer") from None
        finally:
            receiving.close()
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
    if isinstance(answer, Exception):
        raise CommError(f"a rank failed: {answer!r}") from answer
    return answer


def _run_rank(answers: Connection, rank: int, world_size: int, path: str, plan: MeasurementPlan) -> None:
    torch.set_num_threads(1)
    try:
        store = c10d.FileStore(path, world_size)
        group = AutoBackend(rank, world_size, store, table=plan.table)
        if group.shared is None:
            raise CommError("shared memory cannot be used here, so there is nothing to choose from")
        timed = {
            kind: {size * KB: _timed_size(group, kind, size * KB, plan) for size in plan.sizes_kb}
            for kind in plan.kinds
        }
        group.barrier()
        if rank == 0:
            answers.send(timed)
    except Exception as error:  # noqa: BLE001 - reported by the parent
        answers.send(CommError(f"{type(error).__name__}: {error}"))


def _cpus_of(rank: int, world_size: int) -> tuple[set[int], set[int]]:
    """CPUs of a rank's thread in shared memory, and in torch.

    In shared memory each rank has a CPU of its own if there are enough, as a launcher sets it: else other
    load moves two ranks to one CPU, where each waits until the other is scheduled. In torch a rank may use
    all, since its thread waits for gloo's.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    return ({sorted(cpus)[rank]} if len(cpus) >= world_size else cpus), cpus


def _timed_size(
    group: AutoBackend, kind: CollectiveKind, num_bytes: int, plan: MeasurementPlan
) -> dict[str, list[float]]:
    """Seconds of a call of each way in each round, on the slowest rank. Results are checked before."""
    assert group.shared is not None
    buffers = _Buffers(group.world_size, num_bytes)
    calls = dict(_ways(group, kind, buffers))
    if kind is CollectiveKind.ALL_REDUCE and plan.with_wire_formats:
        for name, wire in ((BF16, WireFormat.BF16), (INT8, WireFormat.INT8)):
            calls[name] = partial(group.all_reduce, buffers.whole, wire=wire)
    for way, call in calls.items():
        buffers.fill(group.rank)
        call().wait()
        buffers.check(kind, way)
    limits: dict[str, Callable[[], object]] = {}
    if kind is CollectiveKind.ALL_REDUCE and plan.with_limits:
        limits = {COPY_WHOLE: buffers.copy_whole, COPY_SLOT: buffers.copy_by_slot}
        for copy in limits.values():
            copy()
    names = [*calls, *limits]
    num_rounds = plan.rounds_of(num_bytes)
    own_cpu, all_cpus = _cpus_of(group.rank, group.world_size)
    seconds = torch.zeros(len(names), num_rounds, dtype=torch.float64)
    for turn in range(num_rounds):
        for index in random.Random(turn).sample(range(len(names)), len(names)):  # alike on all ranks
            name = names[index]
            buffers.fill(group.rank)
            if own_cpu != all_cpus:
                os.sched_setaffinity(0, all_cpus if name == TORCH else own_cpu)
            timed_call: Callable[[], object] = limits[name] if name in limits else _waited(calls[name])
            timed_call()
            group.shared.barrier().wait()
            num_calls = 1 if name in (BF16, INT8) else plan.calls_in_a_row(num_bytes)
            seconds[index, turn] = statistics.median(_seconds_of(timed_call) for _ in range(num_calls))
    if own_cpu != all_cpus:
        os.sched_setaffinity(0, all_cpus)
    slowest = torch.empty(group.world_size, *seconds.shape, dtype=torch.float64)
    group.shared.all_gather(slowest, seconds).wait()
    return dict(zip(names, slowest.amax(0).tolist(), strict=True))


def _waited(call: Callable[[], Work]) -> Callable[[], object]:
    return lambda: call().wait()


def _seconds_of(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _ways(
    group: AutoBackend, kind: CollectiveKind, buffers: _Buffers
) -> list[tuple[str, Callable[[], Work]]]:
    assert group.shared is not None
    whole = buffers.whole
    if kind is CollectiveKind.ALL_REDUCE:
        shots = {ONE_SHOT: 1, TWO_SHOT: 2}
        shared = [(way, partial(group.shared.all_reduce, whole, num_shots=n)) for way, n in shots.items()]
        return [
            *shared,
            (TORCH, partial(group.torch.all_reduce, whole)),
            (AUTO, partial(group.all_reduce, whole)),
        ]

    def call(backend: CommBackendProtocol) -> Callable[[], Work]:
        if kind is CollectiveKind.ALL_GATHER:
            return partial(backend.all_gather, whole, buffers.part)
        if kind is CollectiveKind.REDUCE_SCATTER:
            return partial(backend.reduce_scatter, buffers.part, whole)
        if kind is CollectiveKind.BROADCAST:
            return partial(backend.broadcast, whole, 0)
        return partial(backend.all_to_all, buffers.other, whole)

    shared_way, torch_way = WAYS[kind]
    return [(shared_way, call(group.shared)), (torch_way, call(group.torch)), (AUTO, call(group))]


class _Buffers:
    """Buffers of one size: `whole`, `other`, and a rank's `part`."""

    def __init__(self, world_size: int, num_bytes: int) -> None:
        count = math.ceil(num_bytes / 4 / world_size) * world_size
        self._world_size = world_size
        self.whole, self.other = torch.ones(count), torch.ones(count)
        self.part = torch.ones(count // world_size)
        shared = mmap.mmap(-1, max(4 * count, SLOT_BYTES))  # shared, as the slots are
        self._shared = np.frombuffer(shared, np.float32)
        self._values = self.whole.numpy()

    def fill(self, rank: int) -> None:
        for buffer in (self.whole, self.part, self.other):
            buffer.fill_(rank + 1)

    def check(self, kind: CollectiveKind, way: str) -> None:
        """Raise `CommError` for a wrong result."""
        total = self._world_size * (self._world_size + 1) / 2
        ranks = torch.arange(1.0, self._world_size + 1).repeat_interleave(len(self.part))
        found, expected = {
            CollectiveKind.ALL_REDUCE: (self.whole, torch.tensor(total)),
            CollectiveKind.REDUCE_SCATTER: (self.part, torch.tensor(total)),
            CollectiveKind.ALL_GATHER: (self.whole, ranks),
            CollectiveKind.ALL_TO_ALL: (self.other, ranks),
        }.get(kind, (self.whole, torch.tensor(1.0)))
        most = total / 127 if way in (BF16, INT8) else 0.0  # as wire.py has it
        if not (found - expected).abs().le(most).all():
            raise CommError(f"{way}: wrong result of {kind.value}")

    def copy_whole(self) -> None:
        np.copyto(self._shared[: len(self._values)], self._values)
        np.copyto(self._values, self._shared[: len(self._values)])

    def copy_by_slot(self) -> None:
        for start in range(0, len(self._values), SLOT_BYTES // 4):
            part = self._values[start : start + SLOT_BYTES // 4]
            np.copyto(self._shared[: len(part)], part)
            np.copyto(part, self._shared[: len(part)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure collectives here, and write a selection table.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args(arguments)
    table = fastest_table(measure(given.ranks, MeasurementPlan()))
    given.output.write_text(json.dumps(table.as_json(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
