"""Which request is preempted when memory is short, and which KV is saved: golden decisions."""

from __future__ import annotations

import pytest

from sagellm.core.errors import ConfigError
from sagellm.core.plan import Chunk, Draft, StepStart
from sagellm.kvmgr.scheduler_ir import strategies
from sagellm.kvmgr.scheduler_ir.passes.memory_aware_preemption import VICTIMS
from tests.kvmgr.scheduler_ir.passes.desk import DeskView, admit, state

SCENE = [  # name, tokens computed, arrival, priority
    ("first", 8, 3.0, 0),
    ("long", 80, 1.0, 0),
    ("short", 12, 5.0, 0),
    ("middle", 40, 9.0, 0),
    ("last", 20, 4.0, 0),
]
"""In batch order; blocks of four tokens, none free."""


def decide(view: DeskView, scene: list[tuple[str, int, float, int]] = SCENE, **options: object) -> Draft:
    """`first` needs one block more, the others none."""
    running = [
        admit(state(name, length + 4, arrival_s=arrival_s, priority=priority), length)
        for name, length, arrival_s, priority in scene
    ]
    draft = Draft(StepStart(0, 10.0), 64, running, [])
    draft.chunks["first"] = Chunk(running[0], 8, 4)
    view.available = 0
    strategies.make_pass("memory_aware_preemption", options)(draft, view)
    return draft


def left(draft: Draft) -> list[str]:
    return [one.request_id for one in draft.preempted]


def test_each_policy_has_its_victim() -> None:
    chosen = {name: left(decide(DeskView(), victims=name)) for name in VICTIMS}
    assert chosen == {"last": ["last"], "newest": ["middle"], "most_blocks": ["long"], "cheapest": ["short"]}


def test_the_cheapest_takes_the_least_time_to_come_back_for_each_block() -> None:
    """Computing again takes 1 s a token, loading from a tier 2 s a block."""
    scene = [*SCENE, ("ragged", 37, 0.0, 0), ("whole", 40, 0.0, 0)]
    without, tiers = DeskView(token_s=1.0), DeskView(token_s=1.0, load_s=2.0)
    assert left(decide(without, scene, victims="cheapest")) == ["ragged"], "3.7 s a block"
    assert left(decide(tiers, scene, victims="cheapest")) == ["short"], "2 s a block, and the fewest tokens"


@pytest.mark.parametrize("victims", VICTIMS)
def test_only_later_requests_are_preempted_and_the_lowest_priority_first(victims: str) -> None:
    scene = [SCENE[0], *((name, n, at, 1) for name, n, at, _ in SCENE[1:4]), ("last", 20, 4.0, 0)]
    assert left(decide(DeskView(), scene, victims=victims)) == ["last"]
    front = [("before", 90, 99.0, -1), *scene]
    running = [admit(state(name, n + 4, arrival_s=at, priority=p), n) for name, n, at, p in front]
    draft = Draft(StepStart(0, 10.0), 64, running, [])
    draft.chunks["first"] = Chunk(running[1], 8, 4)
    strategies.make_pass("memory_aware_preemption", {"victims": victims})(draft, DeskView(available=0))
    assert left(draft) == ["last"], "no earlier request is preempted"


@pytest.mark.parametrize("options", [{"victims": "oldest"}, {"watermark": "x"}, {"watermark": -3}])
def test_wrong_options_are_refused_with_what_there_is(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"is one of last, newest|a number of blocks, 0 or"):
        strategies.make_pass("memory_aware_preemption", options)
