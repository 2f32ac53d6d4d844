"""The kernels' shared libraries: where their sources lie, and how they share threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from sagellm.core import native_code
from sagellm.core.native_code import Compiler, CpuLevel

_SOURCES = Path(__file__).parent
Function = Callable[[object, int], int]
"""A kernel's C function, of the address of its job and a number of threads; 0 where it succeeds."""


def compiled(source: str, level: CpuLevel, compiler: Compiler, *, folder: Path | None = None) -> Path:
    """The library of `source`.cpp, as `native_code.compiled` gives it."""
    return native_code.compiled(_SOURCES / f"{source}.cpp", level, compiler, folder=folder)


def loaded(path: Path, *, threads_of: Path | None = None) -> ctypes.CDLL:
    """The library at `path`. It uses its own threads or those of the library `threads_of`. Raises
    `KernelError` for a file that is no library for this machine.
    """
    library = native_code.loaded(path)
    if threads_of is not None:
        helping = native_code.loaded(threads_of)
        helping.sagellm_threads.restype = ctypes.c_void_p
        library.sagellm_share_threads.argtypes = (ctypes.c_void_p,)
        library.sagellm_share_threads.restype = None
        library.sagellm_share_threads(helping.sagellm_threads())
    return library


def kernel_function(library: ctypes.CDLL, name: str) -> Function:
    """The kernel function of this name, typed."""
    function = library[name]
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int32), ctypes.c_int32
    return function
