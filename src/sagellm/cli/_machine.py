"""Memory, devices and compilers of this machine."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sagellm.core.cores import usable_cores

COMPILERS = ("gcc", "g++", "clang", "cl", "nvcc", "ninja", "cmake")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """A device that a model can run on."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int


def devices(*, has_torch: bool) -> list[LocalDevice]:
    """The GPUs, then the CPU."""
    return [*(_gpus() if has_torch else ()), _cpu(has_torch=has_torch)]


def find_compilers() -> list[str]:
    """The compilers on the search path, in a fixed order."""
    return [name for name in COMPILERS if shutil.which(name)]


def _gpus() -> list[LocalDevice]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found.append(LocalDevice(f"cuda:{index}", f"{name}, CUDA {torch.version.cuda}", total, free))
    return found


def _cpu(*, has_torch: bool) -> LocalDevice:
    memory = read_meminfo(MEMINFO.read_text(encoding="ascii")) if MEMINFO.exists() else {}
    total = memory.get("MemTotal", _pages("SC_PHYS_PAGES"))
    free = memory.get("MemAvailable", _pages("SC_AVPHYS_PAGES"))
    if has_torch:
        import torch

        from sagellm.engines.native.memory import available_bytes

        free = available_bytes(
            torch.device("cpu")
        )  # as the engine counts it: within the limits of control groups
    return LocalDevice(
        "cpu", f"{platform.processor() or platform.machine()}, {usable_cores()} cores", total, free
    )


def read_meminfo(text: str) -> Mapping[str, int]:
    """Bytes by name from the kernel's list of `Name:  number kB`."""
    rows = (line.partition(":") for line in text.splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in rows if value.strip().endswith("kB")}


def as_text(num_bytes: int) -> str:
    """Bytes in the unit that keeps one to three digits before the point."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def _pages(name: str) -> int:
    """Bytes by a name of `os.sysconf`; 0 where the system does not say."""
    if name not in getattr(os, "sysconf_names", {}):
        return 0
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
