"""Which dtype to compute in, where the checkpoint's is slow on this device.

CPUs without bf16 or fp16 instructions (AVX-512 alone, AVX2, NEON) emulate those GEMMs at a quarter of the
fp32 speed, or less. There a checkpoint in half precision is computed in float32: each weight keeps its value,
and sums, softmax and KV cache are float32 (more exact than the checkpoint's own precision). The matrices take
twice the memory, unless there is a kernel that reads them as they are. Whether this pays is measured, not
looked up: a few milliseconds at start.
"""

from __future__ import annotations

import torch

from sagellm.core.errors import ConfigError
from sagellm.engines.native.architectures import DTYPES
from sagellm.engines.native.memory import available_bytes
from sagellm.engines.native.timing import cpu_s, one_thread

_ROWS, _INPUTS, _OUTPUTS, _REPEATS = 64, 1024, 2048, 3
_WORTH = 1.5
_MEMORY_SHARE = 0.5


def torch_dtype(name: str) -> torch.dtype:
    """Raises `ConfigError` for a name that is none of a dtype that the engine has."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not known: use auto, {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compute_dtype(
    dtype: torch.dtype, device: torch.device, num_parameters: int, *, widened: bool = True
) -> torch.dtype:
    """`dtype`, or float32 where that is faster on this CPU and, if the weights have to be `widened` for it,
    they take at most half of what memory is available in float32.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    if widened and num_parameters * torch.float32.itemsize > _MEMORY_SHARE * available_bytes(device):
        return dtype
    with one_thread():
        return torch.float32 if _gemm_s(dtype) > _WORTH * _gemm_s(torch.float32) else dtype


def _gemm_s(dtype: torch.dtype) -> float:
    """CPU seconds of the fastest of a few GEMMs of 64 rows (a decode batch, or a short prompt)."""
    x = torch.ones(_ROWS, _INPUTS, dtype=dtype)
    weight = torch.ones(_OUTPUTS, _INPUTS, dtype=dtype)
    return cpu_s(lambda: torch.nn.functional.linear(x, weight), _REPEATS)
