"""Options of `NativeBackend`, checked before a model is loaded or sized: counts, device, dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from sagellm.core.errors import ConfigError
from sagellm.core.types import AttentionChunk, Window
from sagellm.engines.native.accelerators import default_device, load
from sagellm.engines.native.measure import in_turns, recorded, torch_threads
from sagellm.engines.native.memory import available_bytes
from sagellm.engines.native.model_spec import DTYPES, ModelSpec

if TYPE_CHECKING:
    from sagellm.engines.native.bridge.description import BridgedSpec


def check_counts(**counts: int | None) -> None:
    """Raise `ConfigError` for a number below 1."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


def check_chunks(windows: Sequence[Window | None], block_size: int) -> None:
    """Raise `ConfigError` where a block would lie in two attention chunks."""
    sizes = {window.size for window in windows if isinstance(window, AttentionChunk)}
    for size in sizes:
        if size % block_size:
            raise ConfigError(
                f"block_size {block_size} does not divide the chunks of {size} tokens that layers attend to; "
                f"{math.gcd(size, 16)} does"
            )


def usable_device(name: str) -> torch.device:
    """The torch device of that name. Raises `ConfigError` for a device that cannot be used. "auto" is as
    `default_device` says.
    """
    if name == "auto":
        return default_device()
    load(name.partition(":")[0])
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device {name!r} cannot be used: {str(error).splitlines()[0]}; cpu always can"
        ) from error
    return device


def model_length(spec: ModelSpec | BridgedSpec, wanted: int | None) -> int:
    """Tokens of the longest sequence. Raises `ConfigError` beyond the model's positions."""
    if wanted is not None and wanted > spec.max_model_len:
        raise ConfigError(
            f"max_model_len {wanted} is more than this model's {spec.max_model_len} positions: give less"
        )
    return wanted or spec.max_model_len


_ROWS, _INPUTS, _OUTPUTS, _ROUNDS = 64, 1024, 2048, 5
_WORTH = 1.5
_MEMORY_SHARE = 0.5


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name. Raises `ConfigError` for an unknown name."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not known: use auto, {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fastest_dtype(
    dtype: torch.dtype, device: torch.device, num_parameters: int, *, widened: bool = True
) -> torch.dtype:
    """`dtype`, or float32 where computing in that is faster on this CPU.

    CPUs without bf16 or fp16 instructions (AVX-512 alone, AVX2, NEON) emulate these GEMMs at a quarter of the
    fp32 speed, or less. There a checkpoint in half precision is computed in float32: each weight keeps its
    value, and sums, softmax and KV cache are more exact than the checkpoint. If the weights have to be
    `widened` for it, they take twice the memory, so they may take at most half of what is available. A few
    milliseconds of GEMMs decide. They are recorded, so all runs on a machine agree.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    if widened and num_parameters * torch.float32.itemsize > _MEMORY_SHARE * available_bytes(device):
        return dtype
    return torch.float32 if is_emulated(dtype) else dtype


def is_emulated(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies in float32 more than `_WORTH` times as fast."""
    case = f"{_ROWS} rows times {_OUTPUTS} x {_INPUTS} in {dtype} and float32"
    in_dtype, in_float32 = recorded(case, "torch", partial(_gemms_s, dtype))
    return in_dtype > _WORTH * in_float32


def _gemms_s(dtype: torch.dtype) -> list[float]:
    """CPU seconds of GEMMs of a decode batch in `dtype` and in float32."""
    runs = [
        partial(
            torch.nn.functional.linear,
            torch.ones(_ROWS, _INPUTS, dtype=tried),
            torch.ones(_OUTPUTS, _INPUTS, dtype=tried),
        )
        for tried in (dtype, torch.float32)
    ]
    with torch_threads(1):
        return in_turns(torch.device("cpu"), runs, _ROUNDS)
