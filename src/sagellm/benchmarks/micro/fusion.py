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
from sagellm.core.protocols.fusion import FusedKernel, KernelSet, Scores

KERNELS, TORCH = WAYS = ("kernels", "torch")
MATRICES = "all matrices of the layers, and the output"
ATTENTION = "attention of one token, 8 sequences of so many"
PROMPT = "attention of a prompt"
LATENT = "latent attention of one token, absorbed"
EXPANDED = "the same with the keys and values of all heads in the cache"
NORM = "residual add and RMSNorm"
GATE = "gated activation"
ROPE = "rotary embedding and KV write"

_HIDDEN, _INNER, _VOCAB = 1024, 3072, 32_000
_HEADS, _KV_HEADS, _DIM = 16, 8, 64
_BLOCK, _SEQUENCES = 16, 8
_RANK, _ROPE, _NOPE, _VALUE = 512, 64, 128, 128  # of latent attention, as in DeepSeek-V2 and V3
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


def _latent(cell: MicroBenchCell, *, absorbed: bool) -> TimedOperation:
    """One token of a sequence, from the queries to the outputs of `_HEADS` heads.

    In absorbed form queries go to the latent space and outputs come back from it; else the token's own keys
    and values are expanded. Torch gets contiguous keys and values.
    """
    entries = cdiv(cell.size, _BLOCK)
    kv_heads, key_dim, value_dim = (1, _RANK + _ROPE, _RANK) if absorbed else (_HEADS, _NOPE + _ROPE, _VALUE)
    query, latent = _random(cell, 1, _HEADS, _NOPE + _ROPE), _random(cell, 1, _RANK)
    keys = _random(cell, entries, _BLOCK, kv_heads, key_dim)
    values = keys[..., :value_dim] if absorbed else _random(cell, entries, _BLOCK, kv_heads, value_dim)
    key_up, value_up = _random(cell, _HEADS, _NOPE, _RANK), _random(cell, _HEADS, _RANK, _VALUE)
    spans = torch.tensor([[0, 1, cell.size - 1, 0]])
    tables = torch.arange(entries, dtype=torch.int32)
    attention, scale = _kernels().attention, (_NOPE + _ROPE) ** -0.5
    assert attention is not None
    kernel, scores = attention.apply, Scores(scale)
    k, v = (pool.flatten(0, 1)[None, : cell.size].transpose(1, 2) for pool in (keys, values))
    if cell.variant == TORCH:
        k, v = k.contiguous(), v.contiguous()

    def mixed(q: torch.Tensor) -> torch.Tensor:
        if cell.variant == KERNELS:
            answer: torch.Tensor = kernel(q, keys, values, spans, tables, None, scores)
            return answer
        packed = q.view(1, kv_heads, -1, key_dim)
        return F.scaled_dot_product_attention(packed, k, v, scale=scale).view(1, _HEADS, value_dim)

    def run() -> torch.Tensor:
        if not absorbed:
            torch.matmul(latent, key_up.mT), torch.matmul(latent, value_up)
            return mixed(query)
        in_latent_space = torch.bmm(query[..., :_NOPE].transpose(0, 1), key_up).transpose(0, 1)
        answer = mixed(torch.cat([in_latent_space, query[..., _NOPE:]], dim=2))
        return torch.bmm(answer.transpose(0, 1), value_up)

    return _timed(run)


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
            Recipe(LATENT, lambda cell, calls: _latent(cell, absorbed=True), "contexts"),
            Recipe(EXPANDED, lambda cell, calls: _latent(cell, absorbed=False), "contexts"),
        ),
        "g": timed(
            "g", Recipe(NORM, _norm, "rows"), Recipe(GATE, _gate, "rows"), Recipe(ROPE, _rope, "rows")
        ),
    },
)
