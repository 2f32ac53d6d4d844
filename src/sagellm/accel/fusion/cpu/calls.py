"""Calls of the kernels' C functions, and recordings of them.

Before a kernel runs, Python looks at its inputs, allocates and fills in a job: 4 to 15 us, in which no weight
is read. Of a decode step, whose tensors have the same shapes each time, the jobs are kept, with the tensors
that they point to: run again, all of them are one call.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sagellm.accel.fusion.cpu.library import loaded
from sagellm.core.errors import CapacityError, KernelError
from sagellm.core.protocols.fusion import Capture, Work

Function = Callable[[object, int], int]
log = logging.getLogger("sagellm.kernels")
_NO_MEMORY = 1
_ERRORS = {
    2: "it has no kernel for these dtypes",
    3: "a span is not within the query's rows and the block tables",
    4: "a block table names a block outside the pool",
    5: "a slot is outside the pool",
    6: "an index is outside the table",
}
_ALLOCATIONS = {"aten::empty", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}


class _Call(ctypes.Structure):
    """`struct Call` of replay.h."""

    _fields_ = (("function", ctypes.c_void_p), ("job", ctypes.c_void_p))


class _Replay(ctypes.Structure):
    """`struct Replay` of replay.h."""

    _fields_ = (("calls", ctypes.c_void_p), ("count", ctypes.c_int64), ("failed", ctypes.c_int64))


@dataclass(frozen=True, slots=True)
class _Made:
    """One call; `kept` is what its job points to."""

    name: str
    function: Function
    job: ctypes.Structure
    kept: tuple[object, ...]


class _Recorder(threading.local):
    """What this thread records, so that no other's calls get into it, and a fork's child does not go on."""

    made: list[_Made] | None = None


class Caller:
    """Calls C functions on at most `threads` threads, and remembers a thread's calls while it records."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._recorder = _Recorder()

    def __call__(self, name: str, function: Function, job: ctypes.Structure, *kept: object) -> None:
        """`kept` are the owners of all memory that `job` points to. Raises `KernelError` where it fails."""
        _check(name, function(ctypes.byref(job), self.threads))
        made = self._recorder.made
        if made is not None:
            made.append(_Made(name, function, job, kept))

    def record(self, run: Function, work: Work) -> Work | None:
        """Runs `work`; what it called from this thread is called again by what is returned, through `run`.
        None where torch did some of the work, or no kernel any.
        """
        made = self._recorder.made = []
        try:
            with _TorchWork() as by_torch:
                work()
        finally:
            self._recorder.made = None
        if by_torch.operators or not made:
            log.debug("not recorded, torch computes in it: %s", ", ".join(sorted(by_torch.operators)))
            return None
        return _Recording(run, self.threads, made)


class _TorchWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of torch's operators that do more than to allocate a tensor or to make a view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would otherwise import its compiler at the first operator: 1.5 s of CPU time."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.name not in _ALLOCATIONS and (schema.is_mutable or not _views(answer, args)):
            self.operators.add(schema.name)
        return answer


def _views(answer: object, args: object) -> bool:
    """Whether `answer` is nothing but views of `args`."""
    lies = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
    return all(
        isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in lies
        for leaf in tree_leaves(answer)
    )


class _Recording:
    """Calls made again; it holds their jobs, and what those point to."""

    def __init__(self, run: Function, threads: int, made: Sequence[_Made]) -> None:
        self._run, self._threads, self._made = run, threads, made
        self._calls = (_Call * len(made))()
        for call, known in zip(self._calls, made, strict=True):
            call.function = ctypes.cast(known.function, ctypes.c_void_p)  # type: ignore[arg-type]
            call.job = ctypes.addressof(known.job)
        self._job = _Replay(ctypes.addressof(self._calls), len(made), 0)

    def __call__(self) -> None:
        """Raises `KernelError` as the first kernel that fails would have."""
        code = self._run(ctypes.byref(self._job), self._threads)
        if code:
            _check(self._made[self._job.failed].name, code)


def _check(name: str, code: int) -> None:
    if code == _NO_MEMORY:
        raise CapacityError(f"{name}: no memory for its buffers")
    if code:
        raise KernelError(f"{name}: {_ERRORS[code]}")


def recording(path: Path, caller: Caller) -> Capture:
    """How work is recorded whose kernels are called by `caller`, replayed by the library at `path`; raises
    `KernelError` if it cannot be loaded.
    """
    run = loaded(path).sagellm_replay
    run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_int32), ctypes.c_int32
    return partial(caller.record, run)
