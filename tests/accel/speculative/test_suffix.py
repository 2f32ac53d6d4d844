"""The suffix proposer: what it proposes by rote, whose outputs it uses, and what it keeps."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sagellm.accel.speculative.native_suffix_tree import native_suffix_trees
from sagellm.accel.speculative.suffix import Suffix
from sagellm.core.config import Config
from sagellm.core.errors import BookkeepingError, SageError
from sagellm.core.protocols.speculative import Asked
from sagellm.core.types import CapabilityDescriptor, Namespace, Request, SamplingParams, Tokens
from sagellm.engines.build import build_backend
from sagellm.engines.build_speculation import build_speculation
from tests.effort import examples

ABLE = CapabilityDescriptor("none", "int8", 97, 128, 64, 4, 8, features=frozenset({"speculative_decoding"}))
NATIVE = [False, *([True] if native_suffix_trees() else [])]


def asked(name: str, prompt: list[int], tenant: str = "") -> Request:
    return Request(name, Tokens(prompt), namespace=Namespace(tenant))


def ended(proposer: Suffix, prompt: list[int], output: list[int], tenant: str = "") -> None:
    proposer.forget(asked("ended", prompt, tenant), Tokens(prompt + output))


def proposed(proposer: Suffix, tokens: list[int], most: int = 8, tenant: str = "") -> tuple[Any, ...]:
    one = asked("now", tokens, tenant)
    proposal = proposer.propose([Asked(one, Tokens(tokens), most)])[0]
    proposer.forget(one, Tokens(tokens))
    assert proposal.probabilities == ()
    return proposal.token_ids, proposal.acceptance


@pytest.mark.parametrize("native", NATIVE)
def test_golden_proposals(native: bool) -> None:
    proposer = Suffix(8, 2.0, 0.3, 1, 0.0, native=native)
    # The own text: behind 1 2 came 3 twice, then 4.
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    assert proposed(proposer, text, 1) == ((3,), (2 / 3,))
    assert proposed(proposer, text) == ((3, 8, 1, 2), (2 / 3, 0.5, 1.0, 1.0))
    # alpha: two tokens for each of the match.
    assert proposed(proposer, [5, 6, 7, 8, 9, 5]) == ((6, 7), (1.0, 1.0))
    assert proposed(proposer, [5, 6, 7, 8, 9, 5, 6]) == ((7, 8, 9, 5), (1.0,) * 4)
    # A repetition goes on behind the end of the text.
    assert proposed(proposer, [4, 4, 4, 4], 5) == ((4,) * 5, (1.0,) * 5)
    # The bound: 1/2 * 1/2 is too little.
    halves = [1, 2, 3, 7, 1, 2, 4, 8, 1, 5, 3, 9, 1]
    assert proposed(proposer, halves) == ((2, 4), (2 / 3, 0.5))
    assert proposed(Suffix(8, 2.0, 0.4, 1, 0.0, native=native), halves) == ((2,), (2 / 3,))
    assert proposed(proposer, [1, 2, 3, 4, 5]) == ((), ())
    # Doubt: n / (n + 1) behind n tokens.
    doubting = Suffix(8, 2.0, 0.3, 1, 1.0, native=native)
    assert proposed(doubting, [5, 6, 7, 8, 9, 5, 6]) == ((7, 8, 9, 5), (2 / 3, 3 / 4, 4 / 5, 5 / 6))


@pytest.mark.parametrize("native", NATIVE)
def test_the_better_scored_tree_proposes(native: bool) -> None:
    proposer = Suffix(8, 1.0, 0.1, 2, 0.0, native=native)
    ended(proposer, [0], [1, 2, 3, 4, 5, 6, 7])
    assert proposed(proposer, [3, 4]) == ((5, 6), (1.0, 1.0))
    assert proposed(proposer, [3, 4, 9, 9, 3, 4])[0] == (9, 9)  # of equal ones that of the own tree
    assert proposed(proposer, [3, 4, 9, 3, 4, 8, 3, 4])[0] == (5, 6)
    assert proposed(proposer, [2, 3, 4, 9, 3, 4])[0] == (9, 3)
    for _ in range(2):
        ended(proposer, [0], [3, 4, 8])
    assert proposed(proposer, [3, 4]) == ((8,), (2 / 3,))


@pytest.mark.parametrize("native", NATIVE)
def test_prompts_are_not_shared_and_outputs_stay_in_their_namespace(native: bool) -> None:
    proposer = Suffix(8, 1.0, 0.1, 2, 0.0, native=native)
    ended(proposer, [1, 2, 3, 4], [5, 6, 7, 8, 9], "a")
    assert proposed(proposer, [5, 6], tenant="a")[0] == (7, 8)
    assert proposed(proposer, [5, 6], tenant="b") == ((), ())
    assert proposed(proposer, [1, 2], tenant="a") == ((), ())
    other = Request("x", Tokens([5, 6]), namespace=Namespace("a", adapter="lora"))
    assert proposer.propose([Asked(other, Tokens([5, 6]), 4)])[0].token_ids == ()


@pytest.mark.parametrize("native", NATIVE)
def test_the_oldest_outputs_go_first_over_all_namespaces(native: bool) -> None:
    proposer = Suffix(4, 1.0, 0.1, 1, shared_tokens=30, native=native)
    ended(proposer, [0], [1, 2, 3], "a")
    ended(proposer, [0], [*range(10, 20)], "b")  # 7 and 14 tokens count
    assert proposed(proposer, [1], tenant="a")[0] == (2,)
    ended(proposer, [0], [5, 6, 7, 8, 9, 5], "b")
    assert proposed(proposer, [1], tenant="a")[0] == ()
    assert set(proposer._shared.trees) == {Namespace("b")}
    assert proposer._shared.num_tokens == 24
    ended(proposer, [0], [*range(40, 99)], "a")  # longer than all: its end
    assert [tree.num_tokens for tree in proposer._shared.trees.values()] == [26]
    assert proposed(proposer, [96], tenant="a")[0] == (97,)
    assert proposed(proposer, [71], tenant="a")[0] == ()
    proposer.check()
    assert proposed(Suffix(4, 1.0, 0.1, 1, shared_tokens=0, native=native), [1, 2])[0] == ()


@pytest.mark.parametrize("native", NATIVE)
def test_requests_that_go_on_for_each_other_add_each_token_once(native: bool) -> None:
    """As those of a choice with `early_exit` or `speculative_reasoning`."""
    proposer, answer = Suffix(4, native=native), [3, 4, 5, 6, 7, 8]
    for drawn in range(len(answer)):
        request = replace(asked("part", [1, 2]), generated=tuple(answer[:drawn]))
        proposer.forget(request, Tokens([1, 2, *answer[: drawn + 1]]))
    assert [tree.num_tokens for tree in proposer._shared.trees.values()] == [len(answer)]
    alone = replace(asked("alone", [1, 2]), params=SamplingParams(num_speculative_tokens=0))
    proposer.forget(alone, Tokens([1, 2, *answer]))
    assert [tree.num_tokens for tree in proposer._shared.trees.values()] == [len(answer)]
    proposer.check()


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("limit", [0, 1, 5])
def test_nothing_is_shared_where_the_limit_is_less_than_a_tree(native: bool, limit: int) -> None:
    proposer = Suffix(5, shared_tokens=limit, native=native)
    ended(proposer, [0], [1, 2, 3, 4])
    proposer.check()
    assert not proposer._shared.trees


class Requests(RuleBasedStateMachine):
    """Requests of three tenants come, go on and end; both kinds of trees propose the same."""

    def __init__(self) -> None:
        super().__init__()
        self.proposers = [Suffix(6, 1.5, 0.2, 1, shared_tokens=90, native=native) for native in NATIVE]
        self.running: dict[str, tuple[Request, Tokens]] = {}
        self.ended: list[tuple[Namespace, list[int]]] = []
        self.number = 0

    @rule(tenant=st.sampled_from("abc"), prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12))
    def begin(self, tenant: str, prompt: list[int]) -> None:
        self.number += 1
        one = asked(str(self.number), prompt, tenant)
        self.running[one.request_id] = one, Tokens(prompt)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), part=st.lists(st.integers(0, 3), min_size=1, max_size=6))
    def decode(self, data: st.DataObject, part: list[int]) -> None:
        one, tokens = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        tokens.extend(part)
        found = [proposer.propose([Asked(one, tokens, 6)])[0] for proposer in self.proposers]
        assert all(proposal == found[0] for proposal in found)
        theirs = [token for namespace, output in self.ended if namespace == one.namespace for token in output]
        assert set(found[0].token_ids) <= {*theirs, *tokens}

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        one, tokens = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        for proposer in self.proposers:
            proposer.forget(one, tokens)
        self.ended.append((one.namespace, tokens.tolist()[len(one.tokens) :]))

    @invariant()
    def in_order(self) -> None:
        for proposer in self.proposers:
            proposer.check()
            assert set(proposer._trees) <= set(self.running)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


def test_broken_sums_are_found() -> None:
    proposer = Suffix(native=False)
    ended(proposer, [0], [1, 2, 3])
    proposer.check()
    proposer._shared.num_tokens += 1
    with pytest.raises(BookkeepingError, match="tokens counted"):
        proposer.check()
    proposer._shared.added.clear()
    with pytest.raises(BookkeepingError, match="were added"):
        proposer.check()


def test_trees_are_freed() -> None:
    proposer = Suffix()
    before = sys.getallocatedblocks()
    for _ in range(200):
        proposed(proposer, [1, 2, 3] * 20)
    gc.collect()
    assert sys.getallocatedblocks() - before < 2000
    assert not proposer._trees


def test_it_is_built_by_name() -> None:
    settings = {"method": "suffix", "method_options": {"alpha": 4, "min_match": 3}, "num_tokens": 16}
    made = build_speculation(Config.model_validate({"speculative": settings}), ABLE, build_backend)
    assert made is not None
    for options, message in (
        ({"alpha": -1}, "alpha must be above 0"),
        ({"depth": 1000}, "depth must be from 2 to 256"),
        ({"shared_tokens": -1}, "shared_tokens must be at least 0"),
        ({"depths": 3}, "no option 'depths'"),
        ({"depth": "deep"}, "suffix"),
    ):
        wrong = {"method": "suffix", "method_options": options}
        with pytest.raises(SageError, match=message):
            build_speculation(Config.model_validate({"speculative": wrong}), ABLE, build_backend)
