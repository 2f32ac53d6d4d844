"""Shared libraries from our C++ sources.

Each is compiled once for source, compiler and instruction set.

They lie in the user's cache folder. A name holds a hash of what the library was made from and one of its
content. A library appears by a rename, so processes that start at once may both compile. A library whose
content does not match its name (cut short, say) is compiled again: loading it could end the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sagellm.core.errors import KernelError

FLAGS = ("-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-w")
"""Warnings are for the tests: GCC 12 warns about its own intrinsics."""
COMPILE_TIMEOUT_S = 120.0
_COMPILERS = ("g++", "c++", "clang++")
_SHOWN_CHARS = 300


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: how its command line begins, and the version that it prints."""

    command: tuple[str, ...]
    version: str

    def accepts(self, options: Sequence[str]) -> bool:
        """Whether it knows these options. It is asked, because a version is a text."""
        return _run([*self.command, *options, "-E", "-x", "c++", os.devnull]).returncode == 0


def find_compiler(environ: Mapping[str, str] | None = None) -> Compiler:
    """The C++ compiler in CXX, or the first one found. Raises `KernelError` if none runs."""
    env = os.environ if environ is None else environ
    named = shlex.split(env.get("CXX", ""))
    for command in [named] if named else [[name] for name in _COMPILERS]:
        program = shutil.which(command[0], path=env.get("PATH"))
        if program is None:
            continue
        asked = _run([program, *command[1:], "--version"])
        if asked.returncode == 0:
            return Compiler((program, *command[1:]), asked.stdout)
    wanted = shlex.join(named) if named else ", ".join(_COMPILERS)
    raise KernelError(f"no C++ compiler ({wanted}) on PATH: install g++, or name one in CXX")


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of the user's built kernels, private and made if need be. Raises `KernelError` for a folder
    that others could write to: what lies there is run.
    """
    env = os.environ if environ is None else environ
    root = env.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(root) / "sagellm" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError as error:
        raise KernelError(f"no cache folder for kernels: {error}; set XDG_CACHE_HOME") from error
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others or (hasattr(os, "getuid") and found.st_uid != os.getuid()):
        raise KernelError(f"{folder} belongs to, or can be written by, others: set XDG_CACHE_HOME")
    return folder


def compiled(
    source: Path, level: CpuLevel, compiler: Compiler, *, optimize: str = "-O2", folder: Path | None = None
) -> Path:
    """The library of a source for `level`, from `folder` or compiled into it. `folder` defaults to
    `cache_folder`. Sources and headers beside the source count as parts of it. Raises `KernelError` where the
    source does not compile or the folder cannot be read or written.
    """
    folder = folder or cache_folder()
    flags = (*FLAGS, optimize, *level.compiler_flags)
    digest = hashlib.sha256(repr((compiler, flags, platform.machine())).encode())
    for file in sorted((*source.parent.glob("*.cpp"), *source.parent.glob("*.h"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    stem = f"{source.stem}-{level.name}-{digest.hexdigest()[:24]}"
    try:
        for found in sorted(folder.glob(f"{stem}-*.so")):
            if found.name == _whole_name(stem, found):
                return found
        handle, name = tempfile.mkstemp(prefix=f".{stem}.", dir=folder)
    except OSError as error:
        raise KernelError(f"{folder} cannot be used: {error}; set XDG_CACHE_HOME") from error
    os.close(handle)
    unfinished = Path(name)
    try:
        command = (*compiler.command, *flags, str(source), "-o", str(unfinished))
        outcome = _run(command)
        if outcome.returncode:
            raise KernelError(f"{command[0]} failed: {outcome.stderr.strip()[:_SHOWN_CHARS]}")
        return unfinished.replace(folder / _whole_name(stem, unfinished))
    finally:
        unfinished.unlink(missing_ok=True)


def _whole_name(stem: str, path: Path) -> str:
    return f"{stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:24]}.so"


def loaded(path: Path) -> ctypes.CDLL:
    """The library at `path`. Raises `KernelError` for a file that is no library for this machine."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"{path} cannot be loaded ({error}): delete it") from error


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=COMPILE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{command[0]} cannot be run: {error}") from error


@dataclass(frozen=True, slots=True)
class CpuLevel:
    """An instruction set: its CPU flags, as Linux names them, and compiler flags."""

    name: str
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]


def _level(name: str, *flags: str) -> CpuLevel:
    options = (flag.replace("amx_", "amx-").replace("_", "") for flag in flags)
    return CpuLevel(name, frozenset(flags), tuple(f"-m{option}" for option in options))


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")

LEVELS = (
    _level("amx_bf16", *_AVX512_BF16, "amx_tile", "amx_bf16"),
    _level("avx512_bf16", *_AVX512_BF16),
    _level("avx512_vnni", *_AVX512, "avx512_vnni"),
    _level("avx512", *_AVX512),
    _level("avx2", *_AVX2),
    _level("plain"),
)
"""Best first; `plain` runs on every CPU that the compiler supports."""


def cpu_level(flags: Iterable[str] | None = None, compiler: Compiler | None = None) -> CpuLevel:
    """The best level for a CPU with these flags and for the compiler.

    The default are this CPU's flags. A compiler for C++20 knows the options of all levels but the first.
    """
    has = this_cpu_flags() if flags is None else frozenset(flags)
    best = next(level for level in LEVELS if level.cpu_flags <= has)
    if best is LEVELS[0] and compiler is not None and not compiler.accepts(best.compiler_flags):
        best = LEVELS[1]
    return best


def this_cpu_flags() -> frozenset[str]:
    """The flags of an x86-64 CPU from the Linux kernel; elsewhere none."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
