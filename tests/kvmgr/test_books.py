"""Index, pool, quota and manager together against their slow twin, step by step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sagellm.core.registry import registry
from sagellm.core.types import AttentionChunk
from tests.books_model import CLASSES, TENANTS, Books, InjectedError
from tests.effort import examples

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buddy": {"pool": "buddy"},
    "quotas": {"quotas": True},
    "window": {"window": 5},
    "groups": {"windows": (None, 5, 5, 3)},
    "buddy and groups": {"windows": (None, None, 7), "pool": "buddy"},
    "chunks": {"windows": (None, AttentionChunk(4), AttentionChunk(6))},
    "states": {"state_pages": 3, "num_blocks": 40},
    "buddy, groups and states": {"windows": (None, 5), "state_pages": 2, "pool": "buddy"},
    "roomy": {"num_blocks": 200},
    "roomy and states": {"num_blocks": 200, "state_pages": 2},
    "early": {"early": True},
    "early and roomy": {"early": True, "num_blocks": 200},
}
NOT_DROPPED = {"window", "windows", "state_pages"}
"""Options with which no blocks are dropped."""
INDEXES = registry("index").names()
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
tenants = st.sampled_from(TENANTS)


class BooksMachine(RuleBasedStateMachine):
    """What callers do, in any order."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(**self.options)

    def one_of(self, data: st.DataObject, names: dict[str, Any]) -> str:
        return str(data.draw(st.sampled_from(sorted(names))))

    @rule(
        tokens=tokens,
        tenant=tenants,
        service_class=st.sampled_from(CLASSES),
        group=st.sampled_from([None, None, "g"]),
        retained=st.integers(0, 6),
    )
    def arrive(self, tokens: list[int], tenant: str, service_class: str, group: str, retained: int) -> None:
        self.books.arrive(tokens, tenant, service_class, group, retained)

    @precondition(lambda self: self.books.waiting)
    @rule(data=st.data(), num_tokens=st.integers(1, 8), fail=st.sampled_from(["", "", "", "rollback"]))
    def admit(self, data: st.DataObject, num_tokens: int, fail: str) -> None:
        self.books.admit(self.one_of(data, self.books.waiting), num_tokens, fail=fail)

    @precondition(lambda self: self.books.waiting)
    @rule(data=st.data(), num_tokens=st.integers(1, 12), fail=st.sampled_from(["", "", "rollback"]))
    def admit_together(self, data: st.DataObject, num_tokens: int, fail: str) -> None:
        names = st.lists(st.sampled_from(sorted(self.books.waiting)), max_size=4, unique=True)
        self.books.admit_together(data.draw(names), num_tokens, fail=fail)

    @precondition(lambda self: self.books.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 8), fail=st.sampled_from(["", "", "", "rollback"]))
    def go_on(self, data: st.DataObject, num_tokens: int, fail: str) -> None:
        name = self.one_of(data, self.books.running)
        self.books.draw(name, num_tokens % 2)
        self.books.go_on(name, num_tokens, fail=fail)

    @precondition(lambda self: self.books.running)
    @rule(data=st.data(), how=st.sampled_from(["finish", "abort", "preempt", "fork"]))
    def end(self, data: st.DataObject, how: str) -> None:
        name = self.one_of(data, self.books.running)
        if how == "abort":
            self.books.finish(name, keep=False)
        else:
            getattr(self.books, how)(name)

    @precondition(lambda self: self.books.running and not self.options.keys() & NOT_DROPPED)
    @rule(data=st.data(), first=st.integers(0, 8), count=st.integers(1, 3))
    def drop(self, data: st.DataObject, first: int, count: int) -> None:
        self.books.drop(self.one_of(data, self.books.running), first, count)

    @rule(tokens=tokens, tenant=tenants)
    def pin(self, tokens: list[int], tenant: str) -> None:
        self.books.pin(tokens, tenant)

    @precondition(lambda self: self.books.pinned)
    @rule(place=st.integers(0, 9))
    def unpin(self, place: int) -> None:
        self.books.unpin(place % len(self.books.pinned))

    @rule()
    def clear(self) -> None:
        self.books.clear()

    @rule()
    def compact(self) -> None:
        self.books.compact()

    @invariant()
    def books_balance(self) -> None:
        self.books.check()


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_thousands_of_steps_of_anything(variant: str, index: str) -> None:
    options = {**VARIANTS[variant], "index": index}
    machine: Any = type("Machine", (BooksMachine,), {"options": options})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(20), stateful_step_count=50))


def draw_and_go_on(books: Books, name: str, rng: random.Random, fail: str) -> None:
    books.draw(name, rng.randrange(2))
    books.go_on(name, rng.randrange(1, 9), fail=fail)


def wander(books: Books, rng: random.Random) -> None:
    """One random step, as the machine would take it."""
    ops: list[Callable[[], None]] = [
        lambda: books.arrive(
            [rng.randrange(2) for _ in range(rng.randrange(1, 15))],
            rng.choice(TENANTS),
            rng.choice(CLASSES),
            rng.choice([None, None, "g"]),
            rng.randrange(7),
        )
    ]
    fail = rng.choice(["", "", "", "rollback"])
    if books.waiting:
        name = rng.choice(sorted(books.waiting))
        ops += [lambda: books.admit(name, rng.randrange(1, 9), fail=fail)] * 3
        some = rng.sample(sorted(books.waiting), min(3, len(books.waiting)))
        ops.append(lambda: books.admit_together(some, rng.randrange(1, 13), fail=fail))
    if books.running:
        one = rng.choice(sorted(books.running))
        ops += [lambda: draw_and_go_on(books, one, rng, fail)] * 4
        ops += [lambda: books.finish(one), lambda: books.preempt(one), lambda: books.fork(one)]
        ops.append(lambda: books.finish(one, keep=False))
    if rng.random() < 0.1:
        ops.append(lambda: books.pin([rng.randrange(2) for _ in range(6)], rng.choice(TENANTS)))
        ops.append(lambda: books.unpin(0) if books.pinned else None)
        ops += [books.clear, books.compact]
    rng.choice(ops)()
    while len(books.waiting) > 12:
        del books.waiting[min(books.waiting)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_million_steps(variant: str, index: str) -> None:
    rng = random.Random(f"{variant}:{index}")
    books = Books(index, **VARIANTS[variant])
    for step in range(1_000_000 // (len(VARIANTS) * len(INDEXES))):
        if step % 5_000 == 0:
            books = Books(index, **VARIANTS[variant])
        wander(books, rng)
        books.check()


OPERATIONS = ("index.insert", "index.pin", "index.unpin", "index.evict", "index.evict_from", "index.retract",
              "pool.allocate", "pool.append_blocks", "pool.free", "pool.hand_over",
              "pool.take_back")  # fmt: skip


class FaultyBooks(Books):
    """Raises `InjectedError` at the n-th operation on index or pool, before that does anything."""

    countdown = 0
    depth = 0

    def arm(self, countdown: int) -> None:
        self.countdown = countdown
        for path in OPERATIONS:
            part, name = path.split(".")
            self._wrap(getattr(self.kv, part), name)

    def _wrap(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def faulty(*given: Any, **named: Any) -> Any:
            self.countdown -= self.depth == 0  # calls of the parts to themselves are no steps
            if self.countdown == 0 and self.depth == 0:
                raise InjectedError(name)
            self.depth += 1
            try:
                return real(*given, **named)
            finally:
                self.depth -= 1

        setattr(owner, name, faulty)


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exception_anywhere_leaves_the_books_balanced(variant: str, index: str) -> None:
    hits, seeds = 0, examples(60)
    for seed in range(seeds):
        rng = random.Random(seed)
        books = FaultyBooks(index, **VARIANTS[variant])
        for _ in range(40):
            wander(books, rng)
        books.arm(rng.randrange(1, 12))
        for _ in range(30):
            try:
                wander(books, rng)
            except InjectedError:
                hits += 1
                books.countdown = 0
                break
        books.kv.check()
        books.resident()
        for name in list(books.running):
            books.kv.release(books.running.pop(name), keep=False)
        books.kv.check()
    assert hits > seeds / 2
