"""`DraftModel` over a backend whose KV are the tokens themselves, and through engines."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sagellm.accel.speculative.draft_model import MOST_RECORDED_ROWS, DraftModel
from sagellm.accel.speculative.lengths import ChainLengths
from sagellm.core.clock import ManualClock
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, SageError
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.protocols.speculative import Asked
from sagellm.core.types import Request, SamplingParams, TokenLogprob, Tokens
from sagellm.engines.build import build_engine
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.speculation import Speculation
from tests.builders import expected_tokens, fake_engine, request, run_all

VOCABULARY = 97


class Counting(TokenMemoryBackend):
    """Keeps what each step computes, and can be told to fail. `chance`: that of each token it draws."""

    def __init__(self, *, chance: Callable[[int], float] = lambda token_id: 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.plans: list[ExecutionPlan] = []
        self.chance, self.fails, self.is_closed = chance, False, False

    def execute(self, plan: ExecutionPlan) -> StepResult:
        self.plans.append(plan)
        result = super().execute(plan)
        if self.fails:
            raise RuntimeError("out of order")
        for row, found in result.logprobs.items():
            chances = tuple(TokenLogprob(one.token_id, math.log(self.chance(one.token_id))) for one in found)
            result.logprobs[row] = chances
        return result

    def close(self) -> None:
        self.is_closed = True
        super().close()

    @property
    def num_computed(self) -> int:
        return sum(plan.num_tokens for plan in self.plans)


def asked(name: str, tokens: list[int], most: int, *, num_prompt: int | None = None, **params: Any) -> Asked:
    prompt = Tokens(tokens[:num_prompt])
    return Asked(
        Request(name, prompt, SamplingParams(**{"temperature": 0.0, **params})), Tokens(tokens), most
    )


def right(tokens: list[int], count: int) -> tuple[int, ...]:
    return tuple(expected_tokens(TokenMemoryBackend(), tokens, count))


def test_what_was_accepted_is_not_computed_again() -> None:
    backend = Counting()
    draft, tokens = DraftModel(backend), [3, 1, 4, 1, 5]
    for computed, drawn in ((8, 4), (5, 4), (5, 2), (4, 4)):
        before = backend.num_computed
        [found] = draft.propose([asked("a", tokens, 4, num_prompt=5)])
        assert found.token_ids == right(tokens, 4)
        assert found.acceptance == (1.0,) * 4
        assert backend.num_computed - before == computed
        own = right(tokens, 5)
        tokens += own if drawn == 4 else [*own[:drawn], (own[drawn] + 1) % VOCABULARY]
        draft.check()
    draft.forget(asked("a", tokens, 4).request, Tokens(tokens))
    draft.check()


@pytest.mark.parametrize(("num_requests", "chunks"), [(MOST_RECORDED_ROWS, 0), (MOST_RECORDED_ROWS + 1, 1)])
def test_few_requests_whose_proposals_were_accepted_whole_need_no_chunk(
    num_requests: int, chunks: int
) -> None:
    backend = Counting(max_num_seqs=16)
    draft, names = DraftModel(backend), [f"r{i}" for i in range(num_requests)]
    texts = {name: [i, i + 1, 4] for i, name in enumerate(names)}
    draft.propose([asked(name, text, 2, num_prompt=3) for name, text in texts.items()])
    texts = {name: [*text, *right(text, 3)] for name, text in texts.items()}
    before = len(backend.plans)
    found = draft.propose([asked(name, text, 2, num_prompt=3) for name, text in texts.items()])
    assert [each.token_ids for each in found] == [right(text, 2) for text in texts.values()]
    assert sum(bool(plan.prefills) for plan in backend.plans[before:]) == chunks
    draft.check()


def test_requests_are_drawn_for_together() -> None:
    backend = Counting()
    draft = DraftModel(backend)
    texts = {"a": [1, 2, 3], "b": [4], "c": [5, 6, 7, 8, 9]}
    found = draft.propose(
        [asked(name, text, 1 + number) for number, (name, text) in enumerate(texts.items())]
    )
    assert [one.token_ids for one in found] == [right(text, i + 1) for i, text in enumerate(texts.values())]
    assert [len(plan.sample_rows) for plan in backend.plans] == [3, 2, 1]


def test_a_long_prompt_takes_several_calls() -> None:
    backend = Counting()
    draft, tokens = DraftModel(backend, catch_up_tokens=16), [*range(40)]
    proposals = []
    for _ in range(4):
        proposals.append(
            [one.token_ids for one in draft.propose([asked("a", tokens, 2), asked("b", [7], 2)])]
        )
        draft.check()
    assert [one for one, _ in proposals] == [(), (), right(tokens, 2), right(tokens, 2)]
    assert [one for _, one in proposals] == [(), (), right([7], 2), right([7], 2)]
    assert [plan.num_tokens for plan in backend.plans[:3]] == [16, 16, 9]


def test_a_proposal_ends_before_what_the_draft_doubts() -> None:
    tokens = [2, 7, 1]
    own = right(tokens, 4)
    backend = Counting(chance=lambda token_id: 0.3 if token_id == own[2] else 0.75)
    found = DraftModel(backend).propose([asked("a", tokens, 4)])[0]
    assert found.token_ids == own[:2]
    assert found.acceptance == pytest.approx((0.75, 0.75))
    assert DraftModel(backend, min_probability=0.2).propose([asked("a", tokens, 4)])[0].token_ids == own
    drawn = DraftModel(backend).propose([asked("a", tokens, 4, temperature=1.0)])[0]
    assert (drawn.token_ids, drawn.acceptance) == (own, ()), "a draw's chance says nothing of its acceptance"


def test_nothing_is_proposed_beyond_the_draft_s_length() -> None:
    draft = DraftModel(Counting(max_model_len=10))
    lengths = [len(draft.propose([asked("a", [*range(n)], 4)])[0].token_ids) for n in (5, 7, 9, 10, 12)]
    assert lengths == [4, 3, 1, 0, 0]


def test_where_memory_is_short_the_others_leave() -> None:
    backend = Counting(num_blocks=6, block_size=4, max_num_seqs=3)
    draft = DraftModel(backend)
    for name in ("a", "b", "c", "d"):
        assert draft.propose([asked(name, [1, 2, 3, 4, 5], 3)])[0].token_ids == right([1, 2, 3, 4, 5], 3)
        draft.check()
    found = draft.propose([asked(name, [1, 2, 3, 4, 5], 3) for name in ("a", "b", "c", "d")])
    assert [bool(one.token_ids) for one in found] == [False, True, True, True], "those that it has stay"
    draft.check()
    assert draft.propose([asked("long", [*range(30)], 3)])[0].token_ids == (), "larger than the pool"
    draft.check()


def test_after_a_failure_it_goes_on() -> None:
    backend = Counting()
    draft, tokens = DraftModel(backend), [3, 1, 4]
    draft.propose([asked("a", tokens, 4)])
    backend.fails = True
    with pytest.raises(RuntimeError):
        draft.propose([asked("a", tokens, 4)])
    backend.fails = False
    draft.check()
    tokens += right(tokens, 2)
    assert draft.propose([asked("a", tokens, 4)])[0].token_ids == right(tokens, 4)


class DraftCalls(RuleBasedStateMachine):
    """Requests come, draw what they like, and leave; some ids come again."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = Counting(num_blocks=24, block_size=4, max_num_seqs=3, max_model_len=64)
        self.draft = DraftModel(self.backend, catch_up_tokens=12)
        self.texts: dict[str, list[int]] = {}

    @rule(name=st.sampled_from("abcde"), prompt=st.lists(st.integers(0, 96), min_size=1, max_size=30))
    def begin(self, name: str, prompt: list[int]) -> None:
        if name not in self.texts:
            self.texts[name] = prompt

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), most=st.integers(1, 5))
    def propose(self, data: st.DataObject, most: int) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.texts)), unique=True, min_size=1))
        found = self.draft.propose([asked(name, self.texts[name], most) for name in names])
        for name, proposal in zip(names, found, strict=True):
            text = self.texts[name]
            assert proposal.token_ids in ((), right(text, min(most, 64 - len(text))))
            own = right(text, most + 1)
            count = data.draw(st.integers(0, most))
            text += [*own[:count], data.draw(st.sampled_from([own[count], 5]))]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        text = self.texts.pop(name)
        self.draft.forget(asked(name, text, 1).request, Tokens(text))

    @invariant()
    def books_are_right(self) -> None:
        self.draft.check()


TestDraftCalls = DraftCalls.TestCase


# -- through engines


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_an_engine_gives_the_same_tokens(seed: int, adaptive: bool) -> None:
    """The draft has another answer now and then; some requests end early."""
    draw = random.Random(seed)

    class Sometimes(Counting):
        def answer(self, tokens: Tokens) -> int:
            own = super().answer(tokens)
            return own if own % 7 else (own + 1) % VOCABULARY

    lengths = ChainLengths() if adaptive else None
    draft = DraftModel(Sometimes(num_blocks=20), catch_up_tokens=16)
    engine = fake_engine(speculation=Speculation(draft, 4, lengths, ManualClock()))
    prompts = {name: [draw.randrange(97) for _ in range(draw.randrange(1, 30))] for name in "abcdefg"}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, draw.randrange(1, 30)))
    found = run_all(engine)
    assert all(tuple(found[name]) == right(prompt, len(found[name])) for name, prompt in prompts.items())
    draft.check()
    assert not draft._rows
    assert engine.diagnostics().speculation.accepted[0]
    engine.close()
    assert draft._backend.is_closed  # type: ignore[attr-defined]


def settings(**options: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"dtype": "float32", "max_model_len": 256},
            "kv": {"num_blocks": 128},
            "scheduler": {"max_num_seqs": 4},
            "speculative": {"method": "draft_model", "num_tokens": 4, "adaptive": False, **options},
        }
    )


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    return answers(settings(method="none"))


def answers(config: Config) -> dict[str, list[int]]:
    engine = build_engine(config)
    try:
        for name, temperature in (("greedy", 0.0), ("drawn", 1.5), ("also drawn", 4.0)):
            params = SamplingParams(temperature=temperature, max_tokens=24, seed=None, top_p=0.99)
            engine.add(Request(name, Tokens([*range(40, 60)]), params))
        found = {name: list(tokens) for name, tokens in run_all(engine).items()}
        counts = engine.diagnostics().speculation
        if config.speculative.method != "none":
            assert sum(counts.proposed) > 30
            assert sum(counts.accepted) >= 0.9 * sum(counts.proposed), "the draft is the model itself"
        return found
    finally:
        engine.close()


def test_the_demo_model_as_its_own_draft(plain: dict[str, list[int]]) -> None:
    """It draws with the same random numbers, so that sampled tokens are accepted too."""
    assert answers(settings(method_options={"model": str(DEMO_MODEL), "min_probability": 0.0})) == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"needs a draft: set speculative.method_options to \{model: FOLDER\}"),
        ({"model": 3}, "needs a draft"),
        ({"model": "no/such folder"}, "no/such folder"),
        ({"model": str(DEMO_MODEL), "num_blocks": 0}, "num_blocks is a number of blocks, not 0"),
        ({"model": str(DEMO_MODEL), "min_probability": 2.0}, "min_probability must be from 0 to 1, got 2.0"),
        ({"model": str(DEMO_MODEL), "catch_up_tokens": 0}, "catch_up_tokens must be at least 1"),
        (
            {"model": str(DEMO_MODEL), "temperature": 1},
            "'temperature'; it takes model, num_blocks, min_probability, catch_up_tokens",
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((SageError, ConfigError), match=message):
        build_engine(settings(method_options=options))
