"""`sagellm bench micro fusion`: the CPU kernels of `accel/fusion` beside torch's operators, on one thread.

Shapes are those of model S (184 M parameters), in bfloat16. One thread, because the time that is measured is
the calling thread's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.benchmarks.micro.cases import (
    MicroBenchCell,
    MicroBenchmark,
    MicroBenchPlan,
    Operation,
    Recipe,
    timed,
)
from sagellm.core.blocks import cdiv
from sagellm.core.errors import KernelError, UnknownNameError, nearest
from sagellm.core.protocols.fusion import KernelSet

KERNELS, TORCH = "kernels", "torch"
MATRICES = "all matrices of the layers, and the output"
ATTENTION = "attention of one token, 8 sequences of so many"
PROMPT = "attention of a prompt"
NORM = "residual add and RMSNorm"
GATE = "gated activation"
ROPE = "rotary embedding and KV write"

_HIDDEN, _INNER, _VOCAB = 1024, 3072, 32_000
_HEADS, _KV_HEADS, _DIM = 16, 8, 64
_BLOCK, _SEQUENCES = 16, 8
_EPS = 1e-6
_DTYPE = torch.bfloat16


class _Ways:
    """The names of both ways to compute."""

    def names(self) -> Sequence[str]:
        return (KERNELS, TORCH)

    def get(self, name: str) -> object:
        if name not in self.names():
            raise UnknownNameError(f"unknown way to compute {name!r}.{nearest(name, self.names())}")
        return name


@cache
def _kernels() -> KernelSet:
    """Raises `KernelError` where there are none."""
    found = cpu_kernels(1)
    if found.linear is None:
        raise KernelError("there are no kernels here: a C++ compiler is needed, or measure --way torch alone")
    return found


def _random(setting: MicroBenchCell, *shape: int) -> torch.Tensor:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(setting.plan.seed)
    return torch.randn(*shape, generator=generator).mul_(0.02).to(_DTYPE)


def _timed(run: Callable[[], Any]) -> Operation:
    def without_gradient(_: Any) -> None:
        with torch.inference_mode():
            run()

    return Operation(run=without_gradient)


def _matrices(setting: MicroBenchCell, calls: int) -> Operation:
    """Each matrix is met once in a call, so that weights come from memory."""
    query = (_HEADS + 2 * _KV_HEADS) * _DIM
    layer = [(query, _HIDDEN), (_HIDDEN, _HEADS * _DIM), (2 * _INNER, _HIDDEN), (_HIDDEN, _INNER)]
    shapes = layer * setting.plan.layers + [(_VOCAB, _HIDDEN)]
    inputs = {width: _random(setting, setting.size, width) for width in (_HIDDEN, _INNER)}
    weights = [_random(setting, *shape) for shape in shapes]
    if setting.variant == TORCH:
        return _timed(lambda: [F.linear(inputs[weight.shape[1]], weight) for weight in weights])
    linear = _kernels().linear
    assert linear is not None
    packed = []
    for weight in weights:
        outputs, inputs_of = weight.shape
        matrix = linear.empty(outputs, inputs_of, weight.dtype, torch.zeros)
        matrix.store(0, weight)
        packed.append(matrix)
    return _timed(lambda: [matrix.multiply(inputs[matrix.shape[1]]) for matrix in packed])


def _one_token(setting: MicroBenchCell, calls: int) -> Operation:
    return _attention(setting, _SEQUENCES, 1, setting.size - 1)


def _prompt(setting: MicroBenchCell, calls: int) -> Operation:
    return _attention(setting, 1, setting.size, 0)


def _attention(setting: MicroBenchCell, sequences: int, tokens: int, start: int) -> Operation:
    """Of `tokens` behind `start` others in each sequence. Torch gets keys and values side by side, which an
    engine without the kernel has to gather first."""
    length = start + tokens
    entries = cdiv(length, _BLOCK)
    query = _random(setting, sequences * tokens, _HEADS, _DIM)
    keys = _random(setting, sequences * entries, _BLOCK, _KV_HEADS, _DIM)
    values = keys.clone()
    if setting.variant == TORCH:
        shape = (sequences, entries * _BLOCK, _KV_HEADS, _DIM)
        k, v = (pool.view(shape)[:, :length].transpose(1, 2).contiguous() for pool in (keys, values))
        q = query.view(sequences, tokens, _HEADS, _DIM).transpose(1, 2)
        return _timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=True))
    attention = _kernels().attention
    assert attention is not None
    spans = torch.tensor([[one * tokens, tokens, start, one * entries] for one in range(sequences)])
    tables = torch.arange(sequences * entries, dtype=torch.int32)
    return _timed(lambda: attention.apply(query, keys, values, spans, tables))


def _norm(setting: MicroBenchCell, calls: int) -> Operation:
    x, delta, weight = (_random(setting, *shape) for shape in ((setting.size, _HIDDEN),) * 2 + ((_HIDDEN,),))
    kernel = _kernels().add_rms_norm
    assert kernel is not None
    return _timed(lambda: _way(setting, kernel)(x, delta, weight, _EPS))


def _gate(setting: MicroBenchCell, calls: int) -> Operation:
    wide, kernel = _random(setting, setting.size, 2 * _INNER), _kernels().silu_and_mul
    assert kernel is not None
    return _timed(lambda: _way(setting, kernel)(wide))


def _rope(setting: MicroBenchCell, calls: int) -> Operation:
    rows = setting.size
    heads = _random(setting, rows, _HEADS + 2 * _KV_HEADS, _DIM)
    cos, sin = _random(setting, rows, _DIM // 2), _random(setting, rows, _DIM // 2)
    keys = _random(setting, cdiv(rows, _BLOCK), _BLOCK, _KV_HEADS, _DIM)
    values, slots = keys.clone(), torch.arange(rows)
    kernel = _kernels().rope_to_cache
    assert kernel is not None
    return _timed(lambda: _way(setting, kernel)(heads, cos, sin, None, None, _EPS, slots, keys, values))


def _way(setting: MicroBenchCell, kernel: Any) -> Callable[..., Any]:
    """The kernel, or its twin from torch's operators."""
    way: Callable[..., Any] = kernel.apply if setting.variant == KERNELS else kernel.reference
    return way


def _rows(plan: MicroBenchPlan) -> tuple[int, ...]:
    return plan.rows


def _lengths(plan: MicroBenchPlan) -> tuple[int, ...]:
    return plan.lengths


BENCHMARK = MicroBenchmark(
    "fusion",
    _Ways(),
    {
        "m": timed("m", Recipe(MATRICES, _matrices, _rows)),
        "a": timed("a", Recipe(ATTENTION, _one_token, _lengths), Recipe(PROMPT, _prompt, _lengths)),
        "g": timed("g", Recipe(NORM, _norm, _rows), Recipe(GATE, _gate, _rows), Recipe(ROPE, _rope, _rows)),
    },
)
