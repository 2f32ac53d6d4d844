"""Both suffix trees beside a search through all texts, and beside each other."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sagellm.accel.speculative import native_suffix_tree
from sagellm.accel.speculative.native_suffix_tree import NativeSuffixTree, native_suffix_trees
from sagellm.accel.speculative.suffix_tree import MOST_CONTINUED, SuffixRules, SuffixTree
from sagellm.core.errors import BookkeepingError, KernelError
from sagellm.core.token_trees import check_tree
from sagellm.core.types import Tokens
from tests.effort import examples

LIBRARY = native_suffix_trees()
KINDS = ["python", *(["c++"] if LIBRARY else [])]
needs_compiler = pytest.mark.skipif(LIBRARY is None, reason="needs a C++ compiler")


def make(kind: str, rules: SuffixRules, *, removes: bool = False, branches: int = 1) -> Any:
    if kind == "python":
        return SuffixTree(rules, removes=removes, branches=branches)
    assert LIBRARY is not None
    return NativeSuffixTree(LIBRARY, rules, removes=removes, branches=branches)


rule_sets = st.builds(
    lambda depth, alpha, bound, match, doubt: SuffixRules(depth, alpha, bound, min(match, depth - 1), doubt),
    st.sampled_from([2, 3, 5, 8, 12]),
    st.sampled_from([0.5, 1.0, 1.7, 4.0]),
    st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.5, 3.0]),
)
texts = st.one_of(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.integers(0, 5), max_size=60),
    st.builds(lambda part, times: part * times, st.lists(st.integers(0, 3), max_size=6), st.integers(0, 12)),
)


def continuations(sequences: list[list[int]], path: list[int]) -> list[tuple[int, int, int]]:
    """Of the tokens that follow a path: how often, where last (in all sequences in a row), which."""
    found: dict[int, tuple[int, int]] = {}
    before = 0
    for text in sequences:
        for start in range(len(text) - len(path)):
            if text[start : start + len(path)] == path:
                token = text[start + len(path)]
                found[token] = found.get(token, (0, 0))[0] + 1, before + start
        before += len(text)
    return [(count, last, token) for token, (count, last) in found.items()]


def defined_draft(
    sequences: list[list[int]], path: list[int], limit: int, rules: SuffixRules, *, grows: bool
) -> tuple[list[int], list[float], float]:
    """Follow the most frequent token, of several the one seen last. Where nothing has followed yet in a text
    that grows, its last repetition goes on."""
    tokens: list[int] = []
    chances: list[float] = []
    product, score = 1.0, 0.0
    while len(tokens) < limit and len(path) + len(tokens) < rules.depth:
        known = [*path, *tokens]
        options = continuations(sequences, known)
        if options:
            count, _, token = max(options)
            chance = rules.trust(len(known)) * (count / sum(each for each, _, _ in options))
        elif grows:
            (text,) = sequences
            longer = [*text, *tokens]
            starts = range(len(text) - len(path))
            token = next(longer[k + len(known)] for k in starts if longer[k : k + len(known)] == known)
            chance = rules.trust(len(known))
        else:
            break
        product *= chance
        if product < rules.min_probability:
            break
        tokens.append(token)
        chances.append(chance)
        score += product
    return tokens, chances, score


def defined(
    own: list[int], shared: list[list[int]], most: int, rules: SuffixRules
) -> tuple[list[int], list[float]]:
    best: tuple[list[int], list[float], float] = [], [], 0.0
    for sequences, grows in (([own], True), (shared, False)):
        for match in range(min(rules.depth - 1, len(own)), rules.min_match - 1, -1):
            path = own[len(own) - match :]
            seen = any(
                text[at : at + match] == path
                for text in sequences
                for at in range(len(text) - match + 1 - grows)
            )
            if seen:
                draft = defined_draft(sequences, path, rules.limit(match, most), rules, grows=grows)
                if draft[2] > best[2]:
                    best = draft
    return best[0], best[1]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(120), deadline=None)
@given(rules=rule_sets, own=st.lists(texts, min_size=1, max_size=4), past=st.lists(texts, max_size=4),
       most=st.integers(1, 9))  # fmt: skip
def test_proposals_are_those_of_a_search(
    kind: str, rules: SuffixRules, own: list[list[int]], past: list[list[int]], most: int
) -> None:
    tree, shared, tokens = make(kind, rules), make(kind, rules, removes=True), Tokens()
    ended: list[list[int]] = []
    for number in range(max(len(own), len(past))):
        if number < len(past):
            shared.insert(array("i", past[number]))
            ended.append(past[number])
            shared.check()
        if number < len(own):
            tokens.extend(own[number])
            found = tree.propose(tokens, most, shared)
            tree.check()
            expected = defined(tokens.tolist(), ended, most, rules)
            assert (list(found.token_ids), list(found.chances)) == expected


def chance_of(sequences: list[list[int]], path: list[int], num_matched: int, rules: SuffixRules,
              *, grows: bool) -> dict[int, float]:  # fmt: skip
    """What follows the end of a path, whose first `num_matched` tokens are matched, and how likely it is."""
    if len(path) >= rules.depth or (grows and not continuations(sequences, path[:num_matched])):
        return {}
    options = continuations(sequences, path)
    if options:
        total = sum(count for count, _, _ in options)
        return {token: rules.trust(len(path)) * (count / total) for count, _, token in options}
    if not grows:
        return {}
    longer = [*sequences[0], *path[num_matched:]]
    starts = range(len(sequences[0]) - num_matched)
    following = [longer[k + len(path)] for k in starts if longer[k : k + len(path)] == path]
    return {following[0]: rules.trust(len(path))} if following else {}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(120), deadline=None)
@given(rules=rule_sets, own=st.lists(texts, min_size=1, max_size=3), past=st.lists(texts, max_size=3),
       most=st.integers(1, 9))  # fmt: skip
def test_trees_have_the_likeliest_paths_of_a_search(
    kind: str, rules: SuffixRules, own: list[list[int]], past: list[list[int]], most: int
) -> None:
    tree = make(kind, rules, branches=9)
    shared, tokens = make(kind, rules, removes=True, branches=9), Tokens()
    for text in past:
        shared.insert(array("i", text))
    for part in own:
        tokens.extend(part)
        found = tree.propose(tokens, most, shared)
        tree.check()
        text, paths, products = tokens.tolist(), [list[int]()], [1.0]
        check_tree(found.token_ids, found.parents)
        for token, parent in zip(found.token_ids, found.parents, strict=True):
            paths.append([*paths[parent + 1], token])
        matches = [
            (sequences, size, grows)
            for sequences, grows in (([text], True), (past, False))
            for size in sizes_of(sequences, text, rules, grows=grows)
        ]
        expected: list[dict[int, float]] = []
        for path in paths:
            best: dict[int, float] = {}
            for sequences, size, grows in matches:
                known = [*text[len(text) - size :], *path]
                for token, chance in chance_of(sequences, known, size, rules, grows=grows).items():
                    best[token] = max(best.get(token, 0.0), chance)
            expected.append(best)
        for token, parent, chance in zip(found.token_ids, found.parents, found.chances, strict=True):
            assert chance == expected[parent + 1][token]
            products.append(products[parent + 1] * chance)
        left = [
            products[i] * chance
            for i, best in enumerate(expected)
            for token, chance in best.items()
            if [*paths[i], token] not in paths
        ]
        assert products == sorted(products, reverse=True)
        bound = products[-1] if len(found.token_ids) == most else rules.min_probability
        assert all(product <= bound or product < rules.min_probability for product in left)


def sizes_of(sequences: list[list[int]], text: list[int], rules: SuffixRules, *, grows: bool) -> list[int]:
    """The longest match, and those of half its length and so on."""
    for size in range(min(rules.depth - 1, len(text)), rules.min_match - 1, -1):
        path = text[len(text) - size :]
        if any(own[at : at + size] == path for own in sequences for at in range(len(own) - size + 1 - grows)):
            return [size >> n for n in range(9) if size >> n >= rules.min_match]
    return []


@needs_compiler
@settings(max_examples=examples(150), deadline=None)
@given(rules=rule_sets, own=st.lists(texts, min_size=1, max_size=4), past=st.lists(texts, max_size=5),
       most=st.integers(1, 20), branches=st.integers(2, 5), kept=st.integers(0, 3))  # fmt: skip
def test_both_trees_branch_alike(
    rules: SuffixRules, own: list[list[int]], past: list[list[int]], most: int, branches: int, kept: int
) -> None:
    trees = [make(kind, rules, branches=branches) for kind in KINDS]
    shared = [make(kind, rules, removes=True, branches=branches) for kind in KINDS]
    tokens = Tokens()
    for number in range(max(len(own), len(past))):
        for each in shared if number < len(past) else ():
            each.insert(array("i", past[number]))
            if number >= kept:
                each.remove_oldest()
            each.check()
        tokens.extend(own[number] if number < len(own) else [])
        one, two = (tree.propose(tokens, most, old) for tree, old in zip(trees, shared, strict=True))
        assert one == two
        for tree in trees:
            tree.check()


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_with_many_continuations_give_the_best_alone(kind: str) -> None:
    rules = SuffixRules(4, 2.0, 0.0, 1, 0.0)
    for many, expected in ((MOST_CONTINUED - 1, {5, 6}), (MOST_CONTINUED + 1, {5})):
        tree = make(kind, rules, branches=2)
        text = [token for i in range(many) for token in (1, 6 if i % 4 == 3 else 5, 7 + i)]
        found = tree.propose(Tokens([*text, 1]), 8)
        assert {t for t, p in zip(found.token_ids, found.parents, strict=True) if p == -1} == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60), deadline=None)
@given(rules=rule_sets, past=st.lists(texts, min_size=1, max_size=8), own=texts, kept=st.integers(0, 4))
def test_removed_sequences_leave_no_trace(
    kind: str, rules: SuffixRules, past: list[list[int]], own: list[int], kept: int
) -> None:
    shared = make(kind, rules, removes=True)
    for number, text in enumerate(past):
        shared.insert(array("i", text))
        if number >= kept:
            assert shared.remove_oldest() == len(past[number - kept])
        shared.check()
    left = past[len(past) - kept :] if len(past) > kept else past
    found = make(kind, rules).propose(Tokens(own), 5, shared)
    assert (list(found.token_ids), list(found.chances)) == defined(own, left, 5, rules)
    assert shared.num_tokens == sum(map(len, left))


class BothTrees(RuleBasedStateMachine):
    """The tree in C++ and its twin are given the same."""

    @initialize(rules=rule_sets)
    def begin(self, rules: SuffixRules) -> None:
        self.tree_rules = rules
        self.shared = [make(kind, rules, removes=True) for kind in KINDS]
        self.requests: list[tuple[Tokens, list[Any]]] = []

    @rule(text=texts)
    def end_a_request(self, text: list[int]) -> None:
        for tree in self.shared:
            tree.insert(array("i", text))

    @rule()
    def remove(self) -> None:
        assert len({tree.remove_oldest() for tree in self.shared}) == 1

    @rule(text=texts)
    def begin_a_request(self, text: list[int]) -> None:
        self.requests.append((Tokens(text), [make(kind, self.tree_rules) for kind in KINDS]))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), text=st.lists(st.integers(0, 5), max_size=9), most=st.integers(1, 16))
    def propose(self, data: st.DataObject, text: list[int], most: int) -> None:
        tokens, trees = data.draw(st.sampled_from(self.requests))
        tokens.extend(text)
        found = [tree.propose(tokens, most, shared) for tree, shared in zip(trees, self.shared, strict=True)]
        assert len({one[:2] for one in found}) == 1
        for tree in trees:
            tree.check()

    @invariant()
    def in_order(self) -> None:
        for tree in getattr(self, "shared", []):
            tree.check()


TestBothTrees = BothTrees.TestCase
TestBothTrees.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [[7] * 4000, [1, 2, 3] * 1300, [*range(64)] * 60])
def test_a_repetition_costs_nodes_by_its_period(kind: str, text: list[int]) -> None:
    rules = SuffixRules(64, 2.0, 0.1, 2, 0.0)
    tree = make(kind, rules)
    found = tree.propose(Tokens(text), 16)
    assert found.token_ids == tuple((text[-64:] + text[:64])[-64:][:16]) if len(set(text)) == 64 else True
    assert len(found.token_ids) == 16
    tree.check()
    if kind == "c++":
        assert tree.num_nodes < 64 * 3


@needs_compiler
def test_the_size_of_a_tree_is_as_documented() -> None:
    import random

    draw = random.Random(1)
    tree = make("c++", SuffixRules(64, 2.0, 0.1, 2, 0.0))
    tree.propose(Tokens(draw.choices(range(2000), k=30_000)), 4)
    assert 40 < tree.num_bytes / 30_000 < 150


@needs_compiler
def test_memory_is_given_back() -> None:
    import random

    draw = random.Random(1)
    tree = make("c++", SuffixRules(16, 2.0, 0.1, 2, 0.0), removes=True)
    for _ in range(60):
        tree.insert(array("i", draw.choices(range(50), k=500)))
    largest = tree.num_bytes
    for _ in range(58):
        tree.remove_oldest()
        tree.check()
    assert tree.num_tokens == 1000
    assert tree.num_bytes < largest / 4
    assert tree.remove_oldest() + tree.remove_oldest() == 1000
    assert (tree.num_nodes, tree.remove_oldest()) == (1, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"depth": 1}, "depth must be from 2 to 256"),
        ({"depth": 257}, "depth must be from 2 to 256"),
        ({"min_match": 0}, "min_match must be from 1 to depth - 1"),
        ({"min_match": 64}, "min_match must be from 1 to depth - 1"),
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"alpha": float("nan")}, "alpha must be above 0"),
        ({"doubt": -1.0}, "doubt must be from 0 to 256"),
        ({"min_probability": 1.5}, "min_probability must be from 0 to 1"),
    ],
)
def test_rules_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuffixRules(
            **{"depth": 64, "alpha": 1.0, "min_probability": 0.1, "min_match": 1, "doubt": 1.0} | wrong
        )


def test_without_a_compiler_the_trees_are_in_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> object:
        raise KernelError("no C++ compiler on PATH")

    monkeypatch.setattr(native_suffix_tree, "find_compiler", missing)
    native_suffix_trees.cache_clear()
    try:
        assert native_suffix_trees() is None
        assert native_suffix_trees() is None
        assert [one.message for one in caplog.records if "kept in Python" in one.message] == [
            "suffix trees are kept in Python, which takes some 50 times as long: no C++ compiler on PATH"
        ]
    finally:
        native_suffix_trees.cache_clear()


def test_a_broken_tree_is_found() -> None:
    tree = make("python", SuffixRules(8, 1.0, 0.1, 1, 0.0))
    tree.propose(Tokens([1, 2, 1, 3]), 2)
    tree.check()
    tree._root.children[1].count += 1
    with pytest.raises(BookkeepingError, match="passes in all"):
        tree.check()
