"""The sweep: what it runs, how it counts, and that it checks itself."""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path
from typing import Any

import pytest

from sagellm.benchmarks.replay import sweep
from sagellm.benchmarks.replay.block_trace import BlockTrace, block_trace
from sagellm.benchmarks.replay.replayer import check_bound, first_counted, measure, replay
from sagellm.benchmarks.replay.sweep import (
    NUM_MOMENTS,
    CacheCapacity,
    ReplayCase,
    ReplaySweepPlan,
    capacity,
    run_sweep,
    total,
)
from sagellm.benchmarks.traces import Trace, TraceRequest, read_trace
from sagellm.core.errors import BookkeepingError, ConfigError, UnknownNameError
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.prefix_cache.attribution import MissAttribution

GOLDEN = Path(__file__).parents[1] / "golden" / "traces"


def trace(
    *prompts: list[int], block_tokens: int = 4, tenants: str = "", lengths: tuple[int, ...] = ()
) -> Trace:
    """A request per second; a prompt's tokens fill its blocks unless `lengths` says otherwise."""
    requests = tuple(
        TraceRequest(
            time_s=10.0 + number,
            ids=Tokens(ids),
            namespace=Namespace(tenants[number] if tenants else ""),
            num_input_tokens=lengths[number] if lengths else len(ids) * block_tokens,
            num_output_tokens=1,
        )
        for number, ids in enumerate(prompts)
    )
    return Trace("t", "made", block_tokens, requests)


@pytest.fixture(scope="module")
def chat() -> BlockTrace:
    return block_trace(read_trace(GOLDEN / "chat.jsonl"))


# -- blocks


def test_ids_mean_blocks_within_a_namespace_and_behind_the_same_blocks() -> None:
    made = block_trace(trace([7, 8], [7, 8, 9], [7, 8], [9, 8], tenants="aaba"))
    assert [request.ids.tolist() for request in made.requests] == [[0, 1], [0, 1, 2], [3, 4], [5, 6]]
    assert (made.num_blocks, made.num_unique, made.longest) == (9, 7, 3)
    assert list(made.bound) == [0, 2, 0, 0]
    assert made.infinite_ratio == 2 / 9
    assert not made.across_namespaces


def test_tokens_become_blocks_by_content_the_same_in_all_namespaces() -> None:
    made = block_trace(trace([1, 2, 3], [1, 2, 3, 4], [1, 2], block_tokens=1, tenants="aab"), 2)
    assert [request.ids.tolist() for request in made.requests] == [[0, 1], [0, 2], [0]]
    assert (made.block_tokens, made.num_unique, list(made.bound)) == (2, 4, [0, 1, 0])
    assert made.across_namespaces


def test_a_trace_of_lengths_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs block ids or tokens"):
        block_trace(trace([], lengths=(100,)))


def test_the_bound_of_short_prompts_is_lower() -> None:
    made = block_trace(trace([1, 2, 3], [1, 2, 3, 4]))
    assert (list(made.bound_at(2)), list(made.bound_at(4))) == ([0, 2], [0, 3])


# -- counting


def test_measures_count_the_tokens_of_a_partial_block_as_they_are() -> None:
    made = block_trace(trace([1, 2], [1, 2, 3], lengths=(7, 9)))
    plan = ReplaySweepPlan(("lru",), seconds_per_token=2.0, seconds_per_token_squared=1.0)
    found = measure(made, [0, 2], 0, plan.cost())
    assert (found.requests, found.hit_requests, found.blocks, found.hit_blocks) == (2, 1, 5, 2)
    assert (found.tokens, found.hit_tokens) == (16, 8)
    assert found.prefill_s == (7 * 2 + 21) + (9 * 2 + 36)
    assert found.saved_s == 8 * 2 + 28
    assert measure(made, [0, 3], 1, plan.cost()).hit_tokens == 9


@pytest.mark.parametrize(
    ("warmup", "first"), [("0%", 0), ("50%", 2), ("30%", 1), ("0", 0), ("2", 2), ("0.5s", 1)]
)
def test_warm_up(warmup: str, first: int) -> None:
    assert first_counted(block_trace(trace([1], [2], [3], [4])), warmup) == first


@pytest.mark.parametrize("warmup", ["100%", "9", "-1%", "x", "", "nan", "inf%"])
def test_warm_up_that_is_refused(warmup: str) -> None:
    with pytest.raises(ConfigError, match="warm-up"):
        first_counted(block_trace(trace([1], [2])), warmup)


def test_the_warm_up_is_replayed_and_not_counted(chat: BlockTrace) -> None:
    [whole] = run_sweep(chat, ReplaySweepPlan(("lru",), ("20%",)))
    [later] = run_sweep(chat, ReplaySweepPlan(("lru",), ("20%",), warmup="50%"))
    assert later.measures.requests == len(chat.requests) - len(chat.requests) // 2
    assert later.num_evicted == whole.num_evicted
    assert later.measures.blocks < whole.measures.blocks
    assert 0 < later.measures.hit_blocks < whole.measures.hit_blocks


def test_more_reuse_than_there_was_is_an_error(chat: BlockTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BookkeepingError, match="request 1 reuses 3 blocks"):
        check_bound([0, 3], [0, 2])
    with pytest.raises(BookkeepingError, match="1 requests were replayed of 2"):
        check_bound([0], [0, 2])

    def too_good(*given: Any) -> Any:
        done = replay(*given)
        return dataclasses.replace(done, hits=array("i", [hit + 1 for hit in done.hits]))

    monkeypatch.setattr(sweep, "replay", too_good)
    with pytest.raises(BookkeepingError, match="request 0 reuses 1 blocks"):
        run_sweep(chat, ReplaySweepPlan(("lru",), ("20%",)))


# -- the plan


@pytest.mark.parametrize(
    ("text", "blocks"), [("1%", 10), ("0.5%", 5), ("0.01%", 1), ("150%", 1500), ("7", 7)]
)
def test_capacity(text: str, blocks: int) -> None:
    assert capacity(text, 1000) == CacheCapacity(text, blocks)


@pytest.mark.parametrize("text", ["0", "0%", "0.0%", "-1%", "-5", "1.5", "x", "", "%", "nan%", "inf%"])
def test_capacity_that_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write blocks from 1 on"):
        capacity(text, 1000)


def test_cases_come_in_order_and_seeds_only_where_they_are_taken(
    chat: BlockTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drawing.py").write_text("def policy(*, capacity, seed=0): raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    plan = ReplaySweepPlan(("lru", "drawing:policy", "optimum", "lru"), ("9", "1%"), (3, 4))
    sizes = [capacity(text, chat.num_unique) for text in plan.capacities]
    assert plan.cases(chat) == [
        *(ReplayCase("lru", size, None) for size in sizes),
        *(ReplayCase("drawing:policy", size, seed) for size in sizes for seed in (3, 4)),
        *(ReplayCase("optimum", size, None) for size in sizes),
    ]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"policies": ("nope",)}, UnknownNameError, "unknown policy 'nope'"),
        ({"policies": ()}, ConfigError, "at least one policy"),
        ({"options": {"arc": {}}}, ConfigError, "options are given for 'arc'"),
        ({"options": {"lru": {"x": 1}}}, ConfigError, "has no option 'x'; it takes none"),
        ({"policies": ("s3fifo",), "options": {"s3fifo": {"x": 1}}}, ConfigError, "it takes small_share"),
        ({"policies": ("arc",), "options": {"arc": {"capacity": 1}}}, ConfigError, "replay itself gives it"),
        ({"policies": ("optimum",), "options": {"optimum": {"x": 1}}}, ConfigError, "has no option 'x'"),
        ({"premature_s": -1.0}, ConfigError, "premature_s"),
        ({"seconds_per_token": -1.0}, ConfigError, "costs in seconds"),
    ],
)
def test_a_plan_is_refused_before_anything_runs(
    chat: BlockTrace, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ReplaySweepPlan(**({"policies": ("lru",)} | given)).cases(chat)


def test_options_reach_the_policy(chat: BlockTrace) -> None:
    [usual] = run_sweep(chat, ReplaySweepPlan(("s3fifo",), ("5%",)))
    [changed] = run_sweep(
        chat, ReplaySweepPlan(("s3fifo",), ("5%",), options={"s3fifo": {"small_share": 0.9}})
    )
    assert usual.measures.hit_blocks != changed.measures.hit_blocks


# -- the sweep


def test_processes_find_what_one_process_finds(chat: BlockTrace) -> None:
    plan, done = ReplaySweepPlan(("lru", "learned", "optimum"), ("2%", "10%")), []
    alone = run_sweep(chat, plan)
    together = run_sweep(chat, plan, jobs=2, on_done=lambda: done.append(1))
    assert len(done) == len(alone) == 6
    for one, other in zip(alone, together, strict=True):
        assert (one.case, one.measures, one.num_evicted) == (other.case, other.measures, other.num_evicted)
        assert (one.of_gap, one.cpu_s is None) == (other.of_gap, other.cpu_s is None)


def test_an_error_in_a_process_is_the_sweeps(chat: BlockTrace) -> None:
    with pytest.raises(ConfigError, match="small_share"):
        run_sweep(
            chat, ReplaySweepPlan(("s3fifo",), ("2%", "3%"), options={"s3fifo": {"small_share": 7}}), jobs=2
        )


def test_the_gap_is_from_lru_to_the_optimum_of_the_same_capacity(chat: BlockTrace) -> None:
    results = run_sweep(chat, ReplaySweepPlan(("lru", "arc", "optimum"), ("2%", "1000%")))
    low, rich_lru, middle, _, high, _ = results
    assert (low.of_gap, high.of_gap, rich_lru.of_gap) == (0.0, 1.0, None)
    between = (middle.block_ratio - low.block_ratio) / (high.block_ratio - low.block_ratio)
    assert middle.of_gap == pytest.approx(between)
    assert run_sweep(chat, ReplaySweepPlan(("lru",), ("2%",)))[0].of_gap is None


def test_speed_is_of_what_was_timed(chat: BlockTrace) -> None:
    timed, best = run_sweep(chat, ReplaySweepPlan(("lru", "optimum"), ("2%",)))
    assert timed.cpu_s is not None
    assert timed.evict_s is not None
    assert 0 < timed.evict_s < timed.cpu_s
    assert timed.num_evicted
    assert timed.us_per_evicted == pytest.approx(1e6 * timed.cpu_s / timed.num_evicted)
    assert timed.accesses_per_s == pytest.approx(chat.num_blocks / timed.cpu_s)
    assert (best.num_evicted, best.us_per_evicted, best.us_in_evict, best.accesses_per_s) == (None,) * 4


@pytest.mark.parametrize("policy", ["lru", "learned"])
def test_every_missing_block_has_a_cause(chat: BlockTrace, policy: str) -> None:
    [plain] = run_sweep(chat, ReplaySweepPlan((policy,), ("5%",)))
    [found] = run_sweep(chat, ReplaySweepPlan((policy,), ("5%",), causes=True, premature_s=30.0))
    assert found.measures == plain.measures
    assert (found.cpu_s, found.us_per_evicted, found.accesses_per_s) == (None, None, None)
    assert found.misses is not None
    assert sum(found.misses) == chat.num_blocks - found.measures.hit_blocks
    assert found.misses.cold == chat.num_blocks - sum(chat.bound)
    assert found.misses.capacity > 0
    assert found.misses.premature > 0
    assert len(found.misses_over_time) == NUM_MOMENTS
    assert total(found.misses_over_time) == found.misses


def test_misses_over_time_show_when_blocks_were_missing() -> None:
    made = block_trace(trace([1], [2, 3], [1], [4, 5, 6]))
    [found] = run_sweep(made, ReplaySweepPlan(("lru",), ("10",), causes=True))
    missing = {moment: sum(misses) for moment, misses in enumerate(found.misses_over_time) if sum(misses)}
    assert missing == {0: 1, NUM_MOMENTS // 3: 2, NUM_MOMENTS - 1: 3}


def test_namespaces_are_a_cause_where_tokens_say_so() -> None:
    made = block_trace(trace([1, 2, 3, 4], [1, 2, 3, 5], block_tokens=1, tenants="ab"), 2)
    [found] = run_sweep(made, ReplaySweepPlan(("lru",), ("10",), causes=True))
    assert found.misses is not None
    assert (found.misses.cold, found.misses.namespace) == (3, 1)


def test_a_block_that_was_known_is_never_called_cold(
    chat: BlockTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(*given: Any, **options: Any) -> MissAttribution:
        return MissAttribution(*given, **(options | {"max_ghosts": 10}))

    monkeypatch.setattr(sweep, "MissAttribution", forgetful)
    with pytest.raises(BookkeepingError, match="were computed before; their causes are"):
        run_sweep(chat, ReplaySweepPlan(("lru",), ("5%",), causes=True))


def test_a_prompt_longer_than_the_capacity() -> None:
    made = block_trace(trace([1, 2, 3], [1, 2, 3], [4], [1, 2, 3]))
    results = run_sweep(made, ReplaySweepPlan(("lru", "optimum"), ("2",), causes=True))
    assert [one.measures.hit_blocks for one in results] == [3, 3]
    assert results[0].misses == (3, 0, 1, 0, 0, 0)
