"""Steps in which rows compute trees of proposed tokens: accepted paths, blocks, counts, and wrong trees."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from sagellm.accel.speculative.lengths import Acceptance, ChainLengths, Estimates
from sagellm.core.clock import ManualClock
from sagellm.core.errors import PlanError
from sagellm.core.plan import Chain, Draft
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.protocols.speculative import Proposal
from sagellm.core.types import Request, Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.speculation import Speculation
from tests.builders import (
    OneByOne,
    PreemptAtRandom,
    RandomProposer,
    check_books,
    expected_tokens,
    fake_engine,
    random_tree,
    request,
    run_all,
)


@dataclass
class ScriptedTree(OneByOne):
    """Proposes the same tree to every request."""

    proposal: Proposal

    def propose_one(self, request: Request, tokens: Tokens, num_tokens: int) -> Proposal:
        return self.proposal

    def observe(self, request_id: str, num_accepted: int) -> None: ...

    def forget(self, request: Request, tokens: Tokens) -> None: ...


def engine_with(proposer: ScriptedTree, num_tokens: int = 8, num_blocks: int = 64) -> Engine:
    speculation = Speculation(proposer, num_tokens)
    return fake_engine(TokenMemoryBackend(num_blocks), speculation=speculation)


def right_tokens(prompt: Sequence[int], count: int) -> list[int]:
    return expected_tokens(TokenMemoryBackend(), prompt, count)


def test_the_path_that_the_model_draws_is_accepted() -> None:
    right = right_tokens(range(5), 20)
    wrong = [(token + 1) % 97 for token in right]
    proposer = ScriptedTree(Proposal())
    engine = engine_with(proposer)
    engine.add(request("a", range(5), 20))
    assert [out.new_token_ids for out in engine.step()] == [(right[0],)]
    for tokens, parents, drawn in (
        ([wrong[1], right[1], wrong[2], right[2]], (-1, -1, 1, 1), right[1:4]),
        ([wrong[4], 5, right[4], 6, right[5], right[6]], (-1, 0, -1, 2, 2, 4), right[4:8]),
        ([wrong[8], wrong[9], (right[8] + 2) % 97], (-1, 0, -1), right[8:9]),
        ([right[9], right[10], wrong[9]], (-1, 0, -1), right[9:12]),
    ):
        proposer.proposal = Proposal(tuple(tokens), parents=parents)
        assert [out.new_token_ids for out in engine.step()] == [tuple(drawn)]
        check_books(engine)
    speculation = engine.speculation
    assert speculation is not None
    assert speculation.num_accepted == 2 + 3 + 0 + 2
    assert speculation.counts().proposed == (2 + 2 + 2 + 2, 2 + 3 + 1 + 1, 1)
    assert speculation.counts().accepted == (3, 3, 1)


def test_a_tree_is_planned_branch_by_branch() -> None:
    """The likeliest tokens come first in a proposal, and the first branch first in a plan."""
    proposer = ScriptedTree(Proposal())
    engine = engine_with(proposer)
    engine.add(request("a", range(5), 20))
    engine.step()
    proposer.proposal = Proposal((1, 2, 3, 4, 5, 6), parents=(-1, -1, 0, 1, 0, 2))
    engine.step()
    assert engine.last_plan is not None
    [chain] = engine.last_plan.chains
    assert (chain.token_ids, chain.parents) == ((1, 3, 6, 5, 2, 4), (-1, 0, 1, 0, -1, 4))


def test_a_tree_without_branches_is_planned_as_a_chain() -> None:
    engine = engine_with(ScriptedTree(Proposal((1, 2, 3), parents=(-1, 0, 1))))
    engine.add(request("a", range(5), 20))
    engine.step()
    engine.step()
    assert engine.last_plan is not None
    assert engine.last_plan.chains == (Chain(engine.last_plan.decode_rows[0], (1, 2, 3)),)


def test_the_first_tokens_of_a_tree_are_verified_where_the_budget_is_short() -> None:
    proposer = ScriptedTree(Proposal((1, 2, 3, 4), parents=(-1, 0, -1, 2)))
    engine = fake_engine(max_batched_tokens=4, speculation=Speculation(proposer, 8))
    engine.add(request("a", range(3), 9))
    engine.step()
    engine.step()
    assert engine.last_plan is not None
    assert engine.last_plan.chains == (Chain(engine.last_plan.decode_rows[0], (1, 2, 3), (-1, 0, -1)),)
    engine.add(request("b", range(3, 5), 9))
    engine.step()
    assert engine.last_plan.num_prefill_tokens == 2
    assert [chain.parents for chain in engine.last_plan.chains] == [()], "one token is a chain"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_blocks_and_tokens_with_trees(seed: int, overlap: bool) -> None:
    """Little memory, preemption, shared prefixes, chunks; in two of three windows that differ by layer."""
    draw = random.Random(seed)
    windows = [(None,), (None, 5), (None, 12, 3)][seed % 3]
    backend = TokenMemoryBackend(24 * len(windows), windows=windows)
    speculation = Speculation(RandomProposer(backend, seed, trees=True), draw.choice([2, 5, 9]))
    engine = fake_engine(
        backend,
        max_batched_tokens=draw.choice([8, 16, 32]),
        passes=[PreemptAtRandom(seed, 0.1, 6)],
        speculation=speculation,
        overlap=overlap,
    )
    prompts = {name: [*range(draw.randrange(20)), *draw.choices(range(97), k=3)] for name in "abcdef"}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 20))
    found = run_all(engine)
    for name, prompt in prompts.items():
        assert found[name] == expected_tokens(backend, prompt, 20)
    assert speculation.num_accepted
    assert engine.kv.block_states().active == 0
    engine.clear_cache()
    assert engine.kv.block_states().free == engine.kv.pool.total_blocks
    engine.close()


@pytest.mark.parametrize(
    ("token_ids", "parents", "told"),
    [
        ((1, 2), (-1,), "2 tokens with 1 parents"),
        ((1, 2), (-1, 1), "token 1 follows token 1; a parent is -1 or an earlier token"),
        ((1, 2), (0, 0), "token 0 follows token 0"),
        ((1, 2), (-2, 0), "token 0 follows token -2"),
        ((1, 2, 2), (-1, 0, 0), "token 2 follows token 0 twice: siblings differ"),
        ((), (-1,), "0 tokens with 1 parents"),
    ],
)
def test_a_wrong_tree_is_refused(token_ids: tuple[int, ...], parents: tuple[int, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Proposal(token_ids, parents=parents)


def test_a_wrong_tree_in_a_draft_is_refused() -> None:
    class Spoils:
        name = "spoils"

        def __call__(self, draft: Draft, view: SchedulingView) -> None:
            for state in draft.decodes.states:
                draft.parents[state] = (0,)

    proposer = ScriptedTree(Proposal((1, 2)))
    engine = fake_engine(passes=[Spoils()], speculation=Speculation(proposer, 4))
    engine.add(request("a", range(3), 9))
    engine.step()
    with pytest.raises(PlanError, match="a has proposed tokens that are no tree: 2 tokens with 1 parents"):
        engine.step()


class Watched(Acceptance):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, list[float | None]]] = []

    def verified(self, request_id: str, num_accepted: int, decided: Estimates) -> None:
        self.told.append((num_accepted, list(decided)))


class AllTokens(ChainLengths):
    """Verifies all that is proposed."""

    def choose(
        self, proposals: Sequence[tuple[str, Estimates]], num_rows: int, num_prompt_tokens: int,
        trees: Mapping[str, Sequence[int]] | None = None,
    ) -> list[int]:  # fmt: skip
        return [len(estimates) for _, estimates in proposals]


def test_what_is_learned_of_a_tree_is_of_tokens_whose_parent_was_accepted() -> None:
    right, lengths = right_tokens(range(5), 9), AllTokens()
    lengths.acceptance = watched = Watched()
    tokens, chances = (96, right[1], 1, 95, right[2]), (0.9, 0.8, 0.7, 0.6, 0.5)
    tree = Proposal(tokens, acceptance=chances, parents=(-1, -1, 0, 1, 1))
    engine = fake_engine(speculation=Speculation(ScriptedTree(tree), 8, lengths, ManualClock()))
    engine.add(request("a", range(5), 9))
    engine.step()
    assert [out.new_token_ids for out in engine.step()] == [tuple(right[1:4])]
    assert watched.told == [(2, [0.8, 0.5, 0.9, 0.6])]


def test_a_random_tree_is_a_tree() -> None:
    for seed in range(30):
        assert len(random_tree(random.Random(seed), range(5), 97, 9).token_ids) == 9
