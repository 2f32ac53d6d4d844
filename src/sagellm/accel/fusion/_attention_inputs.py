"""What the inputs of paged attention have to be for a kernel on a CPU as on a GPU."""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def obstacle(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None = None,
    spans: torch.Tensor | None = None, tables: torch.Tensor | None = None, window: int | None = None,
) -> str:  # fmt: skip
    """What stands in the way of any kernel; empty where nothing does. Devices are not looked at."""
    if values is None or spans is None or tables is None:
        return "paged attention takes query, keys, values, spans, tables and maybe a window"
    if query.dtype not in DTYPES or keys.dtype not in DTYPES or values.dtype != keys.dtype:
        return f"paged attention has no kernel for {query.dtype} over {keys.dtype} and {values.dtype}"
    if query.ndim != 3 or keys.ndim != 4 or values.shape != keys.shape or query.shape[2] != keys.shape[3]:
        return f"shapes {[list(t.shape) for t in (query, keys, values)]} are no query and pools"
    if not keys.shape[2] or query.shape[1] % keys.shape[2] or not keys.shape[1] or not keys.shape[3]:
        return (
            f"{query.shape[1]} heads of {keys.shape[3]} over blocks of {list(keys.shape[1:3])} make no groups"
        )
    if not keys.stride(3) == values.stride(3) == query.stride(2) == 1:
        return "the dims of a head are not contiguous"
    if spans.dtype != torch.int64 or spans.shape != (len(spans), 4) or not spans.is_contiguous():
        return f"spans are contiguous int64 [n, 4], not {spans.dtype} {list(spans.shape)}"
    if tables.dtype != torch.int32 or tables.ndim != 1 or not tables.is_contiguous():
        return f"tables are contiguous int32 [n], not {tables.dtype} {list(tables.shape)}"
    if window is not None and window < 1:
        return f"a window of {window} shows nothing: use at least 1, or None"
    return ""
