"""The micro benchmarks at tiny sizes: every row is there, and the JSON has its form. No time is asserted."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from rich.console import Console

from sagellm.benchmarks import process
from sagellm.benchmarks.engine.shapes import SHAPES
from sagellm.benchmarks.micro import (
    acceptance,
    collectives,
    cot,
    interconnect,
    kv_bytes,
    kv_pool,
    kv_tiers,
    kv_transfer,
    kv_transfer_codecs,
    kv_transfer_plain,
    memory,
    overlap,
    parallel,
    prefix_cache,
    router,
    scheduler_ir,
    speculative,
)
from sagellm.benchmarks.micro._kv import Prompts, allocate, cached_prompt, pool_and_index
from sagellm.benchmarks.micro.cases import (
    MicroBenchCell,
    MicroBenchmark,
    MicroBenchPlan,
    MicroBenchRow,
    Stopwatch,
    TimedOperation,
)
from sagellm.benchmarks.micro.peers import COMPARABLE
from sagellm.benchmarks.micro.run import FORMAT, MicroBenchReport, run, tables
from sagellm.benchmarks.reporting import cpu_model, environment
from sagellm.core.errors import BookkeepingError, CapacityError, ConfigError, UnknownNameError
from sagellm.core.registry import registry
from sagellm.kvmgr.kv_pool.tiers.codecs import CODECS
from tests.effort import usual

pytestmark = pytest.mark.usefixtures("no_collections")

DAY = datetime(2026, 11, 20, 12, tzinfo=UTC)
SIZES, BLOCKS, EVICTIONS = (64, 128), (2, 8), (1, 4)
INDEXES = tuple(registry("index").names())
POOLS = tuple(registry("pool").names())
HITS = {
    prefix_cache.ONE_EDGE,
    prefix_cache.PATH,
    prefix_cache.GATHER,
    prefix_cache.TO_BYTES,
    prefix_cache.FROM_LIST,
}
MISSES = {prefix_cache.MISS, prefix_cache.HALF, prefix_cache.GATHER_HALF}
INSERTS = {prefix_cache.INSERT, prefix_cache.INSERT_EVICTING}
METADATA = {memory.EMPTY, memory.CACHED, memory.TOTAL}
OPERATIONS = {
    case + quota for case in (kv_pool.ALLOCATE, kv_pool.FREE, kv_pool.GROW) for quota in ("", ", with quota")
}


def tiny(*variants: str) -> MicroBenchPlan:
    return MicroBenchPlan(
        variants,
        sizes=SIZES,
        allocations=BLOCKS,
        evictions=EVICTIONS,
        large_pool=64,
        memory_blocks=256,
        paths=(64,),
        moved_mb=32,
        buffers_kb=(1, 20),
        rounds=1,
        repeats=2,
    )


def measured(benchmark: MicroBenchmark, sections: str, plan: MicroBenchPlan) -> MicroBenchReport:
    report = MicroBenchReport(benchmark.name, environment(DAY), plan)
    run(benchmark, report, sections)
    return report


def cells(rows: list[MicroBenchRow]) -> set[tuple[str, str, int]]:
    return {(row.variant, row.case, row.size) for row in rows}


@pytest.mark.parametrize(("section", "cases"), [("a", HITS), ("b", MISSES), ("c", INSERTS)])
def test_prefix_cache_has_every_row(section: str, cases: set[str]) -> None:
    rows = measured(prefix_cache.BENCHMARK, section, tiny(*INDEXES)).rows
    expected = {(index, case, size) for index in INDEXES for case in cases for size in SIZES}
    assert cells(rows) == expected
    assert len(rows) == len(expected)
    for row in rows:
        check_timed(row, section)


def test_kv_pool_has_every_row() -> None:
    rows = measured(kv_pool.BENCHMARK, "d", tiny(*POOLS)).rows
    sizes = dict.fromkeys((*OPERATIONS, kv_pool.EVICT), BLOCKS) | {kv_pool.EVICT_LARGE: EVICTIONS}
    expected = {(pool, case, size) for pool in POOLS for case, of in sizes.items() for size in of}
    assert cells(rows) == expected
    assert len(rows) == len(expected)
    for row in rows:
        check_timed(row, "d")


def test_tiers_have_every_row() -> None:
    rows = measured(kv_pool.BENCHMARK, "t", tiny(*POOLS)).rows
    cases = {
        kv_tiers.OFFER_KNOWN, kv_tiers.OFFER_NEW, kv_tiers.REQUEST_MISS, kv_tiers.REQUEST_HIT,
        kv_tiers.POLL_IDLE, kv_tiers.POLL_STORED, kv_tiers.POLL_LOADED,
    }  # fmt: skip
    assert cells(rows) == {(pool, case, 64) for pool in POOLS for case in cases}
    for row in rows:
        check_timed(row, "t")


def test_bytes_are_moved_beside_their_references() -> None:
    rows = measured(kv_pool.BENCHMARK, "m", tiny("free_list")).rows
    host = {kv_bytes.HOST_WRITE, kv_bytes.HOST_READ, kv_bytes.COPY_TO, kv_bytes.COPY_FROM}
    disk = {kv_bytes.WRITE, kv_bytes.READ, kv_bytes.RAW_WRITE, kv_bytes.RAW_READ}
    assert cells(rows) == {("host", case, 32) for case in host} | {("disk", case, 32) for case in disk}
    assert all((row.unit, row.timing) == ("GB/s", None) and row.value > 0 for row in rows)


@pytest.mark.parametrize("section", usual({"p"}, ["p", "d"]))
def test_ranks_have_every_row_beside_threads(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "SHAPE", "tiny")
    plan = dataclasses.replace(tiny("torch_distributed"), lengths=(32,), layers=1)
    rows = measured(parallel.BENCHMARK, section, plan).rows
    case, sizes = (parallel.PREFILL, (32,)) if section == "p" else (parallel.DECODE, (1, 8))
    names = (parallel.WHOLE, parallel.RANKS, parallel.RATIO, parallel.SHARE)
    assert [(row.case, row.size) for row in rows] == [
        (f"{case}: {name}", size) for size in sizes for name in names
    ]
    assert all(row.value > 0 for row in rows)
    assert all(row.value < 1 for row in rows if row.case.endswith(parallel.SHARE))
    with pytest.raises(UnknownNameError, match="Did you mean 'shared_memory'"):
        parallel.BENCHMARK.check("shared_memori")


def test_collectives_have_every_row() -> None:
    rows = measured(collectives.BENCHMARK, "r", tiny("2")).rows
    cases = {row.case for row in rows}
    assert {f"all_reduce: {collectives.BESIDE_GLOO}", f"all_reduce: {collectives.BESIDE_COPY}"} < cases
    assert cells(rows) == {("2", case, size) for case in cases for size in (1, 20)}
    assert all(row.value > 0 and row.timing is None for row in rows)
    with pytest.raises(UnknownNameError, match="cannot measure 'two' ranks"):
        measured(collectives.BENCHMARK, "r", tiny("two"))


def test_the_proposers_measured_by_default_need_no_model() -> None:
    variants = ["prompt_lookup", "suffix", speculative.PYTHON, speculative.TREES]
    assert [*speculative.BENCHMARK.names()] == variants
    assert measured(speculative.BENCHMARK, "p", tiny(*variants)).rows


def test_proposers_have_every_row() -> None:
    plan = tiny("suffix", speculative.PYTHON, "prompt_lookup")
    rows = measured(speculative.BENCHMARK, "pse", plan).rows
    cases: dict[str, tuple[int, ...]] = {f"prompt of {text}": SIZES for text in speculative.TEXTS}
    cases |= {f"step, {text}": (64,) for text in speculative.TEXTS} | {"output of 1024 tokens ends": (1,)}
    assert cells(rows) == {
        (variant, case, size) for variant in plan.variants for case, sizes in cases.items() for size in sizes
    }
    assert {row.unit for row in rows} == {"us"}
    with pytest.raises(
        UnknownNameError, match="'suffix in Python' and 'suffix with branches' are measured too"
    ):
        speculative.BENCHMARK.check("sufix")


def test_speeds_by_acceptance_have_a_table_with_the_planner_s_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "shape_named", lambda _: SHAPES["tiny"])
    monkeypatch.setattr(acceptance, "ACCEPTANCES", (0.5, 0.9))
    monkeypatch.setattr(acceptance, "ANSWER_TOKENS", 12)
    plan = dataclasses.replace(tiny("suffix").quick(), batches=(1, 3))
    report = measured(speculative.BENCHMARK, "a", plan)
    names = ["0", "1", "2", "4", "8", acceptance.ADAPTIVE, acceptance.CHOSEN]
    cases = [(batch, f"acceptance {chance}") for batch in (1, 3) for chance in (0.5, 0.9)]
    assert [(row.size, row.case, row.variant) for row in report.rows] == [
        (*case, name) for case in cases for name in names
    ]
    assert all(row.value > 0 for row in report.rows if row.unit == "tokens/s")
    [table] = tables(report, speculative.BENCHMARK.tables)
    assert [line[:2] for line in table.rows] == [["1", "0.5"], ["1", "0.9"], ["3", "0.5"], ["3", "0.9"]]
    assert all(sum(cell.endswith(" *") for cell in line) == 1 for line in table.rows)


def test_the_star_is_at_the_length_nearest_to_the_planner_s() -> None:
    speeds = {"0": 20.0, "1": 30.0, "2": 44.0, "4": 40.0, "8": 10.0, "adaptive": 33.0, "chosen": 2.6}
    rows = [MicroBenchRow("a", "acceptance 0.5", 4, name, "", value) for name, value in speeds.items()]
    [line] = acceptance.acceptance_table(rows).rows
    assert line == [
        "4", "0.5", "20.0", "30.0", "44.0 *", "40.0", "10.0", "33.0", "2.6", "0.75", "1.65",
    ]  # fmt: skip


def test_reasoning_has_every_row() -> None:
    plan = dataclasses.replace(tiny(cot.DEMO), repeats=2)
    rows = measured(cot.BENCHMARK, "bestf", plan).rows
    values = {(row.section, row.case, row.size): row.value for row in rows}
    assert {row.case.split(": ")[0] for row in rows if row.section == "s"} == set(cot.RULES)
    assert values["s", "all samples: samples", 2] == cot.NUM_SAMPLES
    assert values["s", "window 4, growth 1: samples", 2] <= cot.NUM_SAMPLES
    assert values["b", "budget 0: reasoning", 2] == 0 < values["b", "no budget: reasoning", 2]
    assert values["e", "no exit: probes", 2] == 0 < values["e", "confidence 0.95: probes", 2]
    for size in cot.ANSWER_WORDS:
        ahead, plain = (
            values["t", f"{case}: cached", size] for case in ("next turn computed", "next turn not computed")
        )
        assert ahead > plain
    assert values["f", "branch: cached of its prompt", cot.NUM_DRAWN] > 95
    assert values["f", "plain prompt: cached of its prompt", cot.NUM_DRAWN] < 60


def test_recorded_answers_need_their_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAGELLM_TRACES", raising=False)
    with pytest.raises(ConfigError, match="set SAGELLM_TRACES"):
        measured(speculative.BENCHMARK, "r", tiny("suffix"))


def check_timed(row: MicroBenchRow, section: str) -> None:
    assert (row.section, row.unit, row.turn) == (section, "us", 0)
    assert row.timing is not None
    assert row.timing.samples == 2
    assert row.timing.calls_per_sample in (1, 100)
    for spread in (row.timing.cpu, row.timing.wall):
        assert 0 <= spread.min <= spread.median <= spread.p99
        assert 0 <= spread.iqr <= spread.p99 - spread.min + 0.002  # each is rounded
    assert row.value == row.timing.cpu.median


@pytest.mark.skipif(not process.STATUS.exists(), reason="resident memory is read from /proc")
def test_metadata_is_weighed_in_a_process_of_its_own() -> None:
    rows = measured(prefix_cache.BENCHMARK, "f", tiny("radix")).rows
    assert cells(rows) == {("radix", case, 256) for case in METADATA}
    empty, cached, total = (row.value for row in rows)
    assert total == pytest.approx(empty + cached, abs=0.2)
    assert all((row.unit, row.timing) == ("bytes/block", None) for row in rows)


@pytest.mark.skipif(not process.STATUS.exists(), reason="resident memory is read from /proc")
def test_a_failed_weighing_gives_the_reason() -> None:
    stopwatch = Stopwatch(1)
    with pytest.raises(CapacityError, match=r"weighing 'nope' failed: .*unknown index 'nope'"):
        list(memory.metadata(tiny("nope"), stopwatch))


def test_metadata_needs_a_system_that_reports_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STATUS", process.STATUS / "nowhere")
    with pytest.raises(ConfigError, match="which this system does not have"):
        measured(prefix_cache.BENCHMARK, "f", tiny("radix"))


def test_the_json_has_its_form() -> None:
    report = measured(prefix_cache.BENCHMARK, "b", tiny("radix"))
    values = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert list(values) == [
        "format", "benchmark", "environment", "block_size", "plan", "rows", "peer_rows", "comparisons",
    ]  # fmt: skip
    assert (values["format"], values["benchmark"]) == (FORMAT, "prefix_cache")
    assert values["plan"]["sizes"] == [64, 128]
    assert values["environment"]["date"] == "2026-11-20T12:00:00+00:00"
    row = values["rows"][0]
    assert list(row) == ["section", "case", "size", "variant", "unit", "value", "timing", "turn"]
    assert list(row["timing"]) == ["samples", "calls_per_sample", "cpu", "wall", "single"]
    assert list(row["timing"]["cpu"]) == ["median", "p99", "min", "iqr"]
    assert values["peer_rows"] == values["comparisons"] == []


def test_the_environment_describes_the_machine() -> None:
    here = environment(DAY)
    assert here.cpu
    assert here.cores >= 1
    assert here.commit is None or re.fullmatch(r"[0-9a-f]{40}", here.commit)
    assert cpu_model("processor : 0\nmodel name\t: A CPU: 9\n") == "A CPU: 9"
    assert cpu_model("")


def test_the_table_shows_every_row() -> None:
    report = measured(prefix_cache.BENCHMARK, "b", tiny("radix"))
    [table] = tables(report)
    console = Console(width=140)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    assert len(lines) == 2 + len(report.rows)  # a title and a line of names, and no line is broken


RECIPES: dict[str, Callable[[MicroBenchCell, int], TimedOperation]] = {
    "insert": prefix_cache._insert,
    "insert, evicting": prefix_cache._insert_evicting,
}


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("calls", [1, 5])
def test_an_insert_leaves_the_books_in_order(name: str, index: str, calls: int) -> None:
    operation = RECIPES[name](MicroBenchCell(tiny(index), index, 64), calls)
    for _ in range(3):
        contexts = [operation.setup() for _ in range(calls)]
        for context, result in [(context, operation.run(context)) for context in contexts]:
            operation.teardown(context, result)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("calls", [1, 5])
@pytest.mark.parametrize("size", [1, 3, 40])
def test_every_sample_evicts_as_many_blocks_as_it_allocates(pool: str, calls: int, size: int) -> None:
    operation = kv_pool._evict_and_allocate(MicroBenchCell(tiny(pool), pool, size), calls, large=False)
    for _ in range(3):
        contexts = [operation.setup() for _ in range(calls)]
        results = [operation.run(context) for context in contexts]
        assert [len(allocation.block_ids) for allocation in results] == [size] * calls
        for context, allocation in zip(contexts, results, strict=True):
            operation.teardown(context, allocation)


def test_a_row_that_would_measure_something_else_is_refused() -> None:
    index, tokens = cached_prompt(MicroBenchCell(tiny("radix"), "radix", 64))
    with pytest.raises(BookkeepingError, match="found 64 tokens where 0 are resident"):
        prefix_cache._lookup(index, tokens, 0)


def test_a_prompt_cached_in_steps_is_one_prompt() -> None:
    kv = pool_and_index(tiny("radix"), 10)
    prompt = Prompts(0).draw(100)
    kv.cache_in_steps(prompt, 32)
    assert kv.index.lookup(prompt).num_tokens == 96
    assert (kv.pool.num_free, kv.pool.num_held("prefix index")) == (4, 6)
    kv.index.check()
    kv.pool.check({"prefix index": kv.index.all_block_ids()})


def test_a_pool_that_is_too_small_is_an_error() -> None:
    kv = pool_and_index(tiny("radix"), 2)
    with pytest.raises(CapacityError, match="3 blocks to evict, 0 evictable"):
        kv.evict(3)
    with pytest.raises(CapacityError, match="the pool has 2 free blocks, not 3"):
        allocate(kv.pool, 3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"variants": ()}, "name at least one"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"sizes": (512, 100)}, "multiples of 32 tokens, got 100"),
    ],
)
def test_a_plan_that_cannot_be(change: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        dataclasses.replace(tiny("radix"), **change)  # type: ignore[arg-type]


def test_unknown_names_are_refused_before_anything_is_measured() -> None:
    report = MicroBenchReport("prefix_cache", environment(DAY), tiny("radix"))
    with pytest.raises(ConfigError, match="no section 'xd'; it has a, b, c, f"):
        run(prefix_cache.BENCHMARK, report, "axd")
    with pytest.raises(ConfigError, match="no section ''"):
        run(prefix_cache.BENCHMARK, report, "")
    for plan, kind in (
        (tiny("nope"), "index"),
        (dataclasses.replace(tiny("radix"), policy="nope"), "policy"),
    ):
        report.plan = plan
        with pytest.raises(UnknownNameError, match=f"unknown {kind} 'nope'"):
            run(prefix_cache.BENCHMARK, report, "a")
    assert not report.rows


def test_a_quick_plan_is_smaller() -> None:
    plan = MicroBenchPlan(("radix",))
    assert max(plan.quick().sizes) < max(plan.sizes)
    assert plan.quick().repeats < plan.repeats


def test_what_stands_against_a_peer_is_a_row_of_ours() -> None:
    known = HITS | MISSES | INSERTS | METADATA | OPERATIONS | {kv_pool.EVICT, kv_pool.EVICT_LARGE}
    known |= {scheduler_ir.STEP}
    assert {case for one in COMPARABLE for case in one.ours} <= known


def test_no_benchmark_needs_torch() -> None:
    modules = "conversation", "micro.prefix_cache", "micro.kv_pool", "micro.run"
    imports = ", ".join(f"sagellm.benchmarks.{module}" for module in modules)
    code = f"import sys, {imports}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_scheduler_steps_are_timed_for_each_strategy() -> None:
    """A tiny run of the whole benchmark: every row is there, and all requests take part in every step."""
    plan = dataclasses.replace(tiny("priority", "vllm-like"), running=(4,), new=(3,))
    report = MicroBenchReport("scheduler_ir", environment(DAY), plan)
    run(scheduler_ir.BENCHMARK, report, "en")
    cases = {"e": (scheduler_ir.STEP, scheduler_ir.READ), "n": (scheduler_ir.BUILD, scheduler_ir.ADMIT)}
    assert [(row.section, row.variant, row.case, row.size) for row in report.rows] == [
        (section, strategy, case, size)
        for section, size in (("e", 4), ("n", 3))
        for strategy in ("priority", "vllm-like")
        for case in cases[section]
    ]
    with pytest.raises(UnknownNameError, match="nope"):
        run(scheduler_ir.BENCHMARK, MicroBenchReport("scheduler_ir", environment(DAY), tiny("nope")), "e")


def test_overlap_hides_matched_tasks_on_the_simulated_clock_and_runs_threads() -> None:
    plan = dataclasses.replace(tiny(*overlap.NAMES), tasks=(8,), pieces=4, task_ms=0.5)
    report = measured(overlap.BENCHMARK, "hp", plan)
    hidden = {(row.variant, row.case): row.value for row in report.rows if row.case.endswith(overlap.HIDDEN)}
    assert len(hidden) == 12
    assert all(0 <= share <= 100 for share in hidden.values())
    assert {share for (variant, _), share in hidden.items() if variant == "simulated"} == {75.0}
    assert sum(row.section == "p" for row in report.rows) == 3
    with pytest.raises(UnknownNameError, match="Did you mean 'waiting'"):
        measured(overlap.BENCHMARK, "h", tiny("wait"))


def test_interconnect_compares_the_adapter_with_plain_calls() -> None:
    report = measured(interconnect.BENCHMARK, "o", tiny("emulated"))
    assert {row.case for row in report.rows} == {
        "memory_info, adapter",
        *(f"{name}, {way}" for name in ("all_reduce", "broadcast")
          for way in (interconnect.ADAPTER, interconnect.PLAIN, interconnect.ADDED)),
    }  # fmt: skip


def test_router_decides_and_absorbs_events() -> None:
    plan = dataclasses.replace(tiny("cost"), instances=3, indexed_blocks=700)
    report = measured(router.BENCHMARK, "de", plan)
    assert [row.case for row in report.rows if row.section == "e"] == [
        "prompts, 32 blocks per event",
        "answers, 1 block per event",
    ]
    assert {row.size for row in report.rows if row.section == "d"} == set(plan.sizes)
    assert all(row.value > 0 for row in report.rows if row.section == "e")


@pytest.mark.peer
def test_kv_transfer_beside_libraries() -> None:
    report = measured(kv_transfer.BENCHMARK, "c", tiny("tcp"))
    cases = {row.case for row in report.rows if row.unit == kv_transfer.GB_PER_S}
    there = kv_transfer_plain.installed()
    assert there
    assert cases == {"tcp", *there, *(kv_transfer.PLAIN[name] for name in there)}


def test_kv_transfer_without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagellm.benchmarks.micro.kv_transfer.installed", list)
    assert not measured(kv_transfer.BENCHMARK, "c", tiny("tcp")).rows


def test_what_the_protocol_of_kv_transfer_adds() -> None:
    report = measured(kv_transfer.BENCHMARK, "d", tiny(*kv_transfer.MEASURED))
    rows = {(row.case, row.unit): row.value for row in report.rows}
    for name in kv_transfer.MEASURED:
        framing = rows[name, kv_transfer.FRAMING]
        assert 100 < framing < 10_000, "a prefix and two heads, and more of the offer"
        assert 0 < rows[name, kv_transfer.PROTOCOL_SHARE] < 100
        assert rows[name, "copies and checksums, us/MB"] > 0
        assert rows[name, "system calls, us/MB"] > 0


def test_kv_transfer_has_every_row() -> None:
    report = measured(kv_transfer.BENCHMARK, "b", tiny(*kv_transfer.MEASURED))
    cases = {row.case for row in report.rows if row.unit == kv_transfer.GB_PER_S}
    assert cases == {*kv_transfer.REFERENCES, *kv_transfer.REFERENCES.values()}
    ratios = [row.value for row in report.rows if row.unit == kv_transfer.RATIO]
    assert len(ratios) == 2
    assert min(ratios) > 0
    with pytest.raises(UnknownNameError, match="known are shared_memory, tcp"):
        kv_transfer.BENCHMARK.check("rdma")


def test_kv_transfer_compares_codecs() -> None:
    """`zstd` changes nothing, so it shows that the comparison is fair."""
    report = measured(kv_transfer.BENCHMARK, "e", tiny("tcp"))
    values = {(row.case, row.unit): row.value for row in report.rows}
    names = [name for name in CODECS.names() if name != "raw"]
    samples = (kv_transfer_codecs.NORMAL, kv_transfer_codecs.DEMO, kv_transfer_codecs.ALONE, "continued")
    assert {case for case, _ in values} == {f"{name}, {sample}" for name in names for sample in samples}
    assert values["zstd, continued", kv_transfer_codecs.SAME] == 1
    assert values["zstd, continued", kv_transfer_codecs.CHANGE] == 0
    assert values[f"zstd, {kv_transfer_codecs.DEMO}", kv_transfer_codecs.MAX_ERROR] == 0
    sizes = [values[f"{name}, {kv_transfer_codecs.DEMO}", kv_transfer_codecs.SHARE] for name in names]
    assert dict(zip(names, sizes, strict=True))["delta"] == min(sizes)
