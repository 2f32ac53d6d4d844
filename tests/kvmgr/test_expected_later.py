"""`ExpectedLater` beside a plain list: what is due, what is dropped, and its books."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagellm.core.types import NO_ACCOUNT, Namespace, Tokens
from sagellm.kvmgr.manager.expected_later import Expected, ExpectedLater, Prefix, prefix_of

MAX_PREFIXES, MAX_TOKENS = 4, 12
NAMESPACES = st.sampled_from([Namespace(), Namespace(tenant="a")])
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS + 1)


class Later(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.later = ExpectedLater(MAX_PREFIXES, MAX_TOKENS)
        self.known: list[tuple[float, Prefix]] = []
        self.now_s = 0.0

    def without(self, prefix: Prefix) -> list[tuple[float, Prefix]]:
        return [entry for entry in self.known if entry[1] != prefix]

    @rule(ids=PROMPTS, namespace=NAMESPACES, in_s=st.integers(0, 5))
    def add(self, ids: list[int], namespace: Namespace, in_s: int) -> None:
        prefix = prefix_of(Tokens(ids), namespace)
        self.known = sorted([*self.without(prefix), (self.now_s + in_s, prefix)])
        dropped = []
        while len(self.known) > MAX_PREFIXES or sum(len(key[1]) for _, key in self.known) > 4 * MAX_TOKENS:
            dropped.append(self.known.pop()[1])
        found = self.later.add(Expected(self.now_s + in_s, Tokens(ids), namespace, NO_ACCOUNT))
        assert [prefix_of(each.tokens, each.namespace) for each in found] == dropped

    @rule(ids=PROMPTS, namespace=NAMESPACES)
    def forget(self, ids: list[int], namespace: Namespace) -> None:
        prefix = prefix_of(Tokens(ids), namespace)
        self.known = self.without(prefix)
        self.later.forget(prefix)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        due = [prefix for due_s, prefix in self.known if due_s <= self.now_s]
        self.known = [entry for entry in self.known if entry[1] not in due]
        found = self.later.take_due(self.now_s)
        assert [prefix_of(each.tokens, each.namespace) for each in found] == due

    @invariant()
    def agrees(self) -> None:
        self.later.check()
        assert len(self.later) == len(self.known)
        assert self.later.next_s == min([due_s for due_s, _ in self.known], default=float("inf"))
        assert all(prefix in self.later for _, prefix in self.known)


TestExpectedLater: Any = Later.TestCase
TestExpectedLater.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
