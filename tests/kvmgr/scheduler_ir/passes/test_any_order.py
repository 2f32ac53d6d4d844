"""Every pass, in any order and any company: the same tokens, everything finishes, the verifier is content."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.clock import ManualClock
from sagellm.core.plan import Draft
from sagellm.core.protocols.scheduler_ir import SchedulerPass, SchedulingView
from sagellm.core.registry import registry
from sagellm.core.types import SLO, Namespace, Request, SamplingParams, Tokens
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir import strategies
from tests.builders import PreemptAtRandom, check_books, expected_tokens, fake_engine
from tests.effort import examples


class PreemptOthers(PreemptAtRandom):
    """No request twice: an earlier pass may have preempted too."""

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        for state in [one for one in draft.running if one not in draft.preempted]:
            if self.times and self.random.random() < self.share:
                self.times -= 1
                draft.preempt(state)


CLOSES = {"vllm_like"}
OPTIONS: dict[str, dict[str, object]] = {
    "prefix_cache_aware": {"min_shared": 4, "max_wait_s": 2.0},
    "priority_based": {"preempt": True, "age_s": 3.0},
    "slo_aware": {"ttft_s": 1.0, "tpot_s": 0.1, "min_prefill": 2, "max_wait_s": 2.0},
    "fairness": {"quantum": 8.0},
    "batching_efficiency": {"max_wait_s": 2.0},
    "lifetime_aware": {"max_wait_s": 2.0, "max_defer_s": 2.0},
    "admission": {"max_defer_s": 2.0, "min_samples": 2},
    "pd_separation": {
        "sites": {"other": {"link_bytes_s": 1e12, "token_s": 1e-6, "step_s": 1e-4, "seq_s": 1e-6}},
        "bytes_per_token": 1,
    },
    "af_separation": {"attention": ("a0", "a1"), "ffn": ("f0",)},
    "chunked_prefill": {"chunk_size": 7},
}
NAMES = sorted(set(registry("pass").names()) - CLOSES)

specs = st.lists(
    st.tuples(
        st.integers(0, 3),  # family of prompts
        st.integers(1, 30),  # length
        st.integers(1, 12),  # output
        st.integers(0, 2),  # priority
        st.sampled_from("abc"),  # tenant
        st.sampled_from([None, 0.05, 5.0]),  # goal
    ),
    min_size=1,
    max_size=12,
)
orders = st.lists(st.sampled_from(NAMES), unique=True).flatmap(st.permutations)


def prompt(family: int, length: int) -> list[int]:
    """Prompts of one family share their beginning."""
    return [(family * 7 + i * (1 + (i > 17) * length)) % 97 for i in range(length)]


def run(
    passes: list[SchedulerPass],
    requests: list[tuple[int, int, int, int, str, float | None]],
    *,
    num_blocks: int = 24,
    rows: int = 3,
    budget: int = 16,
    stagger: int = 1,
    tick_s: float = 0.1,
) -> None:
    """All requests through one engine whose clock moves `tick_s` a step."""
    backend = TokenMemoryBackend(num_blocks=num_blocks, max_num_seqs=rows, max_model_len=48)
    engine = fake_engine(backend, max_batched_tokens=max(budget, rows), passes=passes)
    clock = engine.clock
    assert isinstance(clock, ManualClock)
    got: dict[str, list[int]] = {}

    def step() -> None:
        for output in engine.step():
            assert output.error is None
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
        check_books(engine)
        clock.advance(tick_s)

    for index, (family, length, max_tokens, priority, tenant, goal_s) in enumerate(requests):
        engine.add(
            Request(
                str(index),
                Tokens(prompt(family, length)),
                SamplingParams(max_tokens=max_tokens),
                arrival_s=clock.now(),
                priority=priority,
                namespace=Namespace(tenant=tenant),
                slo=SLO(goal_s, goal_s),
            )
        )
        for _ in range(stagger):
            step()
    for _ in range(2000):
        if not engine.has_work():
            break
        step()
    assert not engine.has_work()
    for index, (family, length, max_tokens, *_) in enumerate(requests):
        assert got[str(index)] == expected_tokens(backend, prompt(family, length), max_tokens)
    assert engine.kv.block_states().active == 0


@settings(max_examples=examples(80), deadline=None)
@given(
    requests=specs,
    order=orders,
    tuned=st.booleans(),
    num_blocks=st.integers(12, 48),
    rows=st.integers(1, 5),
    budget=st.integers(4, 40),
    stagger=st.integers(0, 2),
    tick_s=st.sampled_from([0.0, 0.1, 5.0]),
    preempt=st.sampled_from([0.0, 0.2]),
)
def test_same_tokens_in_any_order_of_any_passes(
    requests: list[tuple[int, int, int, int, str, float | None]],
    order: list[str],
    tuned: bool,
    num_blocks: int,
    rows: int,
    budget: int,
    stagger: int,
    tick_s: float,
    preempt: float,
) -> None:
    passes = [registry("pass").create(name, **(OPTIONS.get(name, {}) if tuned else {})) for name in order]
    passes.insert(len(passes) // 2, PreemptOthers(7, preempt))
    run(passes, requests, num_blocks=num_blocks, rows=rows, budget=budget, stagger=stagger, tick_s=tick_s)


@pytest.mark.parametrize("name", strategies.STRATEGIES)
@settings(max_examples=15, deadline=None)
@given(requests=specs, num_blocks=st.integers(12, 48), tick_s=st.sampled_from([0.0, 0.1, 5.0]))
def test_every_preset_gives_the_same_tokens(
    name: str, requests: list[tuple[int, int, int, int, str, float | None]], num_blocks: int, tick_s: float
) -> None:
    run(strategies.make(name), requests, num_blocks=num_blocks, tick_s=tick_s)
