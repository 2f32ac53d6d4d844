"""What this machine is: memory, devices, compilers. Reads, and starts nothing that it does not stop."""

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
class Device:
    """Something that a model can run on."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int


def devices(*, torch_here: bool) -> list[Device]:
    """GPUs first, then the CPU, which is always there."""
    return [*(_gpus() if torch_here else ()), _cpu(torch_here=torch_here)]


def find_compilers() -> list[str]:
    """Those on the search path, in a fixed order."""
    return [name for name in COMPILERS if shutil.which(name)]


def _gpus() -> list[Device]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found.append(Device(f"cuda:{index}", f"{name}, CUDA {torch.version.cuda}", total, free))
    return found


def _cpu(*, torch_here: bool) -> Device:
    memory = read_meminfo(MEMINFO.read_text(encoding="ascii")) if MEMINFO.exists() else {}
    total = memory.get("MemTotal", _pages("SC_PHYS_PAGES"))
    free = memory.get("MemAvailable", _pages("SC_AVPHYS_PAGES"))
    if torch_here:
        import torch

        from sagellm.engines.native.memory import available_bytes

        free = available_bytes(torch.device("cpu"))  # what the engine will find: also control groups count
    return Device("cpu", f"{platform.processor() or platform.machine()}, {usable_cores()} cores", total, free)


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
