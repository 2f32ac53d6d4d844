"""A user of the library adds a pass: one class in one file, named by its path, nothing else touched."""

from __future__ import annotations

from sagellm.core.config import SchedulerConfig
from sagellm.core.plan import Draft
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.registry import registry
from sagellm.engines.simulator import TokenMemoryBackend
from tests.builders import expected_tokens, fake_engine, request, run_all

PATH = "tests.kvmgr.scheduler_ir.test_user_pass:OddOnesLastPass"


class OddOnesLastPass:
    """Requests for an odd number of tokens come last."""

    name = "odd_ones_last"

    def __init__(self, modulus: int = 2) -> None:
        self.modulus = modulus

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        draft.waiting.sort(key=lambda state: (state.request.params.max_tokens or 0) % self.modulus)
        for state in draft.waiting[:1]:
            draft.record(self.name, state, "prefer", "it asks for an even number of tokens")


def test_a_pass_from_outside_is_found_by_its_path_and_takes_options() -> None:
    made = registry("pass").create(PATH, modulus=3)
    assert (made.name, made.modulus) == ("odd_ones_last", 3)
    assert SchedulerConfig(passes=(PATH, "priority_based")).passes == (PATH, "priority_based")


def test_it_runs_between_ours_and_its_reasons_are_in_the_plan() -> None:
    passes = [registry("pass").create(name) for name in ("prefix_cache_aware", PATH, "priority_based")]
    backend = TokenMemoryBackend(max_num_seqs=1)
    engine = fake_engine(backend, passes=passes)
    wanted = {"three": 3, "two": 2, "five": 5, "four": 4}
    for name, max_tokens in wanted.items():
        engine.add(request(name, [max_tokens] * 6, max_tokens))
    plan = None
    order: list[str] = []
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        plan = plan or engine.last_plan
        order += [join.request_id for join in (engine.last_plan.joined if engine.last_plan else ())]
    assert order == ["two", "four", "three", "five"]
    assert plan is not None
    assert "odd_ones_last" in {decision.pass_name for decision in plan.decisions}
    for name, max_tokens in wanted.items():
        assert tokens[name] == expected_tokens(backend, [max_tokens] * 6, max_tokens)
    assert "odd_ones_last" in engine.scheduler.pass_time_s


def test_it_changes_no_tokens() -> None:
    backend = TokenMemoryBackend(num_blocks=16, max_num_seqs=3)
    engine = fake_engine(backend, passes=[registry("pass").create(PATH)])
    for i in range(8):
        engine.add(request(str(i), [i] * 5, 1 + i))
    got = run_all(engine)
    assert got == {str(i): expected_tokens(backend, [i] * 5, 1 + i) for i in range(8)}
