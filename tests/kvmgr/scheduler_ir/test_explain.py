"""Passes under watch, and the story of a run."""

from __future__ import annotations

from dataclasses import replace

from sagellm.core.plan import Draft, PhasePlacement, Transfer
from sagellm.core.protocols.scheduler_ir import SchedulerPass, SchedulingView
from sagellm.core.types import Request
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir.explain import Effect, ScheduleLog, WatchedPass
from sagellm.kvmgr.scheduler_ir.passes.memory_aware_preemption import MemoryAwarePreemptionPass
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from tests.builders import fake_engine, request


class Silent:
    """A pass of a user that changes much and says nothing."""

    name = "silent"

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        for chunk in list(draft.chunks.values()):
            if chunk.state.request_id == "cut":
                chunk.num_tokens = 3
            elif chunk.state.request_id == "drop":
                draft.hold(chunk.state)
        for state in draft.running:
            if state.request_id == "held" and state.decoding:
                draft.hold(state)
            elif state.request_id == "out" and state.decoding:
                draft.preempt(state)


class Placing:
    """A pass of a user that computes decode elsewhere."""

    name = "placing"

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        draft.placements["a"] = PhasePlacement(decode="d0", ffn="f0")
        if draft.decodes.states:
            draft.transfers.append(Transfer("a", (), "d0"))


def watched(
    requests: list[Request], passes: list[SchedulerPass], *, num_blocks: int = 64, budget: int = 16
) -> tuple[Engine, ScheduleLog]:
    """An engine under watch that has run until all requests ended."""
    engine = fake_engine(TokenMemoryBackend(num_blocks=num_blocks), max_batched_tokens=budget, passes=passes)
    log = ScheduleLog()
    engine.scheduler.use(log.watch(engine.scheduler.order))
    arriving = [one.request_id for one in requests]
    for one in requests:
        engine.add(one)
    while engine.has_work() and len(log.steps) < 60:
        outputs = engine.step()
        assert engine.last_plan is not None
        log.record(engine.last_plan, len(log.steps) * 0.5, arriving, outputs, engine.stats())
        arriving = []
    return engine, log


def test_a_watched_pass_is_the_same_pass() -> None:
    inner = MemoryAwarePreemptionPass()
    one = WatchedPass(inner, [])
    assert (one.name, one.closes, one.inner) == ("memory_aware_preemption", False, inner)
    inner.closes = True  # type: ignore[attr-defined]
    assert WatchedPass(inner, []).closes


def test_what_a_pass_does_in_silence_is_seen() -> None:
    requests = [request(name, range(i * 20, i * 20 + 6), 6) for i, name in enumerate(["held", "out"])]
    requests += [request(name, range(60 + i, 80 + i), 2) for i, name in enumerate(["cut", "drop"])]
    _, log = watched(requests, [Silent()], budget=20)
    silent = {
        (one.request_id, one.text) for step in log.steps for one in step.effects if one.pass_name == "silent"
    }
    assert ("held", "held: it computes nothing") in silent
    assert ("out", "preempted") in silent
    assert ("cut", "computes tokens 8:11, before it 8:20") in silent


def test_a_recorded_decision_is_no_unrecorded_effect() -> None:
    _, log = watched([request("a", range(8), 3)], [])
    assert [one.effects for one in log.steps] == [[]] * 3
    assert log.story("a") == [
        "step 0  arrived",
        "        chunked_prefill: admit, 8 tokens from 0 on",
        "        joins in row 0 with 0 tokens cached, blocks [0, 1]",
        "        computes prompt tokens 0:8, and draws a token",
        "step 1  gets blocks [2] from 2 on",
        "        decodes",
        "step 2  decodes",
        "        ends (length) after 3 tokens",
    ]


def test_placements_and_transfers_are_effects() -> None:
    _, log = watched([request("a", range(8), 2)], [Placing()])
    placed, sent = (step.effects for step in log.steps)
    assert placed == [Effect("placing", "a", "placed: decode @d0, ffn @f0")]
    assert Effect("placing", "a", "its blocks are sent to @d0") in sent
    assert "        sends blocks [0:3] to @d0" in log.story("a")
    assert '%0 = place "a" decode @d0 ffn @f0' in log.steps[0].text


def test_a_change_of_order_is_an_effect_on_the_request_that_gains() -> None:
    requests = [request("low", range(30), 2), request("high", range(40, 50), 2, priority=1)]
    _, log = watched(requests, [PriorityBasedPass()])
    assert log.steps[0].effects[0] == Effect("priority_based", "high", "moved in the queue from place 2 to 1")
    assert not any(one.request_id == "low" and "moved" in one.text for one in log.steps[0].effects)


def test_a_request_that_is_preempted_and_resumes() -> None:
    requests = [request("a", range(7), 12), request("b", range(20, 27), 12)]
    _, log = watched(requests, [], num_blocks=5)
    story = "\n".join(log.story("b"))
    assert "memory_aware_preemption: preempt, a comes first and needs its blocks" in story
    assert "preempted: its blocks are given back, it waits again" in story
    assert "resumes in row" in story
    assert story.endswith("ends (length) after 12 tokens")
    assert story.index("preempted: ") < story.index("resumes in row")
    assert log.story("nobody") == []


def test_steps_as_text() -> None:
    _, log = watched([request("a", range(8), 3)], [])
    step = log.steps[0]
    assert step.title == (
        "# 0.000 s: 0 decode and 8 prompt tokens; then 1 run, 0 wait; blocks: 2 used, 0 cached, 62 free"
    )
    assert replace(step, load=None).title == "# 0.000 s: 0 decode and 8 prompt tokens"
    shown = replace(step, effects=[Effect("silent", "a", "held")]).text.splitlines()
    assert shown[0] == '# silent "a": held'
    assert shown[1] == "step 0 @local"
    assert "of 8 tokens" in shown[3]
    assert log.diff_text(0).splitlines()[0].startswith('+ "a" joined row 0')
    assert log.diff_text(1).splitlines() == [
        '~ "a" computes decode at 8, before prompt tokens 0:8, samples',
        '+ "a" blocks [2] from 2',
    ]
