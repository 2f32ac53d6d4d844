"""Which hybrid instances compute prompts: decisions by number, slowness, and what stays true."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagellm.control_plane.router import instance_parts
from sagellm.control_plane.router._what_if import FleetForm
from sagellm.control_plane.router.instance_parts import FEWEST, Parts, PartsOptions
from sagellm.core.protocols.router import ExecutionInstance, InstanceType, RequestMetadata
from sagellm.core.types import SLO, Tokens
from tests.effort import examples

OPTIONS = PartsOptions(
    tokens=0, margin=1.0, gain=0.03, rounds=2, chunk=100, window=64, transfer_s=0.0, transfer_token_s=0.0
)
GENERAL, PREFILLING, DECODING = InstanceType.GENERAL, InstanceType.PREFILLING, InstanceType.DECODING
TIGHT, LOOSE, NONE = SLO(tpot_s=0.015), SLO(ttft_s=2.0), SLO()


def hybrids(count: int) -> list[ExecutionInstance]:
    return [
        ExecutionInstance(
            f"h{number}", InstanceType.HYBRID, prefill_token_s=1e-3, step_s=0.01, reported_s=1.0,
            num_blocks=1000, block_size=16,
        )
        for number in range(count)
    ]  # fmt: skip


def serve(
    parts: Parts, slo: SLO, count: int = 200, *, instances: Sequence[ExecutionInstance] = (), first: int = 0
) -> list[int]:
    """Requests of 100 and 11 tokens, three of them twice a second. Returns how many instances computed
    prompts, after each."""
    found, fleet = [], instances or hybrids(2)
    for number in range(first, first + count):
        request = RequestMetadata(str(number), Tokens(range(100)), slo=slo)
        parts.place(request, 100, fleet, 0.5 * (number // 3))
        parts.answered(11, 0.2, 0.1, 0.01)
        parts.check()
        found.append(parts.form.num_prefill)
    return found


def test_prompts_are_separated_where_answers_would_be_late() -> None:
    parts = Parts(OPTIONS)
    placed = serve(parts, TIGHT, 40) + serve(parts, TIGHT, 160, first=40)
    assert placed[: FEWEST - 1] == [0] * (FEWEST - 1), "nothing is known yet"
    assert placed[-1] == 1
    assert parts.shares[FleetForm(0, True)] == pytest.approx(2 / 3, abs=0.03)
    assert parts.shares[FleetForm(1, True)] == 1.0
    assert sorted(kind.value for kind in parts.kinds.values()) == ["decoding", "prefilling"]


def test_whole_instances_stay_where_nothing_is_late() -> None:
    parts = Parts(OPTIONS)
    assert set(serve(parts, LOOSE)) == {0}
    assert set(parts.kinds.values()) == {GENERAL}


def test_without_goals_instances_may_do_everything() -> None:
    parts = Parts(OPTIONS)
    assert set(serve(parts, NONE)) == {0}
    assert parts.kinds == {}


def test_a_change_takes_rounds_in_a_row_and_a_gain() -> None:
    parts = Parts(replace(OPTIONS, rounds=3))
    parts.place(RequestMetadata("1", Tokens([1]), slo=TIGHT), 1, hybrids(4), 0.0)
    whole, one, other = FleetForm(0, True), FleetForm(1, True), FleetForm(2, False)
    for shares, expected in [
        ((0.50, 0.60, 0.10), whole),
        ((0.50, 0.60, 0.10), whole),
        ((0.50, 0.51, 0.10), whole),  # not by 3 %: it begins again
        ((0.50, 0.60, 0.10), whole),
        ((0.50, 0.60, 0.70), whole),  # another one: again
        ((0.50, 0.60, 0.70), whole),
        ((0.50, 0.60, 0.70), other),
        ((0.50, 0.71, 0.70), other),
    ]:
        parts._decide(dict(zip((whole, one, other), shares, strict=True)), 4)
        assert parts.form == expected, shares


def test_large_fleets_are_modelled_by_eight() -> None:
    parts = Parts(replace(OPTIONS, rounds=1))
    parts.place(RequestMetadata("1", Tokens([1]), slo=TIGHT), 1, hybrids(20), 0.0)
    for _ in range(2):
        parts._decide(
            {FleetForm(number, True): share for number, share in enumerate((0.1, 0.2, 0.9, 0.2))}, 8
        )
        assert parts.form == (5, True)


def test_a_form_that_disappoints_is_left_and_tried_much_later() -> None:
    parts, fleet, now_s = Parts(replace(OPTIONS, rounds=1)), hybrids(2), 0.0
    parts._work = itertools.repeat(None)  # shares are given here
    shares, found = {FleetForm(0, True): 0.5, FleetForm(1, True): 0.9}, []
    for _ in range(120):
        met = 0.5 if parts.form.num_prefill == 0 else 0.3
        for number in range(20):
            now_s += 0.5
            request = RequestMetadata(str(number), Tokens([1]), slo=TIGHT)
            parts.place(request, 1, fleet, now_s)
            parts.answered(11, 0.2, 0.1, 0.01 if number < 20 * met else 0.03)
        parts._decide(shares, 2)
        found.append(parts.form.num_prefill)
    assert found[0] == 1, "as the model says"
    assert found[12] == 0, "as is seen"
    assert 0.6 < sum(number == 0 for number in found) / len(found) < 1.0
    assert 1 in found[20:]


def test_what_errs_about_whole_instances_must_foretell_more_of_others() -> None:
    parts, fleet, found = Parts(replace(OPTIONS, rounds=1)), hybrids(2), []
    parts._work = itertools.repeat(None)  # shares are given here
    for foretold in (0.36, 0.5, 0.75):
        for number in range(400):  # half of them meet their goals, where 0.25 are foretold
            parts.place(RequestMetadata(str(number), Tokens([1]), slo=TIGHT), 1, fleet, 0.5 * number)
            parts.answered(11, 0.2, 0.1, 0.01 if number % 2 else 0.03)
        parts._decide({FleetForm(0, True): 0.25, FleetForm(1, True): foretold}, 2)
        found.append((parts.form.num_prefill, round(parts.trust[False], 2)))
    assert found == [(0, 1.3), (0, 1.51), (1, 1.66)]


def test_hopeless_forms_are_tried_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[FleetForm] = []

    def replayed(*given: Any, **_: Any) -> Generator[None, None, float]:
        tried.append(given[3])
        yield
        return 0.1 if given[3].num_prefill == 1 and not given[3].rescues else 0.5

    monkeypatch.setattr(instance_parts, "replay", replayed)
    serve(Parts(OPTIONS), TIGHT, 100)
    assert 3 * tried.count(FleetForm(1, False)) < tried.count(FleetForm(1, True))
    assert tried.count(FleetForm(1, False)) > 2


def test_more_prefill_instances_may_help_where_few_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def replayed(*given: Any, **_: Any) -> Generator[None, None, float]:
        yield
        return (0.05, 0.1, 0.9)[given[3].num_prefill]

    monkeypatch.setattr(instance_parts, "replay", replayed)
    assert serve(Parts(OPTIONS), TIGHT, 100, instances=hybrids(3))[-1] == 2


def test_a_decision_for_a_fleet_that_is_gone_is_none() -> None:
    parts = Parts(replace(OPTIONS, rounds=1))
    for count in (0, 1):
        parts.place(RequestMetadata("1", Tokens([1]), slo=TIGHT), 1, hybrids(count), 0.0)
        parts._decide({FleetForm(0, True): 0.1, FleetForm(1, True): 0.9}, 2)
        assert parts.form.num_prefill == 0


def test_parts_are_kept_and_lost_instances_replaced() -> None:
    parts = Parts(OPTIONS)
    fleet = [replace(each, num_running=10 - number) for number, each in enumerate(hybrids(4))]
    request = RequestMetadata("1", Tokens([1]), slo=TIGHT)
    parts.form = FleetForm(2, True)
    first = parts.place(request, 1, fleet, 0.0)
    assert [first[f"h{number}"] for number in range(4)] == [DECODING, DECODING, PREFILLING, PREFILLING]
    busier = [replace(each, num_running=each.num_running * (number > 1)) for number, each in enumerate(fleet)]
    assert parts.place(request, 1, busier, 0.0) is first, "load alone changes nothing"
    rest = parts.place(request, 1, fleet[:3], 0.0)
    assert (rest["h2"], rest["h1"], rest["h0"]) == (PREFILLING, PREFILLING, DECODING)
    assert set(parts.place(request, 1, fleet[:2], 0.0).values()) == {PREFILLING, DECODING}
    assert parts.place(request, 1, fleet[:1], 0.0) == {}, "one instance has no part"


class PartsMachine(RuleBasedStateMachine):
    """Requests with and without goals, while instances come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.now_s, self.fleet = Parts(OPTIONS), 0.0, hybrids(3)

    @rule(count=st.integers(1, 30), goal=st.sampled_from([TIGHT, LOOSE, NONE]), gap_s=st.floats(0, 50))
    def serve(self, count: int, goal: SLO, gap_s: float) -> None:
        for number in range(count):
            self.now_s += gap_s / count
            request = RequestMetadata(str(number), Tokens(range(50 + number)), slo=goal)
            kinds = self.parts.place(request, 50, self.fleet, self.now_s)
            assert not kinds or set(kinds) == {
                each.instance_id for each in self.fleet if each.kind is InstanceType.HYBRID
            }
            self.parts.answered(1 + number, 0.1 * number, 0.1, 0.01)

    @rule(count=st.integers(0, 12), whole=st.integers(0, 2))
    def change(self, count: int, whole: int) -> None:
        self.fleet = hybrids(count) + [ExecutionInstance(f"g{number}") for number in range(whole)]

    @invariant()
    def adds_up(self) -> None:
        self.parts.check()
        decoding = [kind for kind in self.parts.kinds.values() if kind is not PREFILLING]
        assert decoding or not self.parts.kinds, "some instance always takes answers"


TestPartsMachine = PartsMachine.TestCase
TestPartsMachine.settings = settings(max_examples=examples(20), stateful_step_count=10, deadline=None)
