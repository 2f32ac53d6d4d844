"""Calls of the kernels' C functions, and recordings of these calls.

Before a kernel runs, Python checks its inputs, allocates the result and fills in a job: 4 to 15 us, in which
no weight is read. The tensors of a decode step have the same shapes each time. So a recording keeps the jobs,
with the tensors that they point to, and replays all of them in one call. Work that is not the kernels' and
lies between them, such as adding up the results of several ranks, is repeated in its place
(`Caller.between`).
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sagellm.accel.fusion.checked_kernels import CheckedKernel
from sagellm.accel.fusion.cpu.library import Function, kernel_function
from sagellm.core.errors import CapacityError, KernelError
from sagellm.core.protocols.fusion import Work

log = logging.getLogger("sagellm.kernels")
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`enum Type` of numbers.h."""
_NO_MEMORY = 1
_ERRORS = {
    2: "it has no kernel for these dtypes",
    3: "a span is not within the query's rows and the block tables",
    4: "a block table names a block outside the pool",
    5: "a slot is outside the pool",
    6: "an index is outside the table",
}
_ALLOCATIONS = {"aten::empty", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}


Fields = list[tuple[str, type]]


def fields(kind: type, *names: str) -> Fields:
    """Fields of one type of a C struct."""
    return [(name, kind) for name in names]


pointers = partial(fields, ctypes.c_void_p)
int64s = partial(fields, ctypes.c_int64)
int32s = partial(fields, ctypes.c_int32)
floats = partial(fields, ctypes.c_float)


def structure(name: str, *groups: Fields) -> type[ctypes.Structure]:
    """The C struct of this name, with its fields in order. The .cpp or .h file has it."""
    return type(name, (ctypes.Structure,), {"_fields_": [field for group in groups for field in group]})


_Call = structure("Call", pointers("function", "job"))

_Replay = structure("Replay", pointers("calls"), int64s("count", "failed"))


@dataclass(frozen=True, slots=True)
class _RecordedCall:
    """One call; `kept` owns the memory that its job points to."""

    name: str
    function: Function
    job: ctypes.Structure
    kept: tuple[object, ...]


class _Recorder(threading.local):
    """The calls that this thread records; None while it does not record. Each thread has its own, so calls of
    other threads do not get in, and a fork's child does not go on.
    """

    calls: list[_RecordedCall | Work] | None = None


class Caller:
    """Calls C functions on at most `threads` threads, and records calls on request."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._recorder = _Recorder()

    def __call__(self, name: str, function: Function, job: ctypes.Structure, *kept: object) -> None:
        """Run `function` on `job`; `kept` own all memory that the job points to. Raises `KernelError` where
        the kernel refuses the job, `CapacityError` where it gets no memory.
        """
        _check(name, function(ctypes.byref(job), self.threads))
        calls = self._recorder.calls
        if calls is not None:
            calls.append(_RecordedCall(name, function, job, kept))

    def record(self, run: Function, work: Work) -> Work | None:
        """Run `work` and return a function that repeats its calls through `run` (`sagellm_replay`). Returns
        None where torch computed a part of the work, or no kernel ran.
        """
        calls = self._recorder.calls = []
        try:
            with _TorchWork(self._recorder) as by_torch:
                work()
        finally:
            self._recorder.calls = None
        if by_torch.operators or not any(isinstance(call, _RecordedCall) for call in calls):
            log.debug("not recorded, torch computes in it: %s", ", ".join(sorted(by_torch.operators)))
            return None
        return _recording(run, self.threads, calls)

    def between(self, work: Work) -> None:
        """Do `work`, which is not the kernels'. A recording repeats it in its place.

        It works on tensors that the kernels around it were given or have made, and on its own.
        """
        calls = self._recorder.calls
        if calls is None:
            work()
            return
        self._recorder.calls = None
        try:
            work()
        finally:
            self._recorder.calls = calls
        calls.append(work)


class CpuKernel(CheckedKernel):
    """A kernel with one C function of a library, `c_name`, called through a `Caller`."""

    c_name: str

    def __init__(self, library: ctypes.CDLL, caller: Caller) -> None:
        self._function, self._call = kernel_function(library, self.c_name), caller
        self.build = Path(library._name).name
        """Names the source, compiler and instruction set that the library was built from."""

    def _device_obstacle(self, *tensors: torch.Tensor) -> str:
        for tensor in tensors:
            if not tensor.is_cpu:
                return f"it runs on a CPU, a tensor is on {tensor.device}"
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return "it has no gradient"
        return ""


class _TorchWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While calls are recorded, collects torch's operators that compute."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self.operators: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, or torch imports its compiler at the first operator (1.5 s)."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._recorder.calls is None:
            return result
        schema = func._schema
        if schema.name not in _ALLOCATIONS and (schema.is_mutable or not _are_views(result, args)):
            self.operators.add(schema.name)
        return result


def _are_views(result: object, args: object) -> bool:
    """Whether `result` holds nothing but views of `args`."""
    known = {
        leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)
    }
    return all(
        isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in known
        for leaf in tree_leaves(result)
    )


def _recording(run: Function, threads: int, calls: Sequence[_RecordedCall | Work]) -> Work:
    """What repeats the calls: one replay for those that follow each other."""
    parts: list[Work] = []
    for _, group in groupby(calls, lambda call: isinstance(call, _RecordedCall)):
        own = list(group)
        recorded = [call for call in own if isinstance(call, _RecordedCall)]
        others = [call for call in own if not isinstance(call, _RecordedCall)]
        parts += [_Recording(run, threads, recorded)] if recorded else others
    if len(parts) == 1:
        return parts[0]

    def repeat() -> None:
        for part in parts:
            part()

    return repeat


class _Recording:
    """Recorded calls that can be replayed, with their jobs and memory."""

    def __init__(self, run: Function, threads: int, recorded: Sequence[_RecordedCall]) -> None:
        self._run, self._threads, self._recorded = run, threads, recorded
        self._calls = (_Call * len(recorded))()
        for call, known in zip(self._calls, recorded, strict=True):
            call.function = ctypes.cast(known.function, ctypes.c_void_p)  # type: ignore[arg-type]
            call.job = ctypes.addressof(known.job)
        self._job = _Replay(ctypes.addressof(self._calls), len(recorded), 0)

    def __call__(self) -> None:
        """Raises what the first kernel that fails would have raised."""
        code = self._run(ctypes.byref(self._job), self._threads)
        if code:
            _check(self._recorded[self._job.failed].name, code)


def _check(name: str, code: int) -> None:
    if code == _NO_MEMORY:
        raise CapacityError(f"{name}: no memory for its buffers")
    if code:
        raise KernelError(f"{name}: {_ERRORS[code]}")
