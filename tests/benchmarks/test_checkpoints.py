"""Replays of checkpoints: against a slow twin, the bound, an exhaustive search, and golden figures."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.benchmarks.checkpoints.bound import upper_bound
from sagellm.benchmarks.checkpoints.cache import HybridCache
from sagellm.benchmarks.checkpoints.groups import PRESETS, KVGroups, parse_groups
from sagellm.benchmarks.checkpoints.keepers import Keeper, ValueKeeper
from sagellm.benchmarks.checkpoints.replayer import (
    GIB,
    CheckpointPlan,
    budget,
    keeper,
    run_checkpoints,
    serve_all,
)
from sagellm.benchmarks.checkpoints.rules import RULES, Served, rule
from sagellm.benchmarks.checkpoints.tree import paths
from sagellm.benchmarks.replay.block_trace import BlockTrace, block_trace
from sagellm.benchmarks.traces import Trace, TraceRequest, read_trace
from sagellm.core.errors import ConfigError
from sagellm.core.types import Namespace, Tokens
from tests.effort import examples

GOLDEN = Path(__file__).parents[1] / "golden" / "traces"
GROUPS = KVGroups(attention_bytes=1, state_bytes=6)
"""With blocks of 2 tokens, a checkpoint has the bytes of three blocks."""
Prompt = tuple[int, ...]


def made(prompts: list[Prompt]) -> BlockTrace:
    """Blocks of 2 tokens, and one token more in each prompt; equal prefixes have equal ids."""
    numbers: dict[Prompt, int] = {}
    requests = []
    for place, prompt in enumerate(prompts):
        heads = [prompt[:length] for length in range(1, len(prompt) + 1)]
        ids = Tokens([numbers.setdefault(head, len(numbers)) for head in heads])
        requests.append(TraceRequest(float(7 * place), ids, Namespace(""), 2 * len(prompt) + 1, 1))
    return block_trace(Trace("t", "made", 2, tuple(requests)))


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), min_size=1, max_size=14)


# -- the slow twin: sets of prefixes


class Twin:
    """A cache as two sets of prefixes, blocks by their path and checkpoints, both in order of use.

    `covered`: a block goes when no checkpoint needs it (`CheckpointLRU`), else by its own use (`BlockLRU`).
    """

    def __init__(self, name: str, *, covered: bool) -> None:
        self.rule, self.covered = rule(name), covered
        self.most = 3 if name == "three-per-path" else None
        self.blocks: dict[Prompt, int] = {}
        self.checkpoints: dict[Prompt, tuple[int, int]] = {}
        self.known: set[Prompt] = set()
        self.now = 0

    def serve(self, prompt: Prompt, budget_bytes: float) -> int:
        self.now += 1
        heads = [prompt[:length] for length in range(1, len(prompt) + 1)]
        reused = max((len(head) for head in heads if head in self.checkpoints), default=0)
        resident = sum(head in self.blocks for head in heads)
        known = sum(head in self.known for head in heads)
        self.known.update(heads)
        self.blocks.update(dict.fromkeys(heads, self.now))
        wanted = self.rule(Served(reused, resident, known, len(prompt), 2))
        for order, depth in enumerate(([reused] if reused else []) + wanted):
            self.checkpoints[prompt[:depth]] = (self.now, order if self.covered else -depth)
        if self.most is not None:
            self._cap([head for head in heads if head in self.checkpoints], self.most)
        self._tidy()
        while 2 * len(self.blocks) + 6 * len(self.checkpoints) > budget_bytes:
            self._evict()
            self._tidy()
        return reused

    def _cap(self, heads: list[Prompt], most: int) -> None:
        excess = len(heads) - most
        for head in heads[:-1]:
            children = [block for block in self.blocks if block[:-1] == head]
            if excess > 0 and len(children) < 2:
                del self.checkpoints[head]
                excess -= 1
                self._tidy()

    def _tidy(self) -> None:
        if self.covered:
            needed = {head[:length] for head in self.checkpoints for length in range(1, len(head) + 1)}
            self.blocks = {block: use for block, use in self.blocks.items() if block in needed}

    def _evict(self) -> None:
        if self.covered:
            del self.checkpoints[min(self.checkpoints, key=lambda head: self.checkpoints[head])]
            return
        tails = [block for block in self.blocks if not any(other[:-1] == block for other in self.blocks)]
        queue = [(self.blocks[tail], -len(tail), True, tail) for tail in tails]
        queue += [(use, order, False, head) for head, (use, order) in self.checkpoints.items()]
        _, _, is_block, head = min(queue)
        if is_block:
            del self.blocks[head]
        self.checkpoints.pop(head, None)


def replayed(trace: BlockTrace, name: str, budget_bytes: float) -> list[int]:
    """Blocks that each request reuses; checks the cache after each."""
    hits = []
    kept: list[Keeper] = []

    def make(cache: HybridCache) -> Keeper:
        kept.append(keeper(name, cache))
        return kept[0]

    for served, cache in serve_all(trace, GROUPS, budget_bytes, make):
        hits.append(served.num_reused)
        assert cache.used_bytes <= budget_bytes
        cache.check()
        if isinstance(kept[0], ValueKeeper):
            kept[0].retention.check()
            assert len(kept[0].retention) == len(cache.checkpoints)
    return hits


@pytest.mark.parametrize("name", [*RULES, "every-4"])
@settings(max_examples=examples(100))
@given(prompts=PROMPTS, budget_bytes=st.integers(0, 120))
def test_rules_reuse_what_the_slow_twin_reuses(name: str, prompts: list[Prompt], budget_bytes: int) -> None:
    twin = Twin(name, covered=name != "vllm-sparse")
    assert replayed(made(prompts), name, budget_bytes) == [twin.serve(one, budget_bytes) for one in prompts]


@settings(max_examples=examples(100))
@given(prompts=PROMPTS)
def test_every_policy_in_unlimited_memory_reuses_at_most_what_dense_reuses(prompts: list[Prompt]) -> None:
    trace = made(prompts)
    most = replayed(trace, "dense", 1e9)
    twin = Twin("dense", covered=True)
    assert most == [twin.serve(prompt, 1e9) for prompt in prompts]
    for name in ("value", *RULES):
        assert all(hit <= best for hit, best in zip(replayed(trace, name, 1e9), most, strict=True)), name


# -- the bound


@settings(max_examples=examples(100))
@given(prompts=PROMPTS, budget_bytes=st.integers(1, 120))
def test_no_policy_exceeds_the_bound(prompts: list[Prompt], budget_bytes: int) -> None:
    trace = made(prompts)
    most = upper_bound(paths(trace), GROUPS, 2, budget_bytes)
    for name in ("value", *RULES, "every-4"):
        assert 2 * sum(_hits(trace, name, budget_bytes)) <= most + 1e-6, name


def _hits(trace: BlockTrace, name: str, budget_bytes: float) -> list[int]:
    return [
        served.num_reused
        for served, _ in serve_all(trace, GROUPS, budget_bytes, lambda cache: keeper(name, cache))
    ]


@settings(max_examples=examples(40), deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4),
    budget_bytes=st.integers(1, 40),
)
def test_the_bound_is_not_below_an_exhaustive_search(prompts: list[Prompt], budget_bytes: int) -> None:
    most = upper_bound(paths(made(prompts)), GROUPS, 2, budget_bytes)
    best = 2 * exhaustive(prompts, budget_bytes)
    assert best <= most + 1e-6
    for name in ("value", *RULES):
        assert 2 * sum(_hits(made(prompts), name, budget_bytes)) <= best


def exhaustive(prompts: list[Prompt], budget_bytes: int) -> int:
    """The most blocks that any choice of checkpoints reuses; each keeps the blocks in front of it."""
    states: dict[frozenset[Prompt], int] = {frozenset(): 0}
    for prompt in prompts:
        after: dict[frozenset[Prompt], int] = {}
        for kept, hits in states.items():
            reused = max((len(head) for head in kept if prompt[: len(head)] == head), default=0)
            fresh = {prompt[:length] for length in range(reused + 1, len(prompt) + 1)}
            for size in range(len(kept | fresh) + 1):
                for chosen in map(frozenset, itertools.combinations(kept | fresh, size)):
                    blocks = {head[:length] for head in chosen for length in range(1, len(head) + 1)}
                    if 2 * len(blocks) + 6 * len(chosen) <= budget_bytes:
                        after[chosen] = max(after.get(chosen, 0), hits + reused)
        states = after
    return max(states.values())


# -- golden figures

FIGURES = {
    ("chat", "10%"): {
        "dense": 9_600,
        "prompt-end": 10_304,
        "junctions": 28_736,
        "every-4096": 10_304,
        "vllm-sparse": 28_352,
        "three-per-path": 23_360,
        "value": 41_728,
    },
    ("chat", "50%"): {
        "dense": 20_736,
        "prompt-end": 93_952,
        "junctions": 127_616,
        "every-4096": 93_952,
        "vllm-sparse": 133_312,
        "three-per-path": 133_632,
        "value": 147_520,
    },
    ("agents", "10%"): {
        "dense": 4_167_680,
        "prompt-end": 4_997_120,
        "junctions": 5_159_936,
        "every-4096": 4_904_960,
        "vllm-sparse": 5_497_856,
        "three-per-path": 5_090_304,
        "value": 6_096_896,
    },
    ("agents", "50%"): {
        "dense": 9_264_128,
        "prompt-end": 9_280_512,
        "junctions": 8_872_960,
        "every-4096": 9_313_280,
        "vllm-sparse": 9_289_728,
        "three-per-path": 9_306_112,
        "value": 9_291_776,
    },
}


@pytest.mark.parametrize(("name", "capacity"), FIGURES)
def test_policies_reuse_what_they_reused_before(name: str, capacity: str) -> None:
    known = FIGURES[name, capacity]
    trace = block_trace(read_trace(GOLDEN / f"{name}.jsonl"))
    plan = CheckpointPlan(PRESETS["qwen3-next"], tuple(known), (capacity,))
    assert {result.policy: result.hit_tokens for result in run_checkpoints(trace, plan)} == known
    bound = run_checkpoints(trace, replace(plan, policies=("bound",)))[0]
    assert max(known.values()) <= bound.hit_tokens <= bound.tokens


@pytest.mark.traces
def test_value_saves_more_than_the_rules_of_engines(sagellm_traces: Path) -> None:
    trace = block_trace(read_trace(sagellm_traces / "mooncake_synthetic_first_half.jsonl.xz"))
    plan = CheckpointPlan(PRESETS["qwen3-next"], ("vllm-sparse", "three-per-path", "value"), ("10%",))
    sparse, capped, ours = run_checkpoints(trace, plan)
    assert ours.hit_tokens > 1.5 * max(sparse.hit_tokens, capped.hit_tokens)


# -- options


def test_presets_have_the_bytes_of_the_published_shapes() -> None:
    assert PRESETS["qwen3-next"] == KVGroups(24_576, 77_266_944)
    assert PRESETS["nemotron-h"] == KVGroups(16_384, 102_137_856)


def test_a_checkpoint_holds_the_window() -> None:
    groups = parse_groups("attention_bytes=4,state_bytes=10,window_tokens=8,window_bytes=2")
    assert (groups.checkpoint_bytes(3), groups.checkpoint_bytes(100)) == (16, 26)


@pytest.mark.parametrize("text", ["qwen", "state_bytes=1", "attention_bytes=x,state_bytes=1", "a=1,b"])
def test_other_groups_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="qwen3-next"):
        parse_groups(text)


def test_negative_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match="bytes"):
        KVGroups(0, 1)


def test_budgets_are_shares_gib_or_unlimited() -> None:
    trace = made([(0, 1, 2), (0, 1, 1)])
    assert budget("50%", trace, GROUPS) == 4 * 2 / 2
    assert budget("2GiB", trace, GROUPS) == 2 * GIB
    assert budget("unlimited", trace, GROUPS) == float("inf")
    for text in ("", "5", "0%", "xGiB", "inf%"):
        with pytest.raises(ConfigError, match="GiB"):
            budget(text, trace, GROUPS)


def test_unknown_rules_are_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"vllm-sparse.*value, bound"):
        rule("every-0")
    with pytest.raises(ConfigError, match="warm-up"):
        run_checkpoints(made([(0,), (0,)]), CheckpointPlan(GROUPS, ("bound",), ("50%",), warmup="50%"))
