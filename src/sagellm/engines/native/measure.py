"""Measurements at start: kernels, memory bandwidth, the time of calls."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from statistics import median

import torch

from sagellm.core.errors import KernelError
from sagellm.core.native_code import cache_folder
from sagellm.engines.native.accelerators import module_of

Decide = Callable[[Callable[[], int]], int]
"""Calls what chooses, on the first of several ranks only, and gives its choice to all of them."""

MARGIN = 1.05
"""What is measured is chosen in place of the default if it is faster by this factor. Below it the clock would
decide."""


def alone(choose: Callable[[], int]) -> int:
    """The choice of a model on one rank."""
    return choose()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch computes on `count` threads within this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_turns(device: torch.device, runs: Sequence[Callable[[], object]], num_rounds: int) -> list[float]:
    """Median seconds of each of `runs` until `device` has finished.

    They take turns, in each round in the other order, so that what slows the machine for a while slows all of
    them. A first round is not counted. On a CPU these are CPU seconds of this thread, which other processes
    hardly change.
    """
    is_cpu = device.type == "cpu"
    now = time.thread_time if is_cpu else time.perf_counter
    synchronize: Callable[[], object] = (lambda: None) if is_cpu else module_of(device).synchronize
    seconds: list[list[float]] = [[] for _ in runs]
    order = range(len(runs))
    for _ in range(1 + num_rounds):
        for i in order:
            synchronize()
            start = now()
            runs[i]()
            synchronize()
            seconds[i].append(now() - start)
        order = order[::-1]
    return [median(measured[1:]) for measured in seconds]


def fastest(run: Callable[[], object], repeats: int, now: Callable[[], float]) -> float:
    """Seconds by `now` of the fastest of `repeats` runs."""
    best = float("inf")
    for _ in range(repeats):
        start = now()
        run()
        best = min(best, now() - start)
    return best


def recorded(case: str, build: str, measure: Callable[[], Sequence[float]]) -> tuple[float, ...]:
    """The numbers that `measure` gave the first time on this machine.

    What is chosen by them, and with that the bits of answers, is then the same in every run. `case` says what
    is measured, and `build` names the compiled kernel (or "torch"): another build, CPU or torch is measured
    anew. Records are files beside the compiled kernels; without their folder they last as long as the
    process. Without a build nothing is recorded.
    """
    if not build:
        return tuple(measure())
    key = repr((case, build, _cpu(), torch.__version__, "medians"))
    if key not in _in_this_process:
        _in_this_process[key] = _on_disk(key, measure)
    return _in_this_process[key]


_in_this_process: dict[str, tuple[float, ...]] = {}


def _on_disk(key: str, measure: Callable[[], Sequence[float]]) -> tuple[float, ...]:
    name = f"measured-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    try:
        path = cache_folder() / name
    except KernelError:
        return tuple(measure())
    was_there = path.exists()
    found = _record(path, key)
    if found is not None:
        return found
    if was_there:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # it is damaged
    numbers = tuple(measure())
    if not all(0 < number < math.inf for number in numbers):
        return numbers
    with suppress(OSError):
        handle, unfinished = tempfile.mkstemp(prefix=f".{name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"case": key, "numbers": numbers}, file)
            os.link(unfinished, path)  # of processes that measure at once, the first one's numbers count
        finally:
            os.unlink(unfinished)  # noqa: PTH108 - a name, not a path
    return _record(path, key) or numbers


def _record(path: Path, key: str) -> tuple[float, ...] | None:
    """The numbers of a record; None where there is none, or another one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return tuple(map(float, record["numbers"])) if record["case"] == key else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


@cache
def _cpu() -> str:
    """The CPU as Linux tells it. A hypervisor may give several one name."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").partition("\n\n")
    except OSError:
        return platform.machine()
    lines = [line for line in first.splitlines() if line.startswith(_OF_A_CPU)]
    return "\n".join((platform.machine(), *lines))


_OF_A_CPU = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU ", "Features")


CPU_BYTES, CUDA_BYTES = 1 << 28, 1 << 31
_REPEATS = 7


def read_bandwidth(device_name: str) -> float:
    """Bytes per second that a device reads from memory: the bound of decode steps. The best of a few sums
    over more memory than any cache holds, with torch's threads.
    """
    device = torch.device(device_name)
    size = CPU_BYTES if device.type == "cpu" else CUDA_BYTES
    values = torch.ones(size // 4, device=device)  # written, so that it is there
    return size / fastest(lambda: values.sum().item(), _REPEATS, time.perf_counter)  # waits for the device
