"""Inputs of the Triton kernels, on a GPU where there is one, else for the interpreter."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sagellm.core.blocks import cdiv
from sagellm.core.protocols.fusion import Scores
from tests.effort import usual

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if DEVICE.type == "cuda" else ()))
"""The interpreter's product of bfloat16 matrices is wrong."""


def interpreted(chosen: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: all of them on a GPU; for the interpreter the chosen, and the others if slow."""
    return list(cases) if DEVICE.type == "cuda" else usual(chosen, cases)


@dataclass(frozen=True)
class Attention:
    """Inputs of paged attention; `args` in their order."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    spans: torch.Tensor
    tables: torch.Tensor
    window: int | None = None
    scores: Scores | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        return self.query, self.keys, self.values, self.spans, self.tables, self.window, self.scores

    def doubled(self) -> Attention:
        """The same in float64, so that the only rounding is the kernel's."""
        return replace(self, query=self.query.double(), keys=self.keys.double(), values=self.values.double())


def attention(
    parts: list[tuple[int, int]], *, heads: int = 4, kv_heads: int = 2, dim: int = 16, block_size: int = 4,
    dtype: torch.dtype = torch.float32, window: int | None = None, seed: int = 0, shared: bool = False,
    strided: bool = False,
) -> Attention:  # fmt: skip
    """`parts`: (start, tokens) of each span. Blocks are scattered; where `shared`, sequences may have the
    same ones; where `strided`, heads lie beside others. What no sequence reads, padding too, is NaN.
    """
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    needed = [cdiv(start + tokens, block_size) for start, tokens in parts]
    num_blocks = sum(needed) + 2
    free = chance.sample(range(num_blocks), num_blocks)
    spans: list[tuple[int, ...]] = []
    tables: list[int] = []
    row, extra = 0, 3 if strided else 0
    shape = (num_blocks, block_size, kv_heads + extra, dim + 2 * extra)
    keys, values = torch.full(shape, math.nan), torch.full(shape, math.nan)
    for (start, tokens), count in zip(parts, needed, strict=True):
        own = chance.choices(range(num_blocks), k=count) if shared else [free.pop() for _ in range(count)]
        spans.append((row, tokens, start, len(tables)))
        tables += own
        row += tokens
        at = torch.arange(start + tokens)
        blocks = torch.tensor(own)[at // block_size]
        for pool in (keys, values):
            pool[blocks, at % block_size] = torch.randn(len(at), *shape[2:], generator=generator)
    query = torch.randn(row, heads + extra, dim + 2 * extra, generator=generator)
    query, keys, values = (
        tensor.to(DEVICE, dtype)[..., extra:, extra : extra + dim] for tensor in (query, keys, values)
    )
    return Attention(
        query, keys, values, torch.tensor(spans, device=DEVICE),
        torch.tensor(tables, dtype=torch.int32, device=DEVICE), window,
    )  # fmt: skip
