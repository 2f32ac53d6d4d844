"""`RequestOrder` in SGLang's real scheduler, through its real hook registry."""

from __future__ import annotations

import json
import logging
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.clock import ManualClock
from sagellm.engines.sglang.order import our_request
from tests.engines.sglang.drivers import Driver, hooked

pytestmark = pytest.mark.peer
STRATEGIES = ("fifo", "priority", "slo", "adaptive", "throughput", "fair")
Steps = list[tuple[str, ...]]


def setting(strategy: str, **options: Any) -> str:
    return json.dumps({"strategy": strategy, "options": options})


@contextmanager
def driven(strategy: str | None, num_tokens: int = 400, **options: Any) -> Iterator[tuple[Driver, Any]]:
    """A driver, and its hooks. `strategy`: None, a name, or the whole setting."""
    clock = ManualClock(100.0)
    text = strategy if strategy is None or strategy.startswith("{") else setting(strategy)
    with hooked(text, clock) as hooks:
        yield Driver(clock, num_tokens, **options), hooks


def random_workload(driver: Driver, seed: int, after_step: Callable[[], None] = lambda: None) -> Steps:
    """Requests come, end, are aborted and retracted; returns what each step computes."""
    rng, steps, num_requests = random.Random(seed), Steps(), 0
    systems = [[7] * 10, [8] * 24, []]
    for turn in range(500):
        if turn < 120 and rng.random() < 0.5:
            prompt = rng.choice(systems) + [rng.randrange(20, 900) for _ in range(rng.randrange(1, 40))]
            priority = rng.randrange(-2, 3) if rng.random() < 0.7 else None
            custom = {"sage_tenant": rng.choice("ab"), "sage_ttft_s": rng.choice([None, 0.2, 5.0])}
            driver.add(f"r{num_requests:03}", prompt, rng.randrange(1, 60), priority=priority, **custom)
            num_requests += 1
        if driver.reqs and rng.random() < 0.05:
            driver.abort(rng.choice(sorted(driver.reqs)))
        batch = driver.step()
        steps.append(() if batch is None else tuple(req.rid for req in batch.reqs))
        after_step()
        if turn >= 120 and driver.is_idle:
            break
    driver.run()
    cache = driver.scheduler.tree_cache
    cache.sanity_check()
    allocator = cache.token_to_kv_pool_allocator
    assert allocator.available_size() + cache.evictable_size() == allocator.size
    return steps


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "chunks": {"chunk": 16, "overlap": True},
    "lpm": {"schedule_policy": "lpm"},
    "priorities": {"enable_priority_scheduling": True},
    "low_first": {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True,
                  "retraction_policy": "priority"},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_with_fifo_every_step_is_that_of_sglang(variant: str) -> None:
    seen: list[list[Any]] = []
    for strategy in (None, "fifo"):
        seen.append([])
        for seed in range(4):
            with driven(strategy, 160, **VARIANTS[variant]) as (driver, hooks):
                seen[-1].append((random_workload(driver, seed), driver.admitted, driver.retracted))
                assert hooks is None or hooks.order is not None
    assert seen[0] == seen[1]
    assert any(retracted for _, _, retracted in seen[0]), "the workloads must retract"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_strategy_serves_all_and_forgets_them(strategy: str, variant: str) -> None:
    text = setting(strategy, memory_aware_preemption={"victims": "most_blocks"})
    with driven(text, 160, **VARIANTS[variant]) as (driver, hooks):
        random_workload(driver, 5, after_step=hooks.order.check)
        assert hooks.order is not None
        assert not hooks.order.requests
        assert not hooks.order.passes.states
        assert not driver.reqs
        assert driver.retracted


@given(
    seed=st.integers(0, 10**6),
    strategy=st.sampled_from(STRATEGIES),
    variant=st.sampled_from(sorted(VARIANTS)),
)
@settings(max_examples=8, deadline=None)
def test_no_request_is_lost_and_the_queue_keeps_sglangs_order(seed: int, strategy: str, variant: str) -> None:
    """After each step the waiting requests are in the order of their arrival, or of SGLang's policy."""
    options = VARIANTS[variant]
    deferring = {"prefix_cache_aware": {"max_defer_s": 0.05, "min_shared": 8, "worth": 0.1}}
    text = setting(strategy, **({} if strategy == "fifo" else deferring))
    with driven(text, 160, **options) as (driver, hooks):
        arrivals: dict[str, int] = {}

        def check() -> None:
            hooks.order.check()
            queue = driver.scheduler.waiting_queue
            names = [req.rid for req in queue]
            assert len(set(names)) == len(names)
            waiting = {n for n, req in driver.reqs.items() if not req.kv.holds_kv}
            assert set(names) == waiting
            if not options or options == {"overlap": True}:
                fresh = [req.rid for req in queue if not req.retracted_stain]
                assert fresh == sorted(fresh, key=lambda name: arrivals.setdefault(name, int(name[1:])))

        random_workload(driver, seed, after_step=check)
        assert not hooks.order.passes.states


# -- what the strategies say


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    places = []
    for text in (None, setting("fair", fairness={"quantum": 0})):
        with driven(text, max_running=2) as (driver, _):
            for i in range(12):
                driver.add(f"a{i}", [i + 20] * 20, sage_tenant="a")
            driver.add("b", [99] * 20, sage_tenant="b")
            driver.run()
            places.append(driver.admitted.index("b"))
    assert places == [12, 1]


def test_a_tenant_pays_for_what_it_has_generated() -> None:
    """Of two tenants with one row, the one that has had fewer tokens goes first."""
    with driven(setting("fair", fairness={"quantum": 0}), max_running=1) as (driver, _):
        driver.add("a0", [21] * 20, 40, sage_tenant="a")
        for i in range(1, 4):
            driver.add(f"a{i}", [21 + i] * 20, 2, sage_tenant="a")
        for i in range(4):
            driver.add(f"b{i}", [31 + i] * 20, 2, sage_tenant="b")
        driver.run()
    assert driver.admitted[:5] == ["a0", "b0", "b1", "b2", "b3"]


@pytest.mark.parametrize(("low_first", "expected"), [(False, [5, 4, 3, 2, 1, 0]), (True, [0, 1, 2, 3, 4, 5])])
def test_priorities_in_sglangs_direction(low_first: bool, expected: list[int]) -> None:
    with driven("priority", max_running=1, schedule_low_priority_values_first=low_first) as (driver, _):
        for i in range(6):
            driver.add(f"r{i}", [i + 20] * 20, priority=i)
        driver.run()
    assert driver.admitted == [f"r{i}" for i in expected]


def test_the_nearest_deadline_goes_first() -> None:
    with driven("slo", max_running=1) as (driver, _):
        for name, goal_s in (("a", 60.0), ("b", 20.0), ("c", 40.0), ("d", None)):
            driver.add(name, [ord(name)] * 20, sage_ttft_s=goal_s)
        driver.run()
    assert driver.admitted == ["b", "c", "a", "d"]


def test_what_is_cached_goes_first() -> None:
    with driven("throughput", max_running=1) as (driver, _):
        driver.add("first", [7] * 40)
        driver.run()
        driver.add("new", [9] * 40)
        driver.add("again", [7] * 40 + [8])
        driver.run()
    assert driver.admitted == ["first", "again", "new"]


# -- retraction


def retracted(
    strategy: str | None, requests: Sequence[tuple[str, int, int, int]], **options: Any
) -> list[str]:
    """Which requests lose their KV first: (name, prompt tokens, output tokens, priority), one a step."""
    with driven(strategy, 140, **options) as (driver, _):
        for name, length, num_tokens, priority in requests:
            driver.add(name, [ord(name) + i for i in range(length)], num_tokens, priority=priority)
            driver.step()
        driver.run()
        return driver.retracted


SHORT = [("a", 10, 60, 0), ("b", 30, 60, 0), ("c", 20, 60, 0)]


@pytest.mark.parametrize(("rule", "first"), [("newest", "c"), ("most_blocks", "b")])
def test_the_rule_for_victims_says_who_is_retracted(rule: str, first: str) -> None:
    text = setting("fifo", memory_aware_preemption={"victims": rule})
    assert retracted(text, SHORT)[0] == first


@pytest.mark.parametrize("strategy", ["fifo", "fair", "slo", "throughput"])
def test_without_a_rule_sglang_chooses(strategy: str) -> None:
    assert retracted(strategy, SHORT) == retracted(None, SHORT) != []


@pytest.mark.parametrize(("low_first", "first"), [(False, "a"), (True, "b")])
def test_the_lowest_priority_is_retracted_first(low_first: bool, first: str) -> None:
    requests = [("a", 20, 60, 1), ("b", 20, 60, 9), ("c", 20, 60, 5)]
    assert retracted("priority", requests, schedule_low_priority_values_first=low_first)[0] == first


def test_several_victims_in_the_order_of_the_rule() -> None:
    text = setting("fifo", memory_aware_preemption={"victims": "most_blocks"})
    with driven(text, 400) as (driver, hooks):
        for name, length in (("a", 50), ("b", 10), ("c", 40), ("d", 30)):
            driver.add(name, [ord(name)] * length, 20)
        driver.step()
        driver.step()
        batch = driver.scheduler.running_batch
        order = batch._get_decode_retraction_order(batch.reqs)
        assert [batch.reqs[i].rid for i in order] == ["a", "b", "d", "c"]  # the first is never a victim
        assert hooks.order is not None


# -- requests that wait on


class DeferAll:
    """A pass that lets no request in while `names` has it."""

    name = "defer"

    def __init__(self, *names: str) -> None:
        self.names = set(names)

    def __call__(self, draft: Any, view: Any) -> None:
        draft.waiting[:] = [state for state in draft.waiting if state.request_id not in self.names]


def test_a_deferred_request_waits() -> None:
    with driven("fifo") as (driver, hooks):
        hooks.order.passes.passes.append(defer := DeferAll("a"))
        driver.add("a", [1] * 9)
        driver.add("b", [2] * 9, 30)
        assert [req.rid for req in driver.step().reqs] == ["b"]
        assert [req.rid for req in driver.scheduler.waiting_queue] == ["a"]
        driver.add("c", [3] * 9)
        assert [req.rid for req in driver.step().reqs] == ["c"]
        driver.abort("c")
        assert [req.rid for req in driver.scheduler.waiting_queue] == ["a"]
        defer.names.clear()
        driver.run()
    assert driver.admitted == ["b", "c", "a"]


def test_where_nothing_else_could_run_it_does_not_wait() -> None:
    with driven("fifo") as (driver, hooks):
        hooks.order.passes.passes.append(DeferAll("a", "b"))
        driver.add("a", [1] * 9)
        driver.add("b", [2] * 9)
        driver.run()
    assert driver.admitted == ["a", "b"]


def test_a_prompt_that_another_computes_waits_for_it_if_asked() -> None:
    text = setting("fair", prefix_cache_aware={"min_shared": 16, "max_defer_s": 2.0})
    with driven(text, chunk=32) as (driver, _):
        for name in "ab":
            driver.add(name, [7] * 60)
        steps = [tuple(req.rid for req in driver.step().reqs) for _ in range(3)]
        driver.run()
        cached = driver.scheduler.tree_cache
        cached.sanity_check()
    assert steps == [("a",), ("a",), ("b",)]


# -- errors


def fails(draft: Any, view: Any) -> None:
    raise RuntimeError("no idea")


@pytest.mark.parametrize("variant", ["plain", "overlap", "chunks"])
def test_a_pass_that_fails_leaves_sglang_in_order(variant: str, caplog: pytest.LogCaptureFixture) -> None:
    with driven(None, 160, **VARIANTS[variant]) as (driver, _):
        stock = random_workload(driver, 1)
    with driven("fair", 160, **VARIANTS[variant]) as (driver, hooks):
        hooks.order.passes.passes = [fails]
        assert random_workload(driver, 1) == stock
        assert hooks.order is None
    assert caplog.text.count("no idea") == 1
    assert "SGLang schedules in its own order from now on: RuntimeError('no idea')" in caplog.text


def test_a_pass_that_fails_later_leaves_no_request_behind(caplog: pytest.LogCaptureFixture) -> None:
    with driven("fair") as (driver, hooks):
        hooks.order.passes.passes.append(DeferAll("a"))
        driver.add("b", [2] * 9, 30)
        driver.add("a", [1] * 9)
        driver.step()
        hooks.order.passes.passes.append(fails)
        driver.add("c", [3] * 9)
        driver.run()
    assert driver.admitted == ["b", "a", "c"]
    assert caplog.text.count("sageLLM") == 1


def test_a_pass_that_loses_a_request_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with driven("fifo") as (driver, hooks):
        driver.add("a", [1] * 9)
        hooks.order.passes.order = lambda *arguments: type("Order", (), {
            "waiting": [], "deferred": [], "running": []})  # fmt: skip
        driver.run()
    assert "1 requests wait, and the passes order 0 of them" in caplog.text
    assert driver.admitted == ["a"]


def test_fields_that_make_no_sense_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with driven("slo", max_running=1) as (driver, hooks):
        driver.add("a", [1] * 20, sage_ttft_s=-5)
        driver.add("b", [2] * 20, sage_ttft_s="soon", sage_tenant="t")
        driver.run()
        assert hooks.order is not None
    assert driver.admitted == ["a", "b"]
    assert "the custom_params of request a are left out: ttft_s is a number of seconds" in caplog.text
    assert caplog.text.count("of request b are left out") == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_client_can_end_the_order(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang passes on what JSON can say, in `custom_params` and as `priority`."""
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with driven(strategy, max_running=1) as (driver, hooks):
        driver.add("goal", [1] * 20, sage_ttft_s=10**400, sage_tpot_s=10**5000)
        driver.add("tenant", [2] * 20, sage_tenant=nested)
        driver.add("not", [3] * 20, sage_ttft_s=float("nan"))
        for number, priority in enumerate((10**400, -(10**400))):
            driver.add(f"priority{number}", [4 + number] * 20, priority=priority)
        for number, custom in enumerate((["sage_tenant"], "sage_tenant", 7)):
            driver.add(f"shape{number}", [6 + number] * 20).sampling_params.custom_params = custom
        driver.run()
        assert hooks.order is not None
    assert len(driver.admitted) == 8
    assert caplog.text.count("are left out") == 6


# -- requests


def test_the_fields_of_a_request() -> None:
    with driven(None) as (driver, _):
        req = driver.add(
            "a", [1, 2], priority=3, sage_tenant="t", sage_class="c", sage_ttft_s=1, sage_tpot_s=0.5
        )
        req.extra_key, req.origin_input_ids = "adapter", array("q", [1, 1 << 40])
        ours = our_request(req, 5.0, prefers_low=False)
        assert (ours.request_id, ours.priority, len(ours.tokens)) == ("a", 3, 2)
        assert (ours.namespace.tenant, ours.namespace.adapter) == ("t", "adapter")
        assert (ours.service_class, ours.slo.ttft_s, ours.slo.tpot_s) == ("c", 1, 0.5)
        assert ours.arrival_s == 100.0
        assert our_request(req, 5.0, prefers_low=True).priority == -3
        plain = driver.add("b", [1])
        plain.time_stats.created_time = plain.time_stats.wait_queue_entry_time = 0.0
        ours = our_request(plain, 5.0, prefers_low=False)
        assert (ours.priority, ours.namespace.tenant, ours.arrival_s) == (0, "", 5.0)
        driver.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_passes_learn_how_long_steps_take(overlap: bool) -> None:
    with driven("slo", overlap=overlap) as (driver, hooks):
        driver.add("a", [1] * 20, 4)
        driver.add("b", [2] * 10, 4)
        facts = []
        while driver.step() is not None or not driver.is_idle:
            facts.append(hooks.order.passes.view.last_step)
    facts = [each for each in facts if each.duration_s]
    assert facts[0][1:] == (0, 30)
    assert facts[-1][1:] == (2, 0)
    assert all(abs(each.duration_s - 0.01) < 1e-9 for each in facts[2:])


def test_a_request_that_ends_between_two_orders_is_charged() -> None:
    """Nothing waits meanwhile, so the passes are not asked; they see all that it has computed."""
    with driven(setting("fair", fairness={"quantum": 0}), max_running=4) as (driver, hooks):
        fairness = next(each for each in hooks.order.passes.passes if each.name == "fairness")
        driver.add("a", [1] * 20, 6, sage_tenant="a")
        driver.run()
        for name in ("a1", "b1"):
            driver.add(name, [ord(name[0])] * 20, 6, sage_tenant=name[0])
        driver.step()
        assert fairness.counters["a"] == pytest.approx(20 + 2 * 6)
        driver.run()


def test_states_are_released_without_a_new_request(caplog: pytest.LogCaptureFixture) -> None:
    with driven("fair", overlap=True) as (driver, hooks), caplog.at_level(logging.INFO):
        for i in range(5):
            driver.add(f"r{i}", [i + 20] * 20, 1 + i)
        driver.step()
        driver.abort("r4")
        assert len(hooks.order.passes.states) == 5
        driver.run()
        assert not hooks.order.passes.states
        driver.add("queued", [9] * 20)
        driver.abort("queued")
        driver.run()
        assert not hooks.order.passes.states
    assert "WARNING" not in caplog.text
