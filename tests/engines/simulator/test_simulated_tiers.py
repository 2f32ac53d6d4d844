"""KV tiers in simulated time: what a move takes, by hand, and requests whose KV comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagellm.core.blocks import Tier
from sagellm.core.clock import ManualClock
from sagellm.core.config import Config
from sagellm.core.config_layers import given_layer, resolve
from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.events import EventBus, RequestFinished
from sagellm.core.protocols.kv_tiers import ReadOutcome, StoredBlock
from sagellm.core.types import TOKEN_BYTES, Namespace, Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine
from sagellm.engines.simulator.backend import SimulatedBackend, configured_backend
from sagellm.engines.simulator.cost_model import CostModel, StepShape
from sagellm.engines.simulator.devices import device
from sagellm.engines.simulator.models import model
from sagellm.engines.simulator.tiers import SimulatedMigrator, SimulatedStorage
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from sagellm.kvmgr.kv_pool.tiers.migrator import MigrationPlan, MigrationReport, MoveTarget
from sagellm.kvmgr.kv_pool.tiers.speeds import FIRST_BYTES_PER_S, LATENCY_S
from sagellm.kvmgr.prefix_cache.fingerprint import chain
from tests.effort import examples

BLOCK_BYTES = 1_000_000  # a block takes 1 ms to host memory and 2 ms to the disk; a chunk has 8
NAMESPACE = Namespace()


def hashes_of(path: bytes, namespace: Namespace) -> list[bytes]:
    return chain(path, TOKEN_BYTES, namespace)


def mover() -> tuple[SimulatedMigrator, ManualClock, dict[Tier, SimulatedStorage]]:
    clock, storages = ManualClock(), {tier: SimulatedStorage(100) for tier in (Tier.DRAM, Tier.NVME)}
    made = SimulatedMigrator(
        dict(storages), hashes_of, clock, bytes_per_block=BLOCK_BYTES, pcie=1e9, nvme=0.5e9
    )
    return made, clock, storages


def plan(num_blocks: int, source: Tier, *targets: Tier, first: int = 0) -> MigrationPlan:
    """Blocks `first` to `num_blocks` of one path, each in the slot of its position."""
    positions = range(first, num_blocks)
    to = tuple(MoveTarget(tier, range(len(positions)), list(positions)) for tier in targets)
    return MigrationPlan(Tokens(range(num_blocks)).tobytes(), NAMESPACE, positions, source, positions, to)


def ends(reports: Sequence[MigrationReport]) -> list[tuple[int, int]]:
    return [(report.move_id, report.num_read) for report in reports]


def test_moves_of_one_queue_follow_each_other_and_those_of_others_do_not_wait() -> None:
    made, clock, _ = mover()
    for each in (plan(10, Tier.HBM, Tier.DRAM), plan(5, Tier.HBM, Tier.DRAM, Tier.NVME)):
        made.migrate(each)
    assert made.poll() == []
    assert made.num_pending_bytes == 15 * BLOCK_BYTES
    assert made.wait(1.0)
    assert clock.now() == pytest.approx(0.011)  # 1 ms + 10 x 1 ms
    assert ends(made.poll()) == [(1, 10)]
    made.migrate(plan(3, Tier.DRAM, Tier.HBM))
    made.migrate(plan(3, Tier.NVME, Tier.HBM))
    assert made.wait(1.0)
    assert clock.now() == pytest.approx(0.015)  # 1 ms + 3 x 1 ms, beside the others
    assert ends(made.poll()) == [(3, 3)]
    assert not made.wait(0.002)
    assert clock.now() == pytest.approx(0.017)
    assert made.wait(1.0)
    assert clock.now() == pytest.approx(0.018)  # 1 ms + 3 x 2 ms
    assert made.poll()[0].outcome is ReadOutcome.ABSENT  # they are being written
    assert made.wait(1.0)
    assert clock.now() == pytest.approx(0.022)  # 1 ms + 5 x 2 ms behind the first: the disk is slowest
    [last] = made.poll()
    assert last.num_written == {Tier.DRAM: 5, Tier.NVME: 5}
    assert last.spent_s == pytest.approx(0.011)
    assert made.is_idle


def test_a_cancelled_move_ends_with_its_chunk_and_one_that_waits_moves_nothing() -> None:
    made, clock, _ = mover()
    moves = [made.migrate(plan(20, Tier.HBM, Tier.DRAM)) for _ in range(3)]
    clock.advance(0.005)
    for move in moves[:2]:
        made.cancel(move)
    made.cancel(99)
    assert made.next_report_s == pytest.approx(0.009)  # 1 ms + 8 x 1 ms
    clock.advance_to(0.0091)
    first, second = made.poll()
    assert (first.num_read, first.is_cancelled) == (8, True)
    assert (second.num_read, second.is_cancelled, second.num_written) == (0, True, {Tier.DRAM: 0})
    assert made.next_report_s == pytest.approx(0.009 + 0.021)
    made.close()
    assert clock.now() == pytest.approx(0.009 + 0.009)
    assert ends(made.poll()) == [(3, 8)]


def test_slots_hold_the_blocks_that_were_written_to_them() -> None:
    made, _, storages = mover()
    made.migrate(plan(4, Tier.HBM, Tier.DRAM))
    assert made.wait(1.0)
    made.poll()
    other = StoredBlock(2, b"other", b"", NAMESPACE, b"", 0.0)
    for spoil, outcome in (
        (lambda: storages[Tier.DRAM].write([other], b""), ReadOutcome.OTHER_TOKENS),
        (lambda: storages[Tier.DRAM].forget([2]), ReadOutcome.ABSENT),
    ):
        spoil()
        made.migrate(plan(4, Tier.DRAM, Tier.HBM))
        assert made.wait(1.0)
        [report] = made.poll()
        assert (report.num_read, report.num_written, report.outcome) == (2, {Tier.HBM: 2}, outcome)


def test_a_load_is_not_abandoned() -> None:
    made, _, _ = mover()
    with pytest.raises(BookkeepingError, match="shared store"):
        made.abandon(made.migrate(plan(4, Tier.DRAM, Tier.HBM)))


class Moves(RuleBasedStateMachine):
    """Any moves and cancellations: each is reported once, when it ends; moves of a queue never overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.mover, self.clock, _ = mover()
        self.began = dict[int, float]()
        self.spans: dict[Tier, list[tuple[float, float]]] = {}

    @rule(
        num_blocks=st.integers(1, 30),
        way=st.sampled_from([(Tier.HBM, Tier.DRAM), (Tier.HBM, Tier.DRAM, Tier.NVME), (Tier.NVME, Tier.HBM)]),
    )
    def migrate(self, num_blocks: int, way: Sequence[Tier]) -> None:
        self.began[self.mover.migrate(plan(num_blocks, *way))] = self.clock.now()

    @rule(move_id=st.integers(1, 40))
    def cancel(self, move_id: int) -> None:
        self.mover.cancel(move_id)

    @rule(seconds=st.sampled_from([0.0, 0.0005, 0.004, 0.05]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([0.0, 0.003, 10.0]))
    def wait(self, seconds: float) -> None:
        due_s, before_s = self.mover.next_report_s, self.clock.now()
        assert self.mover.wait(seconds) == (due_s <= before_s + seconds)
        assert self.clock.now() == max(before_s, min(due_s, before_s + seconds))

    @rule(most_blocks=st.sampled_from([1, 20, math.inf]))
    def poll(self, most_blocks: float) -> None:
        has_due = self.mover.next_report_s <= self.clock.now()
        reports = self.mover.poll(most_blocks)
        assert len(reports) <= 1 or sum(len(each.plan.positions) for each in reports) <= most_blocks
        while self.mover.next_report_s <= self.clock.now():
            reports += self.mover.poll(most_blocks)
        assert bool(reports) == has_due
        for report in reports:
            del self.began[report.move_id]
            size = len(report.plan.positions)
            assert report.is_cancelled == (report.num_read + len(self.missing(report)) < size)
            assert report.num_bytes == report.num_read * BLOCK_BYTES
            spent_s = 0.0 if not report.num_read else LATENCY_S + 0.001 * report.num_read
            assert report.is_cancelled or report.spent_s >= spent_s - 1e-9
        assert self.mover.next_report_s > self.clock.now()

    def missing(self, report: MigrationReport) -> range:
        """Blocks that were read and were not there."""
        is_bad = report.outcome is not ReadOutcome.OK
        return range(report.num_read, len(report.plan.positions)) if is_bad else range(0)

    @invariant()
    def books_balance(self) -> None:
        self.mover.check()
        assert self.mover.is_idle == (not self.began)


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


# -- an engine with tiers


def configured(**changed: object) -> Config:
    values = {
        "scheduler.strategy": "fifo", "scheduler.max_batched_tokens": 4096, "kv.eviction": "lru",
        "kv.num_blocks": 200, "kv.host_gb": 4.0,
    }  # fmt: skip
    return resolve([given_layer({**values, **{k.replace("__", "."): v for k, v in changed.items()}})]).config


def cost_model(tensor_parallel: int = 1) -> CostModel:
    return CostModel(device("rtx-4090"), model("llama-3.1-8b"), tensor_parallel=tensor_parallel)


def ask(name: str, num_tokens: int, num_output: int, arrival_s: float = 0.0, first: int = 0) -> Request:
    params = SamplingParams(0.0, max_tokens=num_output, ignore_eos=True)
    return Request(name, Tokens(range(first, first + num_tokens)), params, arrival_s=arrival_s)


def test_a_prompt_comes_back_from_host_memory_in_the_time_that_its_bytes_take() -> None:
    config = configured()
    backend = configured_backend(cost_model(), config, ManualClock())
    events, ended = EventBus(), list[RequestFinished]()
    engine = build_engine(config, backend, events=events)
    events.subscribe(RequestFinished, ended.append)
    engine.add(ask("a", 1024, 1))
    while engine.has_work():
        engine.step()
    assert engine.diagnostics().tiers[0].stored == 64
    engine.clear_cache()
    began_s = engine.clock.now()
    engine.add(ask("b", 1024, 1, began_s))
    while engine.has_work():
        engine.step()
    block_bytes = 32 * 2 * 8 * 128 * 2 * 16
    load_s = 0.001 + 63 * block_bytes / 25e9  # all blocks but the last, of which a token must be computed
    step_s = cost_model().step_s(StepShape(prefills=((1008, 16),)))
    assert ended[-1].first_token_s is not None
    assert ended[-1].first_token_s - began_s == pytest.approx(load_s + step_s, rel=1e-9)
    found = engine.diagnostics()
    assert (found.num_kv_waits, found.tiers[0].loaded) == (1, 63)
    engine.check()


def test_a_head_is_computed_in_the_time_in_which_its_tail_comes() -> None:
    """From a link of 1.5 GB/s. Loading all would take 89 ms, computing all more."""
    config = configured()
    cost = CostModel(replace(device("rtx-4090"), pcie=1.5e9), model("llama-3.1-8b"))
    events, ended = EventBus(), list[RequestFinished]()
    engine = build_engine(config, configured_backend(cost, config, ManualClock()), events=events)
    events.subscribe(RequestFinished, ended.append)
    for name in ("a", "b"):
        engine.clear_cache()
        began_s = engine.clock.now()
        engine.add(ask(name, 1024, 1, began_s))
        while engine.has_work():
            engine.step()
            engine.check()
    found = engine.diagnostics()
    num_loaded = found.tiers[0].loaded
    num_computed = 16 * (63 - num_loaded)
    assert 20 < num_loaded < 43
    assert found.num_kv_waits == 0
    head_s = cost.step_s(StepShape(prefills=((0, num_computed),)))
    load_s = 0.001 + num_loaded * 32 * 2 * 8 * 128 * 2 * 16 / 1.5e9
    rest_s = cost.step_s(StepShape(prefills=((1008, 16),)))
    assert ended[-1].first_token_s is not None
    assert ended[-1].first_token_s - began_s == pytest.approx(max(head_s, load_s) + rest_s, rel=1e-9)
    assert max(head_s, load_s) + rest_s < 0.8 * cost.step_s(StepShape(prefills=((0, 1024),)))


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_each_device_of_a_group_has_its_own_link(tensor_parallel: int) -> None:
    config = configured()
    backend: SimulatedBackend = configured_backend(cost_model(tensor_parallel), config, ManualClock())
    engine = build_engine(config, backend)
    engine.add(ask("a", 1024, 1))
    engine.step()
    expected_s = 0.001 + 64 * 2 * 2**20 / (25e9 * tensor_parallel)
    assert backend.next_kv_report_s - engine.clock.now() == pytest.approx(expected_s)


def test_writing_says_how_fast_a_tier_is_until_something_was_loaded() -> None:
    """An H100 computes a block sooner than 1 GB/s would bring it. A load that is refused changes nothing."""
    config = configured()
    cost = CostModel(device("h100-80g"), model("llama-3.1-8b"))
    engine = build_engine(config, configured_backend(cost, config, ManualClock()))
    tiers = engine.kv.tiers
    assert isinstance(tiers, HierarchyManager)
    assert tiers.speeds.bandwidths() == {Tier.DRAM: FIRST_BYTES_PER_S}
    num_waits = []
    for name, num_tokens in (("a", 1024), ("one block", 17), ("b", 1024)):
        engine.add(ask(name, num_tokens, 1))
        while engine.has_work():
            engine.step()
        engine.clear_cache()
        assert tiers.speeds.bandwidths()[Tier.DRAM] == pytest.approx(50e9)
        num_waits.append(engine.diagnostics().num_kv_waits)
    assert num_waits == [0, 0, 1]


def preempted(host_gb: float) -> tuple[list[RequestFinished], int, int]:
    """Two requests that outgrow memory together: how they end, preemptions, tokens computed as prompts."""
    config = configured(
        kv__num_blocks=100,
        kv__host_gb=host_gb,
        scheduler__pass_options={"memory_aware_preemption": {"watermark": 0}},
    )
    backend = configured_backend(cost_model(), config, ManualClock())
    events, ended, num_tokens = EventBus(), list[RequestFinished](), 0
    engine = build_engine(config, backend, events=events)
    events.subscribe(RequestFinished, ended.append)
    for number in range(2):
        engine.add(ask(str(number), 700, 300, first=1000 * number))
    while engine.has_work():
        engine.step()
        if engine.last_plan is not None:
            num_tokens += engine.last_plan.num_prefill_tokens
        engine.check()
    return ended, engine.stats().num_preemptions, num_tokens


def test_a_preempted_request_comes_back_from_host_memory() -> None:
    """Its last, partial block is computed again, and nothing else; both requests end sooner."""
    without, with_host = preempted(0.0), preempted(4.0)
    assert without[1] == with_host[1] == 1
    assert without[2] > 1400 + 100
    assert 1400 < with_host[2] <= 1400 + 16
    assert [event.request_id for event in with_host[0]] == ["0", "1"]
    assert with_host[0][-1].finished_s < without[0][-1].finished_s
    assert preempted(4.0) == with_host


def test_what_is_not_simulated_is_refused() -> None:
    for changed in ({"kv.codec": "int8"}, {"kv.remote_url": "redis://localhost"}):
        config = resolve([given_layer({"kv.num_blocks": 100, "kv.host_gb": 1.0, **changed})]).config
        with pytest.raises(ConfigError, match="not simulated"):
            build_engine(config, configured_backend(cost_model(), config, ManualClock()))


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_a_host_tier_of_the_size_of_the_pool_pays_with_write_back(write_policy: str) -> None:
    """Four prompts of 64 blocks in turns, of which the pool holds two beside the watermark, three with it."""
    config = configured(kv__write_policy=write_policy, kv__host_gb=200 * 2 / 1024)
    engine = build_engine(config, configured_backend(cost_model(), config, ManualClock()))
    for number in range(12):
        engine.add(ask(f"r{number}", 1024, 16, engine.clock.now(), first=2000 * (number % 4)))
        while engine.has_work():
            engine.step()
            engine.check()
    [tier], evicted = engine.diagnostics().tiers, engine.kv.allocator.num_evicted
    if write_policy == "write_through":
        assert tier.loaded < 64
    else:
        assert evicted.keys() == {"ahead"}
        assert tier.loaded > 4 * 63
