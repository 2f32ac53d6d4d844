"""Steps taken at once are those taken one by one: the same events at the same times, under every strategy and
pass, whether requests wait or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import cycle, product
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.benchmarks.simulate.cluster import Cluster
from sagellm.benchmarks.simulate.hardware import Hardware, hardware
from sagellm.benchmarks.simulate.simulation import ClusterLayout, build_cluster
from sagellm.benchmarks.simulate.workload import Arrivals, RequestMaker, WorkloadSpec, workload
from sagellm.benchmarks.traces import Trace
from sagellm.core.config import Config
from sagellm.core.events import BlocksRemoved, RequestFinished, RequestPreempted, RequestScheduled
from sagellm.core.plan import Prefill
from sagellm.core.registry import registry
from sagellm.core.types import SLO
from sagellm.engines.simulator.fast_forward import SimulatedEngine
from sagellm.kvmgr.scheduler_ir.strategies import STRATEGIES
from tests.benchmarks.simulate.stand_in import config, request, trace
from tests.effort import usual

MACHINE = hardware("l4", "llama-3.2-1b")
SLOW = hardware("l4", "llama-3.1-8b")
"""Computing is slower there than loading from host memory, for prompts of these tests too."""
COLUMNS = ("ends_s", "durations_s", "prefill_tokens", "decode_tokens", "running", "waiting", "num_recomputed")
TOLD = (RequestScheduled, RequestPreempted, RequestFinished)
AS_VLLM = {"scheduler__strategy": "vllm-like", "kv__index_as_computed": True}


class Story(NamedTuple):
    """What can be seen of a run.

    `forwarded`: steps taken at once, by whether requests waited. `chunked` of them computed a part of a
    prompt.
    """

    served: Any
    events: list[Any]
    columns: dict[str, Any]
    blocks: Any
    forwarded: Counter[bool]
    chunked: int
    loaded: int


def run(
    chosen: Config,
    made: Trace,
    *,
    at_once: bool,
    rate: float = 60.0,
    until_s: float = float("inf"),
    machine: Hardware = MACHINE,
) -> Story:
    forwarded: Counter[bool] = Counter()
    prefills: list[Prefill] = []
    fast_forward = SimulatedEngine.fast_forward

    def counting(self: SimulatedEngine, until_s: float) -> Any:
        done = fast_forward(self, until_s)
        if done is not None:
            self.check()
            forwarded[done.num_waiting > 0] += done.num_steps
            prefills.extend(done.prefills)
        return done

    spec = WorkloadSpec(Arrivals("bursty", rate=rate), high_priority_share=0.3)
    work = workload(made, spec, machine.max_model_len(chosen))
    cluster = build_cluster(chosen, machine, ClusterLayout())
    events = listen(cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedEngine, "fast_forward", counting if at_once else lambda self, until_s: None)
        served = cluster.run(
            work, RequestMaker(work, machine.cost_model.model.vocab_size, SLO(0.3, 0.02)), until_s
        )
    [one] = cluster.instances
    one.engine.check()
    columns = {name: getattr(one.step_log, name) for name in COLUMNS}
    found = one.engine.diagnostics()
    columns["tiers"], columns["kv_waits"] = found.tiers, found.num_kv_waits
    loaded = sum(tier.loaded for tier in found.tiers)
    return Story(served, events, columns, one.engine.kv.block_states(), forwarded, len(prefills), loaded)


def listen(cluster: Cluster) -> list[Any]:
    [one] = cluster.instances
    events: list[Any] = []
    for kind in TOLD:
        one.engine.events.subscribe(kind, events.append)
    one.engine.events.subscribe(
        BlocksRemoved, lambda gone: events.append((one.clock.now(), gone.hashes, gone.cause))
    )
    return events


def both(chosen: Config, made: Trace, **how: Any) -> Story:
    """Run it twice, and find no difference."""
    singly, together = (run(chosen, made, at_once=at_once, **how) for at_once in (False, True))
    assert together.events == singly.events
    assert together.served == singly.served
    assert together.columns == singly.columns
    assert together.blocks == singly.blocks
    return together


def blocked(count: int = 60, *, shared: Sequence[int] = (), tenants: int = 1) -> Trace:
    """More than memory holds at once, in blocks of 4 tokens."""
    requests = []
    for at in range(count):
        ids = [*shared, *(1000 * (at % 7 + 1) + place for place in range(2))] if shared else []
        length = 10 + at % 40
        requests.append(
            request(0.1 * at, length, 5 + 7 * at % 50, ids[: length // 8], namespace=f"t{at % tenants}")
        )
    return trace(*requests)


KINDS = {
    "a shared prefix": blocked(shared=[1]), "three tenants": blocked(tenants=3), "all different": blocked(),
}  # fmt: skip
NAMES = sorted(STRATEGIES)


@pytest.mark.parametrize(("strategy", "kind"), usual(list(zip(NAMES, cycle(KINDS))), product(NAMES, KINDS)))
def test_fast_forward_changes_no_result(strategy: str, kind: str) -> None:
    """Where it predicts lengths, too short at first: somebody has to leave."""
    options = {"admission": {"default_output": 5}} if strategy == "adaptive" else {}
    chosen = config(
        kv__num_blocks=30,
        scheduler__strategy=strategy,
        scheduler__max_batched_tokens=64,
        scheduler__pass_options=options,
    )
    story = both(chosen, KINDS[kind])
    assert sum(story.forwarded.values()) > 10
    assert any(isinstance(one, RequestPreempted) for one in story.events)


@pytest.mark.parametrize("name", registry("pass").names())
def test_every_pass_that_can_tell_is_fast_forwarded(name: str) -> None:
    """A pass with `stable_until` keeps its promise; with another pass, steps are planned singly."""
    chosen = config(kv__num_blocks=30, scheduler__passes=[name], scheduler__max_batched_tokens=64)
    story = both(chosen, blocked(shared=[1], tenants=2))
    assert bool(story.forwarded) == hasattr(registry("pass").create(name), "stable_until")


@pytest.mark.parametrize("strategy", ["fifo", "priority", "fair", "vllm-like"])
def test_requests_waiting_for_memory_do_not_prevent_fast_forward(strategy: str) -> None:
    chosen = config(kv__num_blocks=30, scheduler__strategy=strategy, scheduler__max_batched_tokens=64)
    story = both(chosen, blocked())
    assert story.forwarded[True] > 100, story.forwarded


@pytest.mark.parametrize("strategy", ["fifo", "vllm-like"])
def test_requests_waiting_for_a_row_do_not_prevent_fast_forward(strategy: str) -> None:
    chosen = config(kv__num_blocks=400, scheduler__strategy=strategy, scheduler__max_num_seqs=3)
    story = both(chosen, blocked())
    assert story.forwarded[True] > 100, story.forwarded
    assert not any(isinstance(one, RequestPreempted) for one in story.events)


def test_blocks_that_enter_the_index_as_they_are_computed() -> None:
    chosen = config(kv__num_blocks=30, scheduler__max_batched_tokens=24, **AS_VLLM)
    assert both(chosen, blocked(shared=[1])).forwarded[True] > 100


@pytest.mark.parametrize("chosen", [AS_VLLM, {"scheduler__strategy": "fifo"}])
def test_the_middle_of_long_prompts(chosen: dict[str, Any]) -> None:
    story = both(config(kv__num_blocks=40, scheduler__max_batched_tokens=8, **chosen), blocked())
    assert story.chunked > 30, story.chunked
    assert any(isinstance(one, RequestPreempted) for one in story.events)


def test_a_request_that_waited_long_is_admitted_in_the_same_step() -> None:
    options = {"prefix_cache_aware": {"max_wait_s": 0.2}, "priority_based": {"age_s": 0.1}}
    chosen = config(kv__num_blocks=30, scheduler__strategy="priority", scheduler__pass_options=options)
    assert both(chosen, blocked()).forwarded[True] > 20


@pytest.mark.parametrize("host_gb", [0.02, 0.5])
@pytest.mark.parametrize(("strategy", "kind"), usual(list(zip(NAMES, cycle(KINDS))), product(NAMES, KINDS)))
def test_kv_that_moves_between_tiers(strategy: str, kind: str, host_gb: float) -> None:
    """In the small host tier blocks are evicted too."""
    options = {"admission": {"default_output": 5}} if strategy == "adaptive" else {}
    chosen = config(
        kv__num_blocks=30,
        kv__host_gb=host_gb,
        scheduler__strategy=strategy,
        scheduler__max_batched_tokens=64,
        scheduler__pass_options=options,
    )
    story = both(chosen, KINDS[kind], machine=SLOW)
    assert story.forwarded
    assert story.loaded > 0


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_comes(data: st.DataObject) -> None:
    draw = data.draw
    count = draw(st.integers(3, 25))
    made = trace(
        *(
            request(
                draw(st.integers(0, 40)) / 20,
                length := draw(st.integers(1, 60)),
                draw(st.integers(1, 40)),
                draw(st.lists(st.integers(1, 2), max_size=length // 8)),
                namespace=draw(st.sampled_from("ab")),
            )
            for _ in range(count)
        )
    )
    chosen = config(
        scheduler__strategy=draw(st.sampled_from(NAMES)),
        scheduler__max_batched_tokens=draw(st.sampled_from([9, 16, 64])),
        scheduler__max_num_seqs=draw(st.integers(1, 8)),
        kv__num_blocks=draw(st.integers(26, 60)),
        kv__index_as_computed=draw(st.booleans()),
        kv__eviction=draw(st.sampled_from(["lru", "adaptive"])),
        kv__host_gb=draw(st.sampled_from([0.0, 0.01, 0.1])),
        kv__disk_gb=draw(st.sampled_from([0.0, 0.1])),
        kv__dir="nothing is written",
    )
    story = both(
        chosen,
        made,
        rate=draw(st.sampled_from([5.0, 60.0])),
        until_s=draw(st.sampled_from([0.3, 1e9])),
        machine=draw(st.sampled_from([MACHINE, SLOW])),
    )
    assert len(story.served) == count
