"""What holds of every engine, whatever it is built of and whatever happens to its requests."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from sagellm.core.types import SLO, Namespace
from tests.builders import request
from tests.effort import examples
from tests.engine_fuzz import CLASSES, TENANTS, TEXTS, Case, Run, fuzz, play

TEN_MINUTES = 600.0


def test_random_workloads() -> None:
    seen = fuzz(0, num_cases=60)
    assert seen["length"] > 400
    assert seen["error"] < 60  # those that do not fit alone; the others are checked one by one


def test_a_skipped_decode_that_must_leave_is_not_counted() -> None:
    """The one request in decode ends for lack of memory in the step in which it was put off."""
    play(Case.of(17_882))


@pytest.mark.slow
@pytest.mark.timeout(2 * TEN_MINUTES)
def test_random_workloads_for_ten_minutes() -> None:
    seconds = float(os.environ.get("SAGELLM_FUZZ_SECONDS", TEN_MINUTES))
    seen = fuzz(1_000, seconds=seconds)
    print(dict(seen))
    assert seen["length"] > 10 * seen["error"]


class EngineMachine(RuleBasedStateMachine):
    """`Run` with everything chosen by Hypothesis, so that a failure shrinks."""

    run: Run

    @initialize(seed=st.integers(0, 2**20))
    def build(self, seed: int) -> None:
        self.run = Run(Case.of(seed))
        self.num_named = 0

    @rule(
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 48),
        max_tokens=st.integers(1, 48),
        tenant=st.sampled_from(TENANTS),
        service_class=st.sampled_from(CLASSES),
        priority=st.sampled_from((0, 5, -5)),
        slo=st.sampled_from((SLO(), SLO(ttft_s=1.0))),
    )
    def arrive(
        self,
        text: list[int],
        length: int,
        max_tokens: int,
        tenant: str,
        service_class: str,
        priority: int,
        slo: SLO,
    ) -> None:
        half = max(1, self.run.longest // 2)
        self.run.arrive(
            request(
                self._name(),
                text[: min(length, half)],
                min(max_tokens, half),
                namespace=Namespace(tenant=tenant),
                service_class=service_class,
                priority=priority,
                arrival_s=self.run.clock.now(),
                slo=slo,
            )
        )

    @rule(num_steps=st.integers(1, 20), seconds=st.sampled_from((0.01, 0.2)))
    def step(self, num_steps: int, seconds: float) -> None:
        for _ in range(num_steps):
            self.run.step(seconds)

    @rule(place=st.integers(0, 7))
    def fork(self, place: int) -> None:
        if self.run.alive:
            self.run.fork(self.run.alive[place % len(self.run.alive)], self._name())

    @rule(place=st.integers(0, 7))
    def abort(self, place: int) -> None:
        if self.run.alive:
            self.run.abort(self.run.alive[place % len(self.run.alive)])

    @rule(length=st.integers(1, 48), tenant=st.sampled_from(TENANTS))
    def pin(self, length: int, tenant: str) -> None:
        self.run.pin(TEXTS[0][:length], tenant)

    @rule()
    def unpin(self) -> None:
        self.run.unpin()

    @rule()
    def clear_cache(self) -> None:
        self.run.engine.kv.clear_cache()

    @rule()
    def rest(self) -> None:
        self.run.rest()

    @rule()
    def compact(self) -> None:
        self.run.engine.compact()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.finish()

    def _name(self) -> str:
        self.num_named += 1
        return f"r{self.num_named}"


EngineMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
TestEngineMachine = EngineMachine.TestCase
