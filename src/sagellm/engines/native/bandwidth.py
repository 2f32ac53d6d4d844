"""How fast a device reads its memory: the bound of every step that reads weights and KV once."""

from __future__ import annotations

import time

import torch

CPU_BYTES, CUDA_BYTES = 1 << 28, 1 << 31
_REPEATS = 7


def read_bandwidth(device_name: str) -> float:
    """Bytes per second, the best of a few sums over more memory than any cache holds, by torch's threads."""
    device = torch.device(device_name)
    size = CUDA_BYTES if device.type == "cuda" else CPU_BYTES
    values = torch.ones(size // 4, device=device)  # written, so that it is there
    return size / min(_sum_s(values) for _ in range(_REPEATS))


def _sum_s(values: torch.Tensor) -> float:
    began_s = time.perf_counter()
    values.sum().item()  # waits for the device
    return time.perf_counter() - began_s
