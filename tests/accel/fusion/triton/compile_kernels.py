"""Compiles every Triton kernel to machine code for the compute capabilities given as arguments (80, 90, ...).

Triton's compiler needs no GPU, so this finds what the interpreter lets pass: types, shapes, shared memory.
Run by test_compile.py in a process of its own, because the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sagellm.accel.fusion.triton.attention import FEWEST_ROWS, attention_kernel, reduce_kernel, tile_sizes
    from sagellm.accel.fusion.triton.draw import draw_kernel
    from sagellm.accel.fusion.triton.experts import (
        combine_kernel,
        grouped_kernel,
        route_kernel,
        sort_kernel,
    )
    from sagellm.accel.fusion.triton.glue import (
        add_rms_norm_kernel,
        rope_to_cache_kernel,
        silu_and_mul_kernel,
    )

SHARED_BYTES = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
"""What a program may have, by compute capability (CUDA C++ programming guide, "technical specifications")."""

Case = tuple[Any, Mapping[str, str], Mapping[str, Any]]


def attention(
    dtype: str, dim: int, group: int, *, one_token: bool, splits: int, rest: int = 0, more: bool = False
) -> Case:
    """With a `rest` values are the first `dim` of a key's dims; `more`: capped scores and sinks."""
    out = "*fp32" if splits > 1 else f"*{dtype}"
    pointers = dict.fromkeys(("query", "keys", "values"), f"*{dtype}")
    pointers |= {"spans": "*i64", "tables": "*i32", "output": out}
    pointers |= dict.fromkeys(("tops", "totals", "sinks"), "*fp32")
    padded = triton.next_power_of_2(dim)
    tile, rows = tile_sizes(padded * (4 if dtype == "fp32" else 2))
    constants = {
        "KV_HEADS": 8, "GROUP": group, "PACKED": triton.next_power_of_2(group), "DIM": dim,
        "DIMS": padded, "REST": rest, "RESTS": max(16, triton.next_power_of_2(rest)), "VALUE_DIM": dim,
        "VALUE_DIMS": padded, "VALUES_IN_KEYS": rest > 0, "CAPPED": more, "SINKS": more,
        "BLOCK_SIZE": 16, "ROWS": FEWEST_ROWS if one_token else rows, "TILE": tile,
        "SPLITS": splits, "ONE_TOKEN": one_token,
    }  # fmt: skip
    return attention_kernel, pointers | {"scale": "fp32", "softcap": "fp32"}, constants


def glue(dtype: str) -> Iterator[Case]:
    own = f"*{dtype}"
    names = ("x", "delta", "delta_weight", "weight", "output")
    yield (
        add_rms_norm_kernel,
        dict.fromkeys(names, own) | {"eps": "fp32"},
        {"COLUMNS": 4096, "PADDED": 4096, "ADDS": True, "NORMS_DELTA": True, "NORMS": True},
    )
    rotated = ("heads", "cos", "sin", "query_weight", "key_weight", "keys", "values")
    constants = {
        "QUERY_HEADS": 16, "KV_HEADS": 8, "DIM": 128, "HALF": 64, "BLOCK_SIZE": 16, "HEADS": 16,
        "TURNS": True, "NORMS_QUERY": True, "NORMS_KEY": True, "NORMS_VALUE": True,
    }  # fmt: skip
    yield (
        rope_to_cache_kernel,
        dict.fromkeys(rotated, own) | {"slots": "*i64", "eps": "fp32", "value_eps": "fp32"},
        constants,
    )
    for gelu in (False, True):
        yield silu_and_mul_kernel, {"wide": own, "output": own}, {"TILE": 1024, "GELU": gelu}


def experts(dtype: str) -> Iterator[Case]:
    own, constants = f"*{dtype}", {"PER_TOKEN": 8, "TILE": 1024}
    types = {"x": own, "weight": own, "starts": "*i64", "bias": own, "y": own}
    for rows in (16, 128):
        wide = dtype != "fp32"
        tiles = {"ROWS": rows, "COLUMNS": 128 if wide and rows == 128 else 64, "TILE": 64 if wide else 32}
        yield grouped_kernel, types, {"PADDED_COUNT": 128, "HAS_BIAS": True, **tiles}
    types = {"outputs": own, "weights": "*fp32", "places": "*i64", "added": own, "y": own}
    yield combine_kernel, types, constants | {"ADDS": True}


def routing() -> Iterator[Case]:
    types = dict.fromkeys(("logits", "correction", "weights"), "*fp32") | {"choices": "*i32", "scale": "fp32"}
    constants = {
        "GROUPS": 8, "SIZE": 32, "PADDED_GROUPS": 8, "PADDED_SIZE": 32, "KEPT_GROUPS": 4, "GROUP_BEST": 2,
        "PER_TOKEN": 8, "PADDED_CHOICES": 8, "SIGMOID": True, "CORRECTED": True, "RENORMALIZE": True,
    }  # fmt: skip
    yield route_kernel, types, constants
    types = dict.fromkeys(("tokens", "places", "starts", "counts"), "*i64") | {"choices": "*i32"}
    yield sort_kernel, types, {"PER_TOKEN": 8, "TILE": 1024}


def cases(*, every: bool) -> Iterator[Case]:
    for dtype, dim, group in [
        ("bf16", 128, 2),
        *([("fp32", 128, 4), ("fp32", 256, 8), ("fp16", 80, 5)] if every else []),
    ]:
        yield attention(dtype, dim, group, one_token=True, splits=8)
        yield attention(dtype, dim, group, one_token=False, splits=1)
    for rest in (0, 64):
        yield attention("bf16", 512 if rest else 128, 16, one_token=True, splits=8, rest=rest, more=not rest)
        yield attention("bf16", 512 if rest else 128, 16, one_token=False, splits=1, rest=rest, more=not rest)
    pointers = dict.fromkeys(("parts", "tops", "totals", "sinks"), "*fp32") | {"output": "*bf16"}
    yield reduce_kernel, pointers, {"DIM": 128, "DIMS": 128, "SPLITS": 8, "SINKS": True}
    for dtype in ("bf16", "fp32") if every else ("bf16",):
        yield from glue(dtype)
        yield from experts(dtype)
    yield from routing()
    yield draw_kernel, {"logits": "*fp32", "params": "*fp64", "tokens": "*i64"}, {"TILE": 4096}


def compiled(case: Case, capability: int) -> str:
    """Compile one; returns a line about it."""
    kernel, types, constants = case
    names = [param.name for param in kernel.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in types if types[name][0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert "cubin" in made.asm
    assert made.metadata.shared <= SHARED_BYTES[capability], (kernel.__name__, made.metadata.shared)
    return f"{kernel.__name__} sm_{capability}: {made.metadata.shared} bytes of shared memory"


def main() -> None:
    capabilities = [int(argument) for argument in sys.argv[1:]]
    for capability in capabilities:
        for case in cases(every=len(capabilities) > 1):
            print(compiled(case, capability), flush=True)


if __name__ == "__main__":
    main()
