"""The C++ kernel of collectives on one host, and what its twin shares.

Both take contiguous CPU tensors whose sizes were checked, and give equal bits. A group uses the same kernel
on all ranks: the two take different steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from sagellm.comm.collectives._buffers import REDUCIBLE
from sagellm.comm.collectives.shared_region import SharedRegion
from sagellm.core.native_code import compiled, cpu_level, find_compiler, loaded
from sagellm.core.protocols.collectives import ReduceOp

SOURCE = Path(__file__).with_name("shared_memory.cpp")
SPINS = 20
YIELD_NS = 100_000
SLEEP_NS = 20_000_000
OPS = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN)
DTYPES = (
    *REDUCIBLE,
    *(torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
"""The code of a dtype is its place."""


_STALLED = 1


class Outcome(IntEnum):
    """What became of an operation. `DISAGREE`: ranks submitted different ones; the group goes on."""

    OK = 0
    DISAGREE = 2
    ABORTED = 3


class SharedOperation(IntEnum):
    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    BROADCAST = 3
    ALL_TO_ALL = 4
    BARRIER = 5


class Submitted(NamedTuple):
    """What a rank submitted. `argument`: the reduction or the source; `size` in elements or bytes."""

    operation: int
    dtype: int
    argument: int
    size: int


class Kernel(Protocol):
    """The collectives of one rank. Each returns an `Outcome`."""

    def all_reduce(self, data: torch.Tensor, op: ReduceOp, num_shots: int) -> int:
        """Reduce in place, in one shot or in two."""

    def reduce_scatter(self, output: torch.Tensor, data: torch.Tensor, op: ReduceOp) -> int: ...

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> int: ...

    def broadcast(self, data: torch.Tensor, source: int) -> int: ...

    def all_to_all(
        self, output: torch.Tensor, data: torch.Tensor, expected: Sequence[int], sent: Sequence[int]
    ) -> int:
        """Sizes in bytes, by rank."""

    def barrier(self) -> int: ...

    def submitted(self) -> list[Submitted]:
        """After `DISAGREE`: what each rank submitted."""

    def load(self, word_at: int) -> int:
        """A 32-bit word of the region. What was written before it can be read then."""

    def store(self, word_at: int, value: int) -> None: ...


class _Group(ctypes.Structure):
    """`struct Group` of the kernel."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("flags_at", "notes_at", "note_bytes", "slots_at", "slot_bytes")
        ),
        ("rank", ctypes.c_int32),
        ("world", ctypes.c_int32),
        ("step", ctypes.c_uint32),
        ("spins", ctypes.c_int32),
        ("yield_ns", ctypes.c_int64),
        ("sleep_ns", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("waiting_for", "done", "stage")),
        ("longest", ctypes.c_int64),
    )


Stalled = Callable[[int], bool]
"""Called with the rank that is waited for, again and again; true: give up."""


def native_library() -> ctypes.CDLL:
    """The kernel's library, compiled unless the user's cache has it. Raises `KernelError` without it."""
    compiler = find_compiler()
    return loaded(compiled(SOURCE, cpu_level(compiler=compiler), compiler, optimize="-O3"))


class NativeKernel:
    """The C++ kernel. Its calls let other threads of Python run."""

    def __init__(self, library: ctypes.CDLL, region: SharedRegion, stalled: Stalled) -> None:
        layout = region.layout
        self._region = region
        self._stalled = stalled
        self._group = _Group(
            region.address,
            *(layout.flags_at, layout.notes_at, layout.note_bytes, layout.slots_at, layout.slot_bytes),
            *(region.rank, layout.world_size, 0, SPINS, YIELD_NS, SLEEP_NS),
        )
        self._at = ctypes.addressof(self._group)
        pointer, size, code = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._all_reduce = _function(library, "all_reduce", pointer, pointer, size, code, code, code)
        self._reduce_scatter = _function(
            library, "reduce_scatter", pointer, pointer, pointer, size, code, code
        )
        self._all_gather = _function(library, "all_gather", pointer, pointer, pointer, size, code)
        self._broadcast = _function(library, "broadcast", pointer, pointer, size, code, code)
        self._all_to_all = _function(library, "all_to_all", *(pointer,) * 5, code)
        self._barrier = _function(library, "barrier", pointer)
        self._load = _function(library, "load", pointer)
        self._store = _function(library, "store", pointer, ctypes.c_uint32)
        self._load.restype, self._store.restype = ctypes.c_uint32, None

    def all_reduce(self, data: torch.Tensor, op: ReduceOp, num_shots: int) -> int:
        code, op_code = _CODES[data.dtype], _OP_CODES[op]
        return self._call(self._all_reduce, data.data_ptr(), data.numel(), code, op_code, num_shots)

    def reduce_scatter(self, output: torch.Tensor, data: torch.Tensor, op: ReduceOp) -> int:
        target, source, code = output.data_ptr(), data.data_ptr(), _CODES[data.dtype]
        return self._call(self._reduce_scatter, target, source, output.numel(), code, _OP_CODES[op])

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> int:
        target, source = output.data_ptr(), part.data_ptr()
        return self._call(self._all_gather, target, source, part.nbytes, _code(part.dtype))

    def broadcast(self, data: torch.Tensor, source: int) -> int:
        return self._call(self._broadcast, data.data_ptr(), data.nbytes, _code(data.dtype), source)

    def all_to_all(
        self, output: torch.Tensor, data: torch.Tensor, expected: Sequence[int], sent: Sequence[int]
    ) -> int:
        sizes = ctypes.c_int64 * len(sent)
        buffers = output.data_ptr(), data.data_ptr(), sizes(*expected), sizes(*sent)
        return self._call(self._all_to_all, *buffers, _code(data.dtype))

    def barrier(self) -> int:
        return self._call(self._barrier)

    def _call(self, function: Any, *arguments: Any) -> int:
        """Carry an operation out. The kernel returns now and then from a long wait, and is called again."""
        outcome: int = function(self._at, *arguments)
        while outcome == _STALLED:
            is_over = self._stalled(self._group.waiting_for)
            outcome = function(self._at, *arguments)  # the rank may have done its part before it left
            if is_over and outcome == _STALLED:
                return Outcome.ABORTED
        return outcome

    def submitted(self) -> list[Submitted]:
        layout, parity = self._region.layout, (self._group.step - 1) % 2
        found = []
        for rank in range(layout.world_size):
            start = layout.notes_at + (2 * rank + parity) * layout.note_bytes
            note = self._region.memory[start : start + 24]
            operation, dtype, argument, _ = note[:16].view(np.int32).tolist()
            found.append(Submitted(operation, dtype, argument, int(note[16:24].view(np.int64)[0])))
        return found

    def load(self, word_at: int) -> int:
        return int(self._load(self._region.address + word_at))

    def store(self, word_at: int, value: int) -> None:
        self._store(self._region.address + word_at, value)


def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
    function = library[f"sagellm_{name}"]
    function.argtypes, function.restype = arguments, ctypes.c_int32
    return function


_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_OP_CODES = {op: code for code, op in enumerate(OPS)}


def _code(dtype: torch.dtype) -> int:
    return _CODES.get(dtype, len(DTYPES))
