"""Plans on small scenarios, kept as text; and what each scenario is there to show."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import plan_golden
from sagellm.core.plan import ExecutionPlan
from sagellm.kvmgr.scheduler_ir.text import parse_plan

Plans = list[ExecutionPlan]


def plans_of(name: str) -> Plans:
    """The kept ones."""
    return [parse_plan(text) for text in plan_golden.kept(name).split("\n\n")[1:]]


@pytest.mark.parametrize("name", plan_golden.SCENES)
def test_plans_are_the_golden_ones(name: str) -> None:
    log = plan_golden.run(plan_golden.SCENES[name])
    assert plan_golden.text(plan_golden.SCENES[name]) == plan_golden.kept(name), plan_golden.COMMAND
    assert plans_of(name) == [step.plan for step in log.steps], "the text is complete"


def _mixes(plans: Plans) -> bool:
    return any(plan.decode_rows and plan.prefills and not plan.prefills[0].samples for plan in plans)


def _preempts_and_resumes(plans: Plans) -> bool:
    names = [name for plan in plans for name in plan.preempted]
    again = [
        one.request_id for plan in plans for one in plan.joined if len(one.tokens) > 4 * one.num_prompt_tokens
    ]
    return bool(names) and set(again) == set(names)


def _reuses(plans: Plans) -> bool:
    return [one.num_computed for plan in plans for one in plan.joined if one.request_id == "b"] == [8]


def _urgent_first(plans: Plans) -> bool:
    order = [one.request_id for plan in plans for one in plan.joined]
    return order.index("c") < order.index("b")


def _waits(plans: Plans) -> bool:
    """One that waits says so in each step, and enters the row that the other leaves."""
    waiting = [i for i, plan in enumerate(plans) for one in plan.decisions if one.action == "wait"]
    entry = next(i for i, plan in enumerate(plans) for one in plan.joined if one.request_id == "b")
    return waiting == list(range(1, entry)) and plans[entry].left == (0,)


@pytest.mark.parametrize(
    ("name", "shows"),
    [
        ("chunked_prefill_and_decode", _mixes),
        ("preemption_and_resume", _preempts_and_resumes),
        ("shared_prefix", _reuses),
        ("priorities", _urgent_first),
        ("waits_for_memory", _waits),
    ],
)
def test_a_scenario_shows_what_its_name_says(name: str, shows: Callable[[Plans], bool]) -> None:
    assert shows(plans_of(name))
