"""Native engines with tiers, and prompts that evict each other: what tests of them share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from sagellm.core.protocols.eviction import Extent
from sagellm.core.protocols.kv_tiers import BlockBytes
from sagellm.core.types import Namespace, Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import Engine
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager

BLOCK, NUM_BLOCKS, LENGTH = 4, 20, 61
WHOLE = LENGTH // BLOCK * BLOCK
"""Tokens in whole blocks of a prompt."""


def engine(folder: Path, **settings: Any) -> Engine:
    given = {
        "model.name": str(folder), "model.dtype": "float32", "kv.block_size": BLOCK,
        "kv.num_blocks": NUM_BLOCKS, "engine.threads": 1, **settings,
    }  # fmt: skip
    made = build_engine(load_config(cli=given, environ={}).config)
    if made.kv.tiers is not None:
        hierarchy(made)._costs = Costly()
    return made


def computed_in(dtype: str) -> dict[str, Any]:
    """Settings for weights, numbers and KV of this dtype; the fastest on this CPU may be another."""
    return {"model.dtype": dtype, "engine.backend_options": {"compute_dtype": dtype}}


def prompts(seed: int = 0, count: int = 4) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 90) for _ in range(LENGTH)] for _ in range(count)]


def ask(asked: Engine, name: str, prompt: list[int]) -> tuple[list[int], int]:
    """The greedy tokens, and how many tokens of the prompt were reused."""
    asked.add(Request(name, Tokens(prompt), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
    drawn: list[int] = []
    num_cached = 0
    while asked.has_work():
        for output in asked.step():
            drawn += output.new_token_ids
            num_cached = max(num_cached, output.num_cached_tokens or 0)
            assert output.error is None
        asked.check()
    return drawn, num_cached


def kv_of(asked: Engine, prompt: list[int]) -> torch.Tensor:
    """The KV of a prompt's whole blocks on the device: a row of numbers for each block."""
    index, schema = asked.kv.index, asked.backend.get_kv_schema()
    hit = index.lookup(Tokens(prompt), Namespace(), WHOLE)
    assert hit.num_tokens == WHOLE
    backend: Any = asked.backend
    source: BlockBytes = backend.kv_bytes()
    data = bytearray(hit.num_blocks * source.bytes_per_block)
    source.read_blocks(index.block_ids(hit), memoryview(data))
    return torch.frombuffer(data, dtype=getattr(torch, schema.dtype)).view(hit.num_blocks, -1)


class Costly:
    """Computing takes longer than any load: these models are so small that it would not."""

    def recompute_s(self, extent: Extent) -> float:
        return 1e9

    def transfer_s(self, extent: Extent, tier: str) -> float:
        return 0.0


def hierarchy(asked: Engine) -> HierarchyManager:
    assert isinstance(asked.kv.tiers, HierarchyManager)
    return asked.kv.tiers
