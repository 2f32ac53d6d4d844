"""`sagellm bench micro fusion`: the CPU kernels of `accel/fusion` beside torch, on one thread.

Shapes are those of model S (184 M parameters), in bfloat16. It runs on one thread, because the measured time
is that of the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.benchmarks.micro.cases import MicroBenchCell, MicroBenchmark, Recipe, TimedOperation, timed
from sagellm.core.blocks import cdiv
from sagellm.core.errors import KernelError, UnknownNameError, nearest
from sagellm.core.protocols.fusion import FusedKernel, KernelSet

KERNELS, TORCH = WAYS = ("kernels", "torch")
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


def _check_way(name: str) -> None:
    if name not in WAYS:
        raise UnknownNameError(f"unknown way to compute {name!r}.{nearest(name, WAYS)}")


@cache
def _kernels() -> KernelSet:
    """Raises `KernelError` if they cannot be built."""
    found = cpu_kernels(1)
    if found.linear is None:
        raise KernelError("there are no kernels here: a C++ compiler is needed, or measure --way torch alone")
    return found


def _random(cell: MicroBenchCell, *shape: int) -> torch.Tensor:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(cell.plan.seed)
    return torch.randn(*shape, generator=generator).mul_(0.02).to(_DTYPE)


def _timed(run: Callable[[], Any]) -> TimedOperation:
    def without_gradient(_: Any) -> None:
        with torch.inference_mode():
            run()

    return TimedOperation(run=without_gradient)


def _matrices(cell: MicroBenchCell, calls: int) -> TimedOperation:
    """Reads each matrix once per call, so that no cache holds the weights."""
    query = (_HEADS + 2 * _KV_HEADS) * _DIM
    layer = [(query, _HIDDEN), (_HIDDEN, _HEADS * _DIM), (2 * _INNER, _HIDDEN), (_HIDDEN, _INNER)]
    shapes = layer * cell.plan.layers + [(_VOCAB, _HIDDEN)]
    inputs = {width: _random(cell, cell.size, width) for width in (_HIDDEN, _INNER)}
    weights = [_random(cell, *shape) for shape in shapes]
    if cell.variant == TORCH:
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


def _attention(cell: MicroBenchCell, sequences: int, tokens: int, start: int) -> TimedOperation:
    """Attention of `tokens` tokens after `start` others in each sequence. Torch gets contiguous keys and
    values, which an engine without the kernel would have to gather first."""
    length = start + tokens
    entries = cdiv(length, _BLOCK)
    query = _random(cell, sequences * tokens, _HEADS, _DIM)
    keys = _random(cell, sequences * entries, _BLOCK, _KV_HEADS, _DIM)
    values = keys.clone()
    if cell.variant == TORCH:
        shape = (sequences, entries * _BLOCK, _KV_HEADS, _DIM)
        k, v = (pool.view(shape)[:, :length].transpose(1, 2).contiguous() for pool in (keys, values))
        q = query.view(sequences, tokens, _HEADS, _DIM).transpose(1, 2)
        return _timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=True))
    attention = _kernels().attention
    assert attention is not None
    spans = torch.tensor([[i * tokens, tokens, start, i * entries] for i in range(sequences)])
    tables = torch.arange(sequences * entries, dtype=torch.int32)
    return _timed(lambda: attention.apply(query, keys, values, spans, tables))


def _norm(cell: MicroBenchCell, calls: int) -> TimedOperation:
    x, delta, weight = (_random(cell, *shape) for shape in ((cell.size, _HIDDEN),) * 2 + ((_HIDDEN,),))
    norm = _way(cell, _kernels().add_rms_norm)
    return _timed(lambda: norm(x, delta, weight, _EPS))


def _gate(cell: MicroBenchCell, calls: int) -> TimedOperation:
    wide, gate = _random(cell, cell.size, 2 * _INNER), _way(cell, _kernels().silu_and_mul)
    return _timed(lambda: gate(wide))


def _rope(cell: MicroBenchCell, calls: int) -> TimedOperation:
    rows = cell.size
    heads = _random(cell, rows, _HEADS + 2 * _KV_HEADS, _DIM)
    cos, sin = _random(cell, rows, _DIM // 2), _random(cell, rows, _DIM // 2)
    keys = _random(cell, cdiv(rows, _BLOCK), _BLOCK, _KV_HEADS, _DIM)
    values, slots = keys.clone(), torch.arange(rows)
    rope = _way(cell, _kernels().rope_to_cache)
    return _timed(lambda: rope(heads, cos, sin, None, None, _EPS, slots, keys, values))


def _way(cell: MicroBenchCell, kernel: FusedKernel | None) -> Callable[..., Any]:
    """Returns the kernel, or its twin from torch's operators."""
    assert kernel is not None
    return kernel.apply if cell.variant == KERNELS else kernel.reference


BENCHMARK = MicroBenchmark(
    "fusion",
    lambda: WAYS,
    _check_way,
    {
        "m": timed("m", Recipe(MATRICES, _matrices, "rows")),
        "a": timed(
            "a",
            Recipe(ATTENTION, lambda cell, calls: _attention(cell, _SEQUENCES, 1, cell.size - 1), "lengths"),
            Recipe(PROMPT, lambda cell, calls: _attention(cell, 1, cell.size, 0), "lengths"),
        ),
        "g": timed(
            "g", Recipe(NORM, _norm, "rows"), Recipe(GATE, _gate, "rows"), Recipe(ROPE, _rope, "rows")
        ),
    },
)
