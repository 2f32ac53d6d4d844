"""One property over everything: the same tokens whatever the cache, chunking, batch, memory and preemption.

In fp64, where rounding cannot tip a choice. The reference is each request alone, uncached, in one chunk.
"""

from __future__ import annotations

import atexit
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.registry import registry
from sagellm.core.types import Request, RequestOutput, SamplingParams, Tokens
from sagellm.engines.build_kv import build_kv, build_tiers
from sagellm.engines.engine import Engine
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.speculation import Speculation
from sagellm.kvmgr.scheduler_ir import PassPipeline
from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from tests.builders import PreemptAtRandom, load_always, run_all
from tests.effort import examples, usual
from tests.tiny_models import DISTINCT, RECURRENT, TINY_MODELS, VOCAB, save_tiny

BLOCK = 4
MAX_LEN = 96
HOST_BYTES = 1 << 18
THINK = random.Random(0).randrange(3, VOCAB)
"""The first token of prompts of family 0, so that reasoning is open at their end."""
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    SamplingParams(temperature=1.1, seed=5),
    SamplingParams(temperature=0.9, seed=6, top_k=20, top_p=0.9, min_p=0.01, logit_bias={7: 2.0}),
    SamplingParams(temperature=1.0),  # the seed comes from the engine's and the request's name
    SamplingParams(temperature=1.2, seed=7, max_reasoning_tokens=2, reasoning_token_ids=(THINK, 4)),
    SamplingParams(temperature=0.0, max_reasoning_tokens=1, reasoning_token_ids=(THINK, 4)),
    SamplingParams(
        temperature=1.0,
        seed=8,
        soft_reasoning_tokens=1,
        soft_reasoning_slope=2.0,
        reasoning_token_ids=(THINK, 4),
    ),
)


@cache
def backend(name: str, reference: bool) -> NativeBackend:
    """One for the reference and one for the engines under test: a backend belongs to one engine."""
    folder = Path(mkdtemp(prefix="sagellm-"))
    atexit.register(rmtree, folder)
    save_tiny(folder, name)
    return NativeBackend(
        folder, device="cpu", dtype="float64", block_size=BLOCK, num_blocks=128, max_num_seqs=5,
        max_model_len=MAX_LEN, threads=1,
    )  # fmt: skip


def engine(
    name: str,
    num_blocks: int,
    budget: int,
    passes: Sequence[SchedulerPass],
    *,
    caching: bool,
    reference: bool = False,
    eviction: str = "adaptive",
    overlap: bool = False,
    speculation: Speculation | None = None,
) -> Engine:
    clock = ManualClock()
    config = KVConfig(block_size=BLOCK, prefix_caching=caching, eviction=eviction, checkpoint_interval=BLOCK)
    capability = backend(name, reference).capability()
    schema = backend(name, reference).get_kv_schema()
    has_tiers = caching and not reference
    has_tiers = has_tiers and not (capability.sliding_window or schema.groups or schema.state_bytes)
    below = KVConfig(block_size=BLOCK, eviction=eviction, host_gb=HOST_BYTES / 2**30)
    kv = build_kv(
        config,
        num_blocks * schema.num_groups,
        groups=schema.groups,
        state_pages=schema.state_pages,
        max_chunk=budget,
        tiers=build_tiers(below, backend(name, reference), clock) if has_tiers else None,
        prefill_token_s=capability.prefill_token_s,
        clock=clock,
    )
    load_always(kv)
    pools = backend(name, reference)._kv
    for pool in (*pools.keys, *pools.values):  # whatever an earlier owner left behind must not be read
        pool.fill_(math.nan)
    return Engine(
        backend(name, reference),
        kv,
        PassPipeline(passes),
        max_batched_tokens=budget,
        overlap=overlap,
        speculation=speculation,
        clock=clock,
    )


def prompt(family: int, length: int, seed: int) -> list[int]:
    """Families share their first 12 tokens."""
    shared, own = random.Random(family), random.Random(seed)
    tokens = [shared.randrange(3, VOCAB) for _ in range(12)] + [
        own.randrange(3, VOCAB) for _ in range(length)
    ]
    return tokens[:length]


@cache
def alone(
    name: str, tokens: tuple[int, ...], max_tokens: int, sampling: int, request_id: str
) -> tuple[int, ...]:
    """The reference: one request, one chunk, no cache."""
    single = engine(name, 128, 1024, [], caching=False, reference=True)
    params = replace(SAMPLING[sampling], max_tokens=max_tokens)
    single.add(Request(request_id, Tokens(tokens), params))
    return tuple(run_all(single)[request_id])


@dataclass(frozen=True)
class Traffic:
    """Requests, and an engine that is short of everything.

    `specs`: the family, length, seed, most tokens and sampling of each. `stagger`: steps behind each.
    """

    specs: Sequence[tuple[int, int, int, int, int]]
    num_blocks: int
    budget: int
    chunk: int | None
    caching: bool
    preempt: float
    seed: int
    stagger: int

    def engine(self, name: str, *, overlap: bool = False, speculation: Speculation | None = None) -> Engine:
        preempting = PreemptAtRandom(self.seed, self.preempt, 6)
        passes: list[SchedulerPass] = [PrefixCacheAwarePass(), PriorityBasedPass(), preempting]
        passes.append(ChunkedPrefillPass(self.chunk))
        return engine(
            name, self.num_blocks, self.budget, passes, caching=self.caching, overlap=overlap,
            speculation=speculation,
        )  # fmt: skip

    def compare(
        self, busy: Engine, name: str, num_turns: int, expected: dict[str, tuple[int, ...]],
        add: Callable[[Request, int], None], then: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Check that each request gets the tokens that it gets alone. A second turn finds the first's KV.

        `add` adds a request, with the number of its sampling; `then` is called behind its steps. `expected`
        gets the answer of each request before it is added.
        """
        got: dict[str, list[int]] = {}
        for turn in range(num_turns):
            for index, (family, length, own, max_tokens, sampling) in enumerate(self.specs):
                request_id, tokens = f"{index}.{turn}", prompt(family, length, own)
                tokens += expected[f"{index}.0"] if turn else ()
                expected[request_id] = alone(name, tuple(tokens), max_tokens, sampling, request_id)
                params, group = replace(SAMPLING[sampling], max_tokens=max_tokens), f"family {family}"
                add(Request(request_id, Tokens(tokens), params, arrival_s=index, group=group), sampling)
                for _ in range(self.stagger):
                    for output in busy.step():
                        got.setdefault(output.request_id, []).extend(output.new_token_ids)
                then()
            for request_id, new in run_all(busy).items():
                got.setdefault(request_id, []).extend(new)
        assert {request_id: tuple(tokens) for request_id, tokens in got.items()} == expected
        assert busy.kv.block_states().active == 0


traffics = st.builds(
    Traffic,
    specs=st.lists(
        st.tuples(
            st.integers(0, 1), st.integers(1, 40), st.integers(0, 3), st.integers(1, 10), st.integers(0, 6)
        ),
        min_size=1,
        max_size=6,
    ),
    num_blocks=st.integers(15, 60),  # the longest request has 60 tokens in its second turn
    budget=st.integers(3, 64),
    chunk=st.one_of(st.none(), st.integers(1, 17)),
    caching=st.booleans(),
    preempt=st.sampled_from([0.0, 0.15]),
    seed=st.integers(0, 99),
    stagger=st.integers(0, 2),
)


@settings(max_examples=examples(60))
@given(
    name=st.sampled_from(sorted(TINY_MODELS)),
    traffic=traffics,
    num_turns=st.integers(1, 2),
    grouped=st.booleans(),
    compact=st.booleans(),
)
def test_same_tokens_whatever_happens(
    name: str, traffic: Traffic, num_turns: int, grouped: bool, compact: bool
) -> None:
    busy = traffic.engine(name)

    def add(request: Request, _: int) -> None:
        busy.add(request if grouped else replace(request, group=None))
        if compact:
            busy.compact()

    traffic.compare(busy, name, num_turns, {}, add)


@pytest.mark.parametrize("policy", registry("policy").names())
def test_the_same_tokens_with_every_policy(policy: str) -> None:
    """A pool of 24 blocks, 12 conversations of three turns that hardly fit: something is evicted all the
    time."""
    passes: list[SchedulerPass] = [PrefixCacheAwarePass(), PriorityBasedPass(), ChunkedPrefillPass()]
    name = "llama"
    busy = engine(name, 24, 32, passes, caching=True, eviction=policy)
    assert isinstance(busy.clock, ManualClock)
    histories = [prompt(number % 2, 14 + number, number) for number in range(12)]
    for turn in range(3):
        for number, history in enumerate(histories):
            request_id = f"{number}.{turn}"
            busy.add(Request(request_id, Tokens(history), replace(SAMPLING[0], max_tokens=5)))
            busy.clock.advance(1.0)
            if number % 3 == 2:
                for done, tokens in run_all(busy).items():
                    row = int(done.split(".")[0])
                    assert tuple(tokens) == alone(name, tuple(histories[row]), 5, 0, done)
                    histories[row] = [*histories[row], *tokens, 3 + turn]
    stats = busy.stats()
    assert stats.blocks_active == 0
    assert stats.reuse is not None
    assert stats.reuse.num_hit_blocks > 0


@pytest.mark.parametrize("name", usual(DISTINCT, sorted(TINY_MODELS)))
def test_a_second_turn_reuses_generated_tokens(name: str) -> None:
    chat = engine(name, 512, 64, [], caching=True)
    first = prompt(0, 21, 1)
    chat.add(Request("first", Tokens(first), SamplingParams(temperature=0.0, max_tokens=12)))
    history = first + run_all(chat)["first"] + [5, 6, 7]
    chat.add(Request("second", Tokens(history), SamplingParams(temperature=0.0, max_tokens=6)))
    outputs: list[RequestOutput] = []
    while chat.has_work():
        outputs.extend(chat.step())
    num_computed = 21 + 12 - 1
    if name in RECURRENT:  # a state is kept when the next token is computed
        num_computed -= 1
    assert outputs[0].num_cached_tokens == num_computed // BLOCK * BLOCK
    assert tuple(t for o in outputs for t in o.new_token_ids) == alone(name, tuple(history), 6, 0, "second")
