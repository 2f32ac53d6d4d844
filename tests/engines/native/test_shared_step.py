"""Prompts admitted in one step read KV that is written in the same step."""

from __future__ import annotations

import math

from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build_kv import build_kv
from sagellm.engines.engine import Engine
from sagellm.kvmgr.scheduler_ir import PassPipeline
from sagellm.kvmgr.scheduler_ir.passes.vllm_like import VllmLikePass
from tests.builders import run_all
from tests.engines.native.test_same_tokens import BLOCK, backend, prompt

LENGTHS = {"a": 23, "b": 9, "c": 2, "d": 23}


def answers(*, together: bool) -> dict[str, list[int]]:
    """Of prompts that begin alike: in one step that shares, or each alone and uncached. Blocks hold NaN
    before they are written."""
    clock = ManualClock()
    kv = build_kv(
        KVConfig(block_size=BLOCK, prefix_caching=together, index_as_computed=together, eviction="lru"),
        64,
        clock=clock,
    )
    device = backend("llama", not together)
    for pool in (*device._kv.keys, *device._kv.values):
        pool.fill_(math.nan)
    engine = Engine(device, kv, PassPipeline([VllmLikePass()]), max_batched_tokens=64, clock=clock)
    got: dict[str, list[int]] = {}
    for seed, (name, length) in enumerate(LENGTHS.items()):
        tokens = Tokens(prompt(1, length, seed % 3))
        engine.add(Request(name, tokens, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)))
        if not together:
            got |= run_all(engine)
    if together:
        all_tokens = sum(12 + length for length in LENGTHS.values())
        got |= {one.request_id: list(one.new_token_ids) for one in engine.step()}
        assert engine.last_plan is not None
        assert len(engine.last_plan.prefills) == len(LENGTHS)
        assert engine.last_plan.num_prefill_tokens < all_tokens - 3 * 12 + 1
        for name, rest in run_all(engine).items():
            got[name] += rest
    return got


def test_the_same_tokens() -> None:
    assert answers(together=True) == answers(together=False)
