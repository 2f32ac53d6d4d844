"""How long passes promise the same decisions: until a time, while the cache is the same, or not at all."""

from __future__ import annotations

import pytest

from sagellm.core.plan import Chunk, Draft, StepStart
from sagellm.core.protocols.scheduler_ir import ALWAYS_STABLE, SchedulerPass, SchedulingView, Stability
from sagellm.core.registry import registry
from sagellm.engines.simulator.fast_forward import joint_stability
from sagellm.kvmgr.scheduler_ir import DecodeBatch
from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass
from sagellm.kvmgr.scheduler_ir.passes.fairness import FairnessPass
from sagellm.kvmgr.scheduler_ir.passes.memory_aware_preemption import MemoryAwarePreemptionPass
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from sagellm.kvmgr.scheduler_ir.passes.slo_aware import SLOAwarePass
from sagellm.kvmgr.scheduler_ir.passes.vllm_like import VllmLikePass
from tests.kvmgr.scheduler_ir.passes.desk import Desk, DeskView, admit, state


def draft_of(desk: Desk, *, chunk: int = 0, budget: int = 16) -> Draft:
    """One request decodes, and one computes its prompt where `chunk` tokens of that are left."""
    batch, runs = DecodeBatch(1000, 4), admit(state("runs", 9), 8)
    batch.enter(runs, 40, 100)
    runs.decoding = True
    made = Draft(StepStart(9, desk.now_s), budget, [runs], list(desk.waiting), decodes=batch)
    if chunk:
        prompt = admit(state("prompt", 4 + chunk), 4)
        made.running.append(prompt)
        made.chunks["prompt"] = Chunk(prompt, 4, chunk)
    return made


def ask(desk: Desk, one: SchedulerPass, **how: int) -> Stability | None:
    return joint_stability([one], draft_of(desk, **how), desk.view)


def desk_with(one: SchedulerPass, view: DeskView | None = None) -> Desk:
    """Two wait, and the pass has seen them."""
    desk = Desk(one, view)
    desk.waiting = [state("a", 20, arrival_s=1.0), state("b", 20, arrival_s=2.0)]
    desk.now_s = 3.0
    desk.step()
    return desk


def test_until_the_first_rises() -> None:
    one = PriorityBasedPass(age_s=10.0)
    assert ask(desk_with(one), one) == Stability(until_s=11.0)
    without_age = PriorityBasedPass(age_s=None)
    assert ask(desk_with(without_age), without_age) == ALWAYS_STABLE


def test_who_must_make_way_is_a_reason_to_plan() -> None:
    one = PriorityBasedPass(preempt=True)
    desk = Desk(one)
    desk.waiting, desk.running = [state("urgent", priority=1)], [admit(state("runs", 9), 8)]
    desk.view.num_free_rows = 0
    desk.step(num_new_running=1)
    assert ask(desk, one) is None


def test_until_a_request_is_promoted_and_while_the_cache_is_the_same() -> None:
    one = PrefixCacheAwarePass(max_wait_s=5.0)
    desk = desk_with(one)
    said = ask(desk, one)
    assert said is not None
    assert 5.9 < said.until_s <= 6.0
    assert said.same_cache
    desk.view.version += 1
    assert ask(desk, one) is None, "waiting requests are looked up again"


def test_a_promotion_without_credit_does_not_come_with_time() -> None:
    one = PrefixCacheAwarePass(max_wait_s=1.0)
    desk = desk_with(one)
    said = ask(desk, one)
    assert said == Stability(same_cache=True)


@pytest.mark.parametrize("one", [PriorityBasedPass(), PrefixCacheAwarePass(), FairnessPass()])
def test_a_queue_that_the_pass_has_not_seen(one: SchedulerPass) -> None:
    desk = desk_with(one)
    desk.waiting.append(state("c"))
    assert ask(desk, one) is None


def test_every_token_changes_the_order_of_competing_tenants() -> None:
    one = FairnessPass()
    assert ask(desk_with(one), one) == ALWAYS_STABLE
    desk = Desk(one := FairnessPass())
    desk.waiting = [state("a", tenant="x"), state("b", tenant="y")]
    desk.step()
    assert ask(desk, one) is None


def test_the_first_that_does_not_fit() -> None:
    for available, said in ((5, None), (4, ALWAYS_STABLE)):
        one = VllmLikePass()
        assert ask(desk_with(one, DeskView(available=available)), one) == said
    both: list[SchedulerPass] = [ChunkedPrefillPass(), MemoryAwarePreemptionPass(watermark=1)]
    for available, said in ((6, None), (5, ALWAYS_STABLE)):
        view = DeskView(available=available)
        desk = desk_with(ChunkedPrefillPass(), view)
        assert joint_stability(both, draft_of(desk), view) == said


def test_a_prefix_hit_of_the_head_changes_the_cache_in_every_step() -> None:
    view = DeskView(available=1, cached={"a": 4})
    desk = desk_with(ChunkedPrefillPass(), view)
    assert ask(desk, ChunkedPrefillPass()) is None


@pytest.mark.parametrize("one", [VllmLikePass(), ChunkedPrefillPass()])
def test_a_prompt_that_fills_the_step_leaves_nothing_to_waiting_requests(one: SchedulerPass) -> None:
    desk = desk_with(one)
    draft = draft_of(desk, chunk=40)
    assert joint_stability([one], draft, desk.view) == ALWAYS_STABLE
    assert draft.chunks["prompt"].num_tokens == 15
    assert ask(desk, one, chunk=15) is None, "its end draws a token"


def test_a_shorter_chunk_leaves_tokens_to_others() -> None:
    for one in (VllmLikePass(long_prefill_tokens=8), ChunkedPrefillPass(chunk_size=8)):
        assert ask(desk_with(one), one, chunk=40) is None


def test_a_pass_that_cannot_tell() -> None:
    one = SLOAwarePass()
    desk = Desk(one)
    assert ask(desk, one) == ALWAYS_STABLE, "no request waits"
    assert ask(desk, one, chunk=40) is None
    desk.waiting = [state("a")]
    assert ask(desk, one) is None

    class Unknown:
        name = "unknown"

        def __call__(self, draft: Draft, view: SchedulingView) -> None: ...

    assert ask(Desk(Unknown()), Unknown()) is None


def test_promises_are_joined() -> None:
    assert Stability(3.0).and_also(Stability(2.0, same_cache=True)) == Stability(2.0, same_cache=True)


@pytest.mark.parametrize("name", registry("pass").names())
def test_a_class_that_overrides_call_overrides_stable_until(name: str) -> None:
    """The promise describes `__call__`: an inherited promise would describe another one."""
    classes = type(registry("pass").create(name)).__mro__
    if not hasattr(classes[0], "stable_until"):
        return
    made_by = next(i for i, made in enumerate(classes) if "stable_until" in vars(made))
    runs_by = next(i for i, made in enumerate(classes) if "__call__" in vars(made))
    assert made_by <= runs_by
