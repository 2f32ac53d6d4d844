"""Which of the instruction sets that the kernels are written for this CPU has."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CpuLevel:
    """An instruction set: the CPU flags it needs, as Linux names them, and what the compiler is told."""

    name: str
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]


def _level(name: str, *flags: str) -> CpuLevel:
    return CpuLevel(name, frozenset(flags), tuple(f"-m{flag.replace('_', '')}" for flag in flags))


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")

LEVELS = (
    _level("avx512_bf16", *_AVX512, "avx512_vnni", "avx512_bf16"),
    _level("avx512_vnni", *_AVX512, "avx512_vnni"),
    _level("avx512", *_AVX512),
    _level("avx2", *_AVX2),
    _level("plain"),
)
"""Best first; `plain` runs on every CPU that the compiler knows."""


def cpu_level(flags: Iterable[str] | None = None) -> CpuLevel:
    """The best level for a CPU with these flags; without them, for this one."""
    has = this_cpu_flags() if flags is None else frozenset(flags)
    return next(level for level in LEVELS if level.cpu_flags <= has)


def this_cpu_flags() -> frozenset[str]:
    """As the Linux kernel reports them for x86-64; nothing elsewhere, where `plain` is all there is."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
