"""Presets by name, and what they cost: operations are counted, times are only printed."""

from __future__ import annotations

import pytest

from sagellm.core.errors import UnknownNameError
from sagellm.core.plan import RequestState
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.registry import registry
from sagellm.kvmgr.scheduler_ir import strategies
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from tests.kvmgr.scheduler_ir.passes.desk import Desk, DeskView, admit, state

OPEN = [name for name in strategies.STRATEGIES if name not in ("fifo", "vllm-like")]
CLOSING = {"chunked_prefill", "memory_aware_preemption"}


def test_the_strategies_are_those_of_the_design() -> None:
    assert set(strategies.STRATEGIES) == {
        "fifo",
        "priority",
        "slo",
        "adaptive",
        "throughput",
        "fair",
        "vllm-like",
    }


@pytest.mark.parametrize("name", strategies.STRATEGIES)
def test_a_strategy_is_made_of_new_passes_in_its_order(name: str) -> None:
    first, second = strategies.make(name), strategies.make(name)
    assert [one.name for one in first] == [one for one, _ in strategies.STRATEGIES[name]]
    assert not {id(one) for one in first} & {id(one) for one in second}


def test_options_override_those_of_the_strategy() -> None:
    made = strategies.make("priority", {"priority_based": {"age_s": 7.0}})
    priority = next(one for one in made if one.name == "priority_based")
    assert isinstance(priority, PriorityBasedPass)
    assert (priority.age_s, priority.preempt) == (7.0, True)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'adaptive'"):
        strategies.make("adaptiv")
    with pytest.raises(UnknownNameError, match="it has chunked_prefill, memory_aware_preemption"):
        strategies.make("fifo", {"fairness": {}})
    with pytest.raises(UnknownNameError, match="no option 'speed'"):
        strategies.make("slo", {"slo_aware": {"speed": 1}})


@pytest.mark.parametrize("name", registry("pass").names())
def test_the_name_of_a_pass_is_its_files(name: str) -> None:
    assert registry("pass").create(name).name == name


class Untouchable(list[RequestState]):
    """A list that may be measured, and nothing else."""

    def __iter__(self) -> object:  # type: ignore[override]
        raise AssertionError("the running were walked in a step in which nothing waits")

    def __getitem__(self, place: object) -> object:  # type: ignore[override]
        raise AssertionError("the running were looked at in a step in which nothing waits")


class _Chain:
    """Passes of a preset, one after another, as one."""

    name = "chain"

    def __init__(self, passes: list[SchedulerPass]) -> None:
        self.passes = passes

    def __call__(self, draft: object, view: object) -> None:
        for one in self.passes:
            one(draft, view)  # type: ignore[arg-type]


def _open_passes(name: str) -> list[SchedulerPass]:
    return [one for one in strategies.make(name) if one.name not in CLOSING]


@pytest.mark.parametrize("name", OPEN)
def test_a_step_in_which_nothing_waits_touches_no_request(name: str) -> None:
    desk = Desk(_Chain(_open_passes(name)))
    desk.running = [admit(state(str(i)), 8) for i in range(64)]
    desk.step(num_new_running=64)
    for _ in range(3):
        desk.step()
    desk.draft.running = Untouchable(desk.running)
    desk.scheduler_pass(desk.draft, desk.view)


class CountingView(DeskView):
    """Counts prices too."""

    num_prices = 0

    def blocks_to_admit(self, hit: PrefixHit, num_tokens: int) -> int:
        self.num_prices += 1
        return super().blocks_to_admit(hit, num_tokens)


@pytest.mark.parametrize("name", OPEN)
def test_new_requests_are_looked_up_once_by_all_passes_together(name: str) -> None:
    desk = Desk(_Chain(_open_passes(name)), CountingView())
    desk.waiting = [
        state(str(i), 16, tenant=f"t{i % 3}", priority=i % 2, ttft_s=1.0 + i % 5) for i in range(256)
    ]
    desk.step()
    view = desk.view
    assert isinstance(view, CountingView)
    assert view.num_matches == 256
    assert view.num_prices <= 256
    for _ in range(5):
        desk.step()
    assert view.num_matches == 256  # the unchanged are not looked up again
