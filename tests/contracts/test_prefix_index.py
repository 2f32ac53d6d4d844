"""What every registered prefix index must do, against a slow twin: a dictionary of every prefix."""

from __future__ import annotations

import gc
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sagellm.compat import PrefixMatcher
from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.events import BlocksRemoved, BlocksStored, Event, EventBus, IndexCleared
from sagellm.core.protocols.eviction import Extent, GiveUp, Hint
from sagellm.core.protocols.prefix_cache import (
    InsertResult,
    MatchEnd,
    PrefixHit,
    PrefixReuseIndex,
    SharedPrefix,
    SharedTail,
)
from sagellm.core.registry import registry
from sagellm.core.types import NO_ACCOUNT, Account, Namespace, Retention, Tokens
from sagellm.kvmgr.eviction import LRUPolicy
from sagellm.kvmgr.prefix_cache.fingerprint import fingerprint
from tests.effort import examples

BLOCK = 2
INDEXES = registry("index").names()
SPACES = (Namespace(), Namespace(tenant="a"), Namespace(adapter="b"))
ACCOUNTS = (NO_ACCOUNT, Account("a"), Account("a", "batch"))

Prefix = tuple[Namespace, tuple[int, ...]]
blocks_of_tokens = st.sampled_from([(0, 0), (0, 1), (1, 0)])  # two of them differ inside the block only
chains = st.lists(blocks_of_tokens, min_size=1, max_size=6).map(
    lambda some: [token for one in some for token in one]
)
spaces = st.sampled_from(SPACES)
counts = st.sampled_from([1, 2, 3, 5, 8, 0, 13])
accounts = st.sampled_from(ACCOUNTS)
wishes = st.lists(st.builds(Retention, start=st.integers(0, 9), stop=st.sampled_from([None, 11])), max_size=2)


def lru() -> Any:
    return registry("policy").create("lru")


POLICIES: dict[str, Callable[[], dict[str, Any]]] = {
    "no policy": dict,
    "one policy": lambda: {"policy": lru()},
    "policy per account": lambda: {"policy_factory": lru},
}


def make(name: str, **options: Any) -> PrefixReuseIndex:
    index: PrefixReuseIndex = registry("index").create(name, block_size=BLOCK, **options)
    return index


def prefixes(tokens: Sequence[int], space: Namespace) -> list[Prefix]:
    """The whole-block prefixes, the shortest first."""
    return [(space, tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK)]


def of_hit(hit: PrefixHit) -> list[Prefix]:
    return prefixes(hit.tokens.tolist()[: hit.num_tokens], hit.namespace)


@dataclass
class Resident:
    """What the twin knows of one block; `used` are seconds and a count."""

    block: int
    account: Account
    used: tuple[float, int]


class Listener:
    """Follows the events as a router would: the hashes that are resident, each below its parent."""

    def __init__(self, bus: EventBus) -> None:
        self.parents: dict[bytes, bytes | None] = {}
        self.removed: list[BlocksRemoved] = []
        self.num_cleared = 0
        for kind in (BlocksStored, BlocksRemoved, IndexCleared):
            bus.subscribe(kind, self.hear)

    def hear(self, event: Event) -> None:
        if isinstance(event, BlocksStored):
            above = event.parent_hash
            assert above is None or above in self.parents
            assert len(event.tokens) == 4 * BLOCK * len(event.block_ids)
            for one in event.hashes:
                assert one not in self.parents
                self.parents[one], above = above, one
        elif isinstance(event, BlocksRemoved):
            self.removed.append(event)
            assert len(event.block_ids) == len(event.hashes)
            for one in event.hashes:
                del self.parents[one]
                assert one not in self.parents.values(), "a block went before what is behind it"
        else:
            self.num_cleared += 1


class IndexMachine(RuleBasedStateMachine):
    """The twin maps (namespace, whole prefix) to the block that holds the prefix's last tokens."""

    name = "hashed"
    policies = "no policy"
    options: dict[str, Any] = {}  # noqa: RUF012 - of a subclass
    has_unique_hashes = True
    may_forget = True

    def __init__(self) -> None:
        super().__init__()
        bus = EventBus()
        self.listener = Listener(bus) if self.has_unique_hashes else None
        self.clock = ManualClock()
        made = POLICIES[self.policies]()
        self.index = make(self.name, events=bus, clock=self.clock, **made, **self.options)
        self.twin: dict[Prefix, Resident] = {}
        self.ghosts: dict[Prefix, tuple[float, str]] = {}
        self.history: set[tuple[Prefix, float | None, str | None]] = set()
        self.pinned: list[PrefixHit] = []
        self.inserted: list[InsertResult] = []  # pinned, and not retracted yet
        self.stale: list[PrefixHit] = []
        self.next_block = 0
        self.tick = 0
        self.search: Iterator[SharedPrefix | None] = self.index.shared_prefixes(3)

    # -- the twin

    def prompt(self, data: st.DataObject) -> tuple[list[int], Namespace]:
        """Mostly one that begins like something that is or was resident, maybe in another namespace."""
        space, head = data.draw(st.sampled_from([(SPACES[0], ()), *self.twin, *self.ghosts]))
        tail = data.draw(st.one_of(chains, st.just([0]), st.just([])))
        return [*head, *tail], data.draw(st.one_of(st.just(space), spaces))

    def longest(self, tokens: Sequence[int], space: Namespace) -> int:
        whole = prefixes(tokens, space)
        return next((count for count, one in enumerate(whole) if one not in self.twin), len(whole))

    def held(self) -> set[Prefix]:
        hits = [*self.pinned, *(result.hit for result in self.inserted)]
        return {one for hit in hits for one in of_hit(hit)}

    def inner(self) -> set[Prefix]:
        """What has something behind it."""
        return {(space, tokens[:-BLOCK]) for space, tokens in self.twin}

    def unpinned_of(self, account: Account) -> set[Prefix]:
        return {one for one in self.twin.keys() - self.held() if self.twin[one].account == account}

    def stamp(self) -> tuple[float, int]:
        self.clock.advance(1.0)
        self.tick += 1
        return self.clock.now(), self.tick

    def fresh_blocks(self, num_blocks: int) -> list[int]:
        self.next_block += num_blocks
        return list(range(self.next_block - num_blocks, self.next_block))

    def add(self, tokens: Sequence[int], space: Namespace, account: Account, blocks: Sequence[int]) -> int:
        used, existing = self.stamp(), self.longest(tokens, space)
        for one, block in list(zip(prefixes(tokens, space), blocks, strict=True))[existing:]:
            self.twin[one] = Resident(block, account, used)
            self.ghosts.pop(one, None)
        return existing

    def drop(self, gone: Sequence[Prefix]) -> None:
        """A block that goes hands the time of its last use to the one before it."""
        for space, tokens in sorted(gone, key=lambda one: -len(one[1])):
            used = self.twin.pop((space, tokens)).used
            above = self.twin.get((space, tokens[:-BLOCK]))
            if above is not None:
                above.used = max(above.used, used)

    def went(self, freed: Sequence[int], cause: str) -> set[Prefix]:
        """Take the blocks out of the twin; only what nobody pins and has nothing left behind it may go."""
        assert len(set(freed)) == len(freed)
        gone = {one for one, resident in self.twin.items() if resident.block in set(freed)}
        assert len(gone) == len(freed)
        assert not gone & self.held()
        accounts_gone = {self.twin[one].account for one in gone}
        self.drop(list(gone))
        assert self.inner() <= self.twin.keys() | {(space, ()) for space in SPACES}
        for one in gone:
            self.ghosts[one] = (self.clock.now(), cause)
            self.history.add((one, self.clock.now(), cause))
        self.check_removed(freed, cause)
        assert len(accounts_gone) <= len(gone)
        return gone

    def check_removed(self, freed: Sequence[int], cause: str) -> None:
        if self.listener is not None:
            told = [block for event in self.listener.removed for block in event.block_ids]
            assert sorted(told) == sorted(freed)
            assert {event.cause for event in self.listener.removed} <= {cause}
            self.listener.removed.clear()

    # -- what happens

    def do_insert(
        self, tokens: list[int], space: Namespace, account: Account, **options: Any
    ) -> tuple[InsertResult, int]:
        if self.policies == "one policy":
            account = NO_ACCOUNT
        blocks = self.fresh_blocks(len(tokens) // BLOCK)
        existing = self.add(tokens, space, account, blocks)
        result = self.index.insert(Tokens(tokens), blocks, space, account=account, **options)
        assert result.num_existing == existing
        assert result.hit.num_blocks == len(blocks)
        return result, existing

    @initialize(tokens=st.lists(chains, min_size=3, max_size=5), space=spaces)
    def begin(self, tokens: list[list[int]], space: Namespace) -> None:
        for position, one in enumerate(tokens):
            self.do_insert(one, space, ACCOUNTS[position % 3])

    @rule(data=st.data(), account=accounts, retention=wishes, pin=st.booleans())
    def insert(self, data: st.DataObject, account: Account, retention: list[Retention], pin: bool) -> None:
        tokens, space = self.prompt(data)
        result, _ = self.do_insert(tokens, space, account, retention=retention, pin=pin)
        if pin:
            self.pinned.append(result.hit)

    @rule(data=st.data(), account=accounts)
    def insert_to_retract(self, data: st.DataObject, account: Account) -> None:
        tokens, space = self.prompt(data)
        self.inserted.append(self.do_insert(tokens, space, account, pin=True)[0])

    @precondition(lambda self: self.inserted)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        """Refused where others pin any of the new blocks, or go on from one."""
        result = self.inserted.pop(data.draw(st.integers(0, len(self.inserted) - 1)))
        new = set(of_hit(result.hit)[result.num_existing :])
        if new & (self.held() | {(space, tokens[:-BLOCK]) for space, tokens in self.twin.keys() - new}):
            with pytest.raises(BookkeepingError, match="retract"):
                self.index.retract(result)
            self.inserted.append(result)
            return
        self.index.retract(result)
        self.drop(list(new))
        if self.listener is not None:
            self.listener.removed.clear()

    @rule(
        account=accounts,
        head=chains,
        tails=st.lists(chains, min_size=1, max_size=2, unique_by=lambda tail: tuple(tail[:BLOCK])),
    )
    def extend(self, account: Account, head: list[int], tails: list[list[int]]) -> None:
        """A new path, and what branches from its end."""
        account = NO_ACCOUNT if self.policies == "one policy" else account
        head, space = [2 + self.tick, 0, *head], SPACES[self.tick % 3]
        node = None
        for above, piece in (([], head), *((head, tail) for tail in tails)):
            blocks = self.fresh_blocks(len(piece) // BLOCK)
            whole = [*above, *piece]
            self.add(whole, space, account, [*[-1] * (len(above) // BLOCK), *blocks])
            made = self.index.extend(node, Tokens(piece), blocks, space, account=account)
            node = made if node is None else node
        with pytest.raises(BookkeepingError, match="is resident"):
            self.index.extend(None, Tokens(head), self.fresh_blocks(len(head) // BLOCK), space)

    @rule(data=st.data(), limit=st.one_of(st.none(), st.integers(-1, 20)))
    def lookup(self, data: st.DataObject, limit: int | None) -> None:
        tokens, space = self.prompt(data)
        hit = self.index.lookup(Tokens(tokens), space, limit)
        count = self.longest(tokens if limit is None else tokens[: max(0, limit)], space)
        assert (hit.num_blocks, hit.num_tokens) == (count, count * BLOCK)
        assert list(self.index.block_ids(hit)) == [self.twin[one].block for one in of_hit(hit)]
        assert self.index.verify(hit)
        self.stale.append(hit)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """Of a look-up that may be long ago."""
        hit = self.stale.pop(data.draw(st.integers(0, len(self.stale) - 1)))
        count = self.longest(hit.tokens.tolist()[: hit.num_tokens], hit.namespace)
        assert self.index.verify(hit) == (count == hit.num_blocks)
        free = set(of_hit(hit)[:count]) - self.held()
        assert self.index.num_unpinned_on_path(hit) == len(free)
        before = self.index.num_evictable
        pinned = self.index.pin(hit)
        assert pinned.num_blocks == count
        assert self.index.num_evictable == before - len(free)
        self.pinned.append(pinned)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        hit = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        alone = self.index.num_held_alone(hit)
        assert alone == len(set(of_hit(hit)) - self.held())
        before, used = self.index.num_evictable, self.stamp()
        self.index.unpin(hit)
        assert self.index.num_evictable == before + alone
        for one in of_hit(hit):
            self.twin[one].used = used

    @rule(count=counts)
    def evict(self, count: int) -> None:
        freed = self.index.evict(count, "test")
        if count > len(self.twin.keys() - self.held()):
            assert freed is None
            return
        assert freed is not None
        assert len(self.went(list(freed), "test")) == count

    @rule(account=st.one_of(st.none(), accounts), count=counts, most=st.sampled_from((1, 8, math.inf)))
    def evict_paths(self, account: Account | None, count: int, most: float) -> None:
        """Each block that goes is on a path that is returned, with its tokens, as all before it are."""
        twin = self.twin.copy()
        own = self.unpinned_of(account) if account else self.twin.keys() - self.held()
        freed, paths = self.index.evict_paths(count, account, "test", most)
        is_enough = sum(len(path.block_ids) for path in paths) >= most
        assert len(freed) == min(count, len(own)) or (account and len(freed) < count) or is_enough
        gone = self.went(list(freed), "test")
        told = [prefixes(path.tokens.tolist(), path.namespace) for path in paths]
        for path, whole in zip(paths, told, strict=True):
            assert list(path.block_ids) == [twin[one].block for one in whole]
            assert path.account == twin[whole[-1]].account
            assert whole[-1] in gone
            assert not any(whole[-1] in other for other in told if other is not whole)
        assert gone <= {one for whole in told for one in whole}

    @rule(account=accounts, count=counts)
    def evict_from(self, account: Account, count: int) -> None:
        own = self.unpinned_of(account)
        freed = self.index.evict_from(account, count, "quota")
        gone = self.went(list(freed), "quota")
        assert gone <= own
        assert len(gone) <= count
        if len(gone) < count:
            assert self.unpinned_of(account) <= self.inner(), "it could have given more"

    @rule(data=st.data(), count=counts)
    def evict_tail(self, data: st.DataObject, count: int) -> None:
        """Exactly the last blocks of the prefix that nothing else needs, of one account."""
        tokens, space = self.prompt(data)
        hit = self.index.lookup(Tokens(tokens), space)
        path, inner, expected = of_hit(hit), self.inner() | self.held(), set[Prefix]()
        for one in reversed(path[-count:] if count else []):
            if one in inner - expected or self.twin[one].account != self.twin[path[-1]].account:
                break
            expected.add(one)
            inner = {(name, rest[:-BLOCK]) for name, rest in self.twin.keys() - expected} | self.held()
        assert self.went(list(self.index.evict_tail(hit, count, "tail")), "tail") == expected

    @precondition(lambda self: len(self.twin) > 6)
    @rule()
    def clear(self) -> None:
        cleared = self.listener.num_cleared if self.listener is not None else 0
        freed = self.index.clear()
        assert len(self.twin.keys() - self.held()) == len(freed)
        self.went(list(freed), "cleared")
        if self.listener is not None:
            assert self.listener.num_cleared == cleared + (not self.twin)

    @precondition(lambda self: self.twin)
    @rule(data=st.data())
    def remap(self, data: st.DataObject) -> None:
        moving = data.draw(st.lists(st.sampled_from(list(self.twin)), max_size=4, unique=True))
        moves = {self.twin[one].block: self.fresh_blocks(1)[0] for one in moving}
        self.index.remap({**moves, self.next_block: self.next_block + 1})  # the last is somebody else's
        for resident in self.twin.values():
            resident.block = moves.get(resident.block, resident.block)

    @rule(data=st.data(), k=st.integers(0, 4))
    def branches(self, data: st.DataObject, k: int) -> None:
        tokens, space = self.prompt(data)
        known = {*self.inner()}
        expected = []
        for (where, leaf), resident in self.twin.items():
            common = sum(
                one == other
                for one, other in zip(prefixes(tokens, where), prefixes(leaf, where), strict=False)
            )
            if where == space and (where, leaf) not in known and common:
                expected.append((common, resident.used[1], len(leaf) // BLOCK, resident.used[0]))
        expected.sort(reverse=True)
        found = self.index.branches(Tokens(tokens), k, space)
        assert [(one.hit.num_blocks, one.num_blocks, one.used_s) for one in found] == [
            (common, length, used_s) for common, _, length, used_s in expected[:k]
        ]
        assert found == PrefixMatcher(self.index).best(Tokens(tokens), space, k)
        for branch in found:
            assert self.index.verify(branch.hit)

    @rule(count=st.sampled_from([0, 1, 2, 100]))
    def shared_prefixes(self, count: int) -> None:
        leaves, expected = self.twin.keys() - self.inner(), dict[Prefix, int]()
        followed = Counter((space, tokens[:-BLOCK]) for space, tokens in self.twin)
        for space, tokens in self.twin:
            if followed[space, tokens] > 1:
                expected[space, tokens] = sum(
                    where == space and leaf[: len(tokens)] == tokens for where, leaf in leaves
                )
        found = [one for one in self.index.shared_prefixes(count) if one is not None]
        assert [one.num_prompts for one in found] == sorted(expected.values(), reverse=True)[:count]
        assert len({(one.namespace, tuple(one.tokens)) for one in found}) == len(found)
        for one in found:
            assert expected[one.namespace, tuple(one.tokens)] == one.num_prompts

    @rule(num_steps=st.integers(1, 6))
    def search_while_it_changes(self, num_steps: int) -> None:
        for _ in range(num_steps):
            try:
                found = next(self.search)
            except StopIteration:
                self.search = self.index.shared_prefixes(3)
            else:
                assert found is None or len(found.tokens) % BLOCK == 0

    @rule(data=st.data())
    def explain(self, data: st.DataObject) -> None:
        tokens, space = self.prompt(data)
        report = self.index.explain(Tokens(tokens), space)
        whole, count = prefixes(tokens, space), self.longest(tokens, space)
        assert (report.num_blocks, report.num_tokens) == (count, count * BLOCK)
        assert (report.end is MatchEnd.COMPLETE) == (count == len(whole))
        assert (report.at_s is None) == (report.cause is None) == (report.end is not MatchEnd.EVICTED)
        if count < len(whole) and self.has_unique_hashes:
            self.check_reason(whole[count], report.end, report.at_s, report.cause)

    def check_reason(self, missing: Prefix, end: MatchEnd, at_s: float | None, cause: str | None) -> None:
        """Each reason must be true, and none at all is only given where none is true, or maybe forgotten."""
        space, tokens = missing
        was_evicted = missing in self.ghosts
        true = {MatchEnd.EVICTED} if was_evicted else set()
        if any((other, tokens) in self.twin for other in SPACES):
            true.add(MatchEnd.OTHER_NAMESPACE)
        like_it = {(*tokens[:-1], last) for last in range(3)}
        if any((space, one) in self.twin for one in like_it):
            true.add(MatchEnd.NOT_ALIGNED)
        if end is MatchEnd.EVICTED:
            assert (missing, at_s, cause) in self.history
        elif not (was_evicted and self.may_forget and end is MatchEnd.NEVER_SEEN):
            assert end in (true or {MatchEnd.NEVER_SEEN})

    @invariant()
    def books_balance(self) -> None:
        self.index.check()
        held = self.held()
        assert self.index.num_cached == len(self.twin)
        assert self.index.num_evictable == len(self.twin.keys() - held)
        assert sorted(self.index.all_block_ids()) == sorted(one.block for one in self.twin.values())
        for hit in self.pinned:
            assert list(self.index.block_ids(hit)) == [self.twin[one].block for one in of_hit(hit)]
        by_account = self.index.evictable_by_account()
        assert by_account.keys() >= {resident.account for resident in self.twin.values()}
        for account in ACCOUNTS:
            assert by_account.get(account, 0) == len(self.unpinned_of(account))

    @invariant()
    def listeners_know_what_is_resident(self) -> None:
        if self.listener is not None:
            hashes = {fingerprint(Tokens(tokens), BLOCK, space)[-1] for space, tokens in self.twin}
            assert self.listener.parents.keys() == hashes


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("name", INDEXES)
def test_state_machine(name: str, policies: str) -> None:
    machine: Any = type(f"Index_{name}", (IndexMachine,), {"name": name, "policies": policies})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(25), stateful_step_count=40))


def filled(name: str, *prompts_of_index: list[int], **options: Any) -> PrefixReuseIndex:
    """Blocks are numbered in order of insertion; the clock goes on by a second before each prompt."""
    clock = options.setdefault("clock", ManualClock())
    index = make(name, **options)
    for tokens in prompts_of_index:
        clock.advance(1.0)
        there, start = index.block_ids(index.lookup(Tokens(tokens))), index.num_cached
        num_new = len(tokens) // BLOCK - len(there)
        index.insert(Tokens(tokens), [*there, *range(start, start + num_new)])
    return index


each_index = pytest.mark.parametrize("name", INDEXES)


@each_index
def test_the_last_used_stays_longest_and_tails_go_before_heads(name: str) -> None:
    for options in POLICIES.values():
        index = filled(name, [1, 1, 1, 1], [2, 2], [3, 3], **options())
        index.unpin(index.pin(index.lookup(Tokens([1, 1, 1, 1]))))
        freed = [index.evict(1) for _ in range(4)]
        assert [list(one or ()) for one in freed] == [[2], [3], [1], [0]]


@each_index
def test_a_path_that_is_held_for_a_copy_counts_as_no_use(name: str) -> None:
    class Listening(LRUPolicy):
        heard: list[str] = []  # noqa: RUF012 - of all of them

        def pin(self, key: int) -> None:
            self.heard.append("used")
            super().pin(key)

    index = filled(name, [1, 1], [2, 2], policy=Listening())
    index.hint(index.lookup(Tokens([1, 1])), Hint(expected=True))
    index.unpin(index.pin(index.lookup(Tokens([1, 1])), is_use=False), is_use=False)
    assert not Listening.heard
    assert list(index.evict(1) or ()) == [1], "the hint still holds"
    index.pin(index.lookup(Tokens([1, 1])))
    assert Listening.heard == ["used"]


@each_index
def test_what_has_ended_is_not_among_the_evicted_paths(name: str) -> None:
    index = filled(name, [1, 1, 1, 1], [1, 1, 2, 2], [3, 3])
    index.hint(index.lookup(Tokens([1, 1, 1, 1])), Hint(ended=True))
    freed, paths = index.evict_paths(9)
    assert sorted(freed) == [0, 1, 2, 3]
    assert sorted(path.tokens.tolist() for path in paths) == [[1, 1, 2, 2], [3, 3]]
    assert [list(path.block_ids) for path in paths if len(path.block_ids) > 1] == [[0, 2]]
    assert index.evict_paths(9) == (array("i"), [])


@each_index
def test_short_branches_of_a_long_prefix_are_not_evicted_all_at_once(name: str) -> None:
    """A path for each would have to be read from its first token on."""
    index = filled(name, *([0, 0] * 50 + [branch, branch] for branch in range(1, 41)))
    freed, paths = index.evict_paths(40, max_path_blocks=300)
    assert (len(freed), len(paths)) == (12, 12), "four, then eight"
    assert sum(len(path.block_ids) for path in paths) == 12 * 51
    freed, paths = index.evict_paths(40)
    assert len(freed) == 40
    alone = filled(name, [0, 0] * 50)
    freed, paths = alone.evict_paths(40, max_path_blocks=60)
    assert (len(freed), [len(path.block_ids) for path in paths]) == (40, [50]), "one path is noted once"


class Strict(LRUPolicy):
    """Is told of an extent once."""

    def insert(self, extent: Extent) -> None:
        assert extent.key not in self._live
        super().insert(extent)


@each_index
def test_soft_retention_makes_a_range_look_younger(name: str) -> None:
    index = filled(name, policy=Strict())
    wish = Retention(start=0, stop=2, priority=50, duration_s=20.0)
    index.insert(Tokens([1, 1, 2, 2]), [10, 11], retention=[wish])
    index.insert(Tokens([3, 3]), [12])
    assert list(index.evict(2) or ()) == [11, 12]
    index.insert(Tokens([4, 4]), [13])
    index.insert(Tokens([4, 4]), [14], retention=[Retention(priority=100)])  # it was there before
    assert list(index.evict(1) or ()) == [10]


@each_index
def test_soft_retention_holds_the_blocks_that_its_range_touches_and_no_others(name: str) -> None:
    index = make(name, policy=lru(), clock=ManualClock())
    wish = Retention(start=2, stop=5, priority=100, duration_s=100.0)  # the second and the third block
    index.insert(Tokens([1, 1, 2, 2, 3, 3, 4, 4]), range(4), retention=[wish])
    index.insert(Tokens([5, 5, 6, 6]), [4, 5])
    assert [list(index.evict(1) or ()) for _ in range(5)] == [[3], [5], [4], [2], [1]]
    index.insert(Tokens([7, 7]), [6])
    assert list(index.evict(1) or ()) == [0]


@each_index
def test_a_policy_hears_what_a_use_is_and_what_is_new(name: str) -> None:
    calls: list[str] = []

    class Recorder(LRUPolicy):
        def insert(self, extent: Extent) -> None:
            calls.append("insert")
            super().insert(extent)

        def pin(self, key: int) -> None:
            calls.append("pin")
            super().remove(key)

        def unpin(self, extent: Extent) -> None:
            calls.append("unpin")
            super().insert(extent)

        def remove(self, key: int) -> None:
            calls.append("remove")
            super().remove(key)

    index = make(name, policy=Recorder())
    hit = index.insert(Tokens([1, 1]), [0]).hit
    index.unpin(index.pin(hit))
    assert calls == ["insert", "pin", "unpin"]
    index.insert(Tokens([1, 1, 2, 2]), [0, 1])
    assert calls[3:] == ["remove", "insert"]


@each_index
def test_the_account_with_most_evictable_blocks_gives_first(name: str) -> None:
    index = make(name, policy_factory=lru, clock=ManualClock())
    small, large = ACCOUNTS[1:]
    index.insert(Tokens([1, 1]), [0], account=small)
    index.insert(Tokens([2, 2, 2, 2]), [1, 2], account=large)
    assert list(index.evict(1) or ()) == [2]
    assert list(index.evict_from(small, 5)) == [0]
    assert index.evictable_by_account()[large] == 1
    assert list(index.evict_from(Account("nobody"), 5)) == []


@each_index
def test_what_leads_to_the_blocks_of_another_account_stays(name: str) -> None:
    index = make(name, policy_factory=lru, clock=ManualClock())
    head, tail = ACCOUNTS[1:]
    index.insert(Tokens([1, 1]), [0], account=head)
    index.insert(Tokens([1, 1, 2, 2]), [0, 1], account=tail)
    assert list(index.evict_from(head, 1)) == []
    assert list(index.evict(2) or ()) == [1, 0]


@each_index
def test_events_tell_hashes_parents_and_tokens(name: str) -> None:
    events, seen = EventBus(), list[object]()
    for kind in (BlocksStored, BlocksRemoved, IndexCleared):
        events.subscribe(kind, seen.append)
    index = make(name, events=events, clock=ManualClock())
    space, tokens = SPACES[1], Tokens([1, 1, 2, 2, 3, 3])
    first, second, third = fingerprint(tokens, BLOCK, space)
    index.insert(tokens, [7], space)
    index.insert(tokens, [7, 8, 9], space)
    index.evict(2, "a reason")
    index.clear()
    data = tokens.tobytes()
    assert seen[:2] == [
        BlocksStored((7,), 0, (first,), None, data[:8], space),
        BlocksStored((8, 9), 2, (second, third), first, data[8:], space),
    ]
    removed = [one for one in seen if isinstance(one, BlocksRemoved)]
    assert [one.cause for one in removed][-1] == "cleared"
    assert [block for one in removed for block in one.block_ids] == [9, 8, 7]
    assert [one for event in removed for one in event.hashes] == [third, second, first]
    assert seen[-1] == IndexCleared()


@each_index
def test_a_reported_hit_names_its_blocks_from_the_first_one_on(name: str) -> None:
    events, seen = EventBus(), list[BlocksStored]()
    index = make(name, events=events, clock=ManualClock())
    space, tokens = SPACES[1], Tokens([1, 1, 2, 2, 3, 3, 9])
    index.insert(tokens, [7], space)
    index.insert(tokens, [7, 8, 9], space)
    index.report_hit(index.lookup(tokens, space))  # nobody listens
    events.subscribe(BlocksStored, seen.append)
    index.report_hit(index.lookup(tokens, space, 5))
    index.report_hit(index.lookup(Tokens([5, 5]), space))  # no hit
    hashes = tuple(fingerprint(tokens, BLOCK, space)[:2])
    assert seen == [BlocksStored((7, 8), 0, hashes, None, tokens.tobytes()[:16], space)]
    index.check()


@each_index
def test_explain_tells_each_reason(name: str) -> None:
    clock = ManualClock()
    index = filled(name, [1, 1, 2, 2], [1, 1, 5, 6], clock=clock)
    index.insert(Tokens([1, 1, 7, 7]), [20, 21], SPACES[1])
    clock.advance(0.5)
    index.evict(1, "test")
    reports = {
        text: str(index.explain(Tokens(tokens)))
        for text, tokens in {
            "complete": [1, 1, 5, 6, 0],
            "evicted": [1, 1, 2, 2],
            "elsewhere": [1, 1, 7, 7],
            "not aligned": [1, 1, 5, 9],
            "never": [9, 9, 9, 9],
        }.items()
    }
    assert reports == {
        "complete": f"4 tokens in 2 blocks match; {MatchEnd.COMPLETE.value}",
        "evicted": f"2 tokens in 1 blocks match; {MatchEnd.EVICTED.value} at 2.500 s (test)",
        "elsewhere": f"2 tokens in 1 blocks match; {MatchEnd.OTHER_NAMESPACE.value}",
        "not aligned": f"2 tokens in 1 blocks match; {MatchEnd.NOT_ALIGNED.value}",
        "never": f"0 tokens in 0 blocks match; {MatchEnd.NEVER_SEEN.value}",
    }


@each_index
def test_only_the_last_evictions_are_remembered(name: str) -> None:
    index = filled(name, [1, 1], [2, 2], [3, 3], max_ghosts=2)
    index.evict(3)
    ends = [index.explain(Tokens([token] * 2)).end for token in (1, 2, 3)]
    assert ends == [MatchEnd.NEVER_SEEN, MatchEnd.EVICTED, MatchEnd.EVICTED]


@each_index
def test_a_lookup_changes_nothing(name: str) -> None:
    index = filled(name, [1, 1, 2, 2])
    index.lookup(Tokens([1, 1, 9, 9]), Namespace(tenant="nobody"))
    index.lookup(Tokens([1, 1, 9, 9]))
    index.check()
    assert (index.num_cached, index.num_evictable) == (2, 2)


MISUSE: dict[str, tuple[Callable[[PrefixReuseIndex], object], str]] = {
    "unpin of what is not pinned": (
        lambda index: index.unpin(index.lookup(Tokens([1, 1]))),
        "is not pinned",
    ),
    "more blocks than tokens": (lambda index: index.insert(Tokens([1, 1, 2, 2]), [5, 6, 7]), "3 blocks"),
    "evict fewer than none": (lambda index: index.evict(-1), "-1"),
    "evict fewer than none of one account": (lambda index: index.evict_from(NO_ACCOUNT, -1), "-1"),
    "retract of what is not pinned": (
        lambda index: index.retract(index.insert(Tokens([1, 1, 9, 9]), [8, 9])),
        "retract",
    ),
    "an account without a policy": (
        lambda index: index.insert(Tokens([8, 8]), [8], SPACES[1], account=ACCOUNTS[1]),
        "policy_factory",
    ),
}


@each_index
@pytest.mark.parametrize("wrong", MISUSE)
def test_misuse_is_told_and_changes_nothing(name: str, wrong: str) -> None:
    index = filled(name, [1, 1, 2, 2], policy=lru())
    call, message = MISUSE[wrong]
    with pytest.raises(BookkeepingError, match=message):
        call(index)
    index.check()
    assert index.lookup(Tokens([1, 1, 2, 2])).num_blocks == 2
    assert index.num_cached == index.num_evictable == (3 if "retract" in wrong else 2)


class Lazy(LRUPolicy):
    """Says yes and does nothing."""

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        return num_blocks


@each_index
@pytest.mark.parametrize("account", ACCOUNTS)
def test_a_policy_that_gives_up_nothing_is_named(name: str, account: Account) -> None:
    index = make(name, policy_factory=Lazy)
    index.insert(Tokens([1, 1]), [0], account=account)
    with pytest.raises(BookkeepingError, match=r"the eviction policy gave .*0 blocks"):
        index.evict(1)
    index.check()
    assert index.num_cached == 1


@each_index
def test_a_pin_is_given_back_once(name: str) -> None:
    index = filled(name, [1, 1, 2, 2])
    hit = index.pin(index.lookup(Tokens([1, 1, 2, 2])))
    index.unpin(hit)
    with pytest.raises(BookkeepingError, match="is not pinned"):
        index.unpin(hit)
    index.check()


@each_index
def test_an_insertion_that_others_use_is_not_retracted(name: str) -> None:
    index = filled(name)
    result = index.insert(Tokens([1, 1, 2, 2]), [0, 1], pin=True)
    other = index.pin(index.lookup(Tokens([1, 1, 2, 2])))
    with pytest.raises(BookkeepingError, match="retract"):
        index.retract(result)
    index.check()
    index.unpin(other)
    index.retract(result)
    assert index.num_cached == 0


@each_index
def test_an_insertion_that_others_went_on_from_is_not_retracted(name: str) -> None:
    index = filled(name)
    result = index.insert(Tokens([1, 1, 2, 2]), [0, 1], pin=True)
    index.insert(Tokens([1, 1, 2, 2, 3, 3]), [0, 1, 2])
    with pytest.raises(BookkeepingError, match="retract"):
        index.retract(result)
    index.check()
    assert index.lookup(Tokens([1, 1, 2, 2, 3, 3])).num_blocks == 3


@each_index
def test_an_insertion_whose_beginning_others_use_is_not_retracted(name: str) -> None:
    index = filled(name)
    result = index.insert(Tokens([1, 1, 2, 2, 3, 3]), [0, 1, 2], pin=True)
    other = index.pin(index.lookup(Tokens([1, 1, 2, 2, 9, 9])))
    with pytest.raises(BookkeepingError, match="retract"):
        index.retract(result)
    index.check()
    assert list(index.block_ids(other)) == [0, 1]
    index.unpin(other)
    index.retract(result)
    assert index.num_cached == 0
    index.check()


@each_index
def test_a_block_has_at_least_one_token(name: str) -> None:
    with pytest.raises(ValueError, match="block_size"):
        registry("index").create(name, block_size=0)


@each_index
def test_whoever_used_a_tail_used_what_leads_to_it(name: str) -> None:
    clock = ManualClock()
    index = filled(name, [1, 1], [1, 1, 2, 2], [3, 3], clock=clock)
    hit = index.pin(index.lookup(Tokens([1, 1, 2, 2])))
    clock.advance(2.0)
    index.unpin(hit)
    assert [one.used_s for one in index.branches(Tokens([1, 1]), 1)] == [5.0]
    assert list(index.evict(2) or ()) == [2, 1]
    assert [(one.num_blocks, one.used_s) for one in index.branches(Tokens([1, 1]), 1)] == [(1, 5.0)]


@each_index
def test_only_the_whole_blocks_of_a_hit_are_looked_at(name: str) -> None:
    """The manager adds tokens that a running request holds in its last, partial block."""
    index = filled(name, [1, 1, 2, 2], [1, 1, 5, 5])
    found = index.lookup(Tokens([1, 1, 2, 2, 3, 3]))
    longer = replace(found, num_tokens=5, tail=SharedTail("donor", 2, 1))
    assert index.verify(longer)
    assert list(index.block_ids(longer)) == [0, 1]
    pinned = index.pin(longer)
    assert (pinned.num_tokens, pinned.num_blocks, pinned.tail) == (4, 2, None)
    index.unpin(pinned)
    index.evict(3)
    assert index.pin(longer).num_blocks == 0


@pytest.mark.parametrize("name", INDEXES)
def test_accounts_that_have_nothing_are_forgotten(name: str) -> None:
    """Clients choose the names of tenants: nothing is kept for those whose blocks have gone."""
    policies: WeakSet[Any] = WeakSet()

    def factory() -> Any:
        made = lru()
        policies.add(made)
        return made

    index = make(name, policy_factory=factory)
    kept = index.insert(Tokens([1, 2]), [0], account=Account("kept"), pin=True)
    for number in range(1000):
        index.insert(Tokens([0, number]), [1], account=Account(str(number)))
        assert index.evict(1) is not None
    index.check()
    gc.collect()
    assert len(policies) < 200
    index.unpin(kept.hit)
    assert list(index.evict_from(Account("kept"), 1)) == [0]


@each_index
def test_the_prefixes_that_saved_most_come_first(name: str) -> None:
    clock = ManualClock()
    index, system, free = make(name, clock=clock), [1, 1, 2, 2, 3, 3], iter(range(1000))

    def serve(*rest: int) -> None:
        """As the manager does: what is found is pinned, then the whole prompt is stored."""
        tokens = Tokens([*system, *rest])
        hit = index.pin(index.lookup(tokens))
        num_new = len(tokens) // BLOCK - hit.num_blocks
        blocks = [*index.block_ids(hit), *(next(free) for _ in range(num_new))]
        result = index.insert(tokens, blocks, pin=True)
        index.unpin(result.hit)
        index.unpin(hit)

    assert index.hot_prefixes(9) == []
    serve(4, 4)
    serve(5, 5, 6, 6)
    clock.advance(2.0)
    serve(5, 5, 6, 6, 7, 7)
    clock.advance(3.0)
    first, second = index.hot_prefixes(9)
    assert (first.num_tokens, first.num_blocks, first.num_uses) == (6, 3, 5)
    assert (second.num_tokens, second.num_blocks, second.num_uses) == (10, 2, 3)
    assert (first.idle_s, second.idle_s) == (3.0, 3.0)
    assert index.hot_prefixes(1) == [first]
    assert len(first.digest) == 16
    serve(4, 4)
    assert {(each.num_tokens, each.num_uses) for each in index.hot_prefixes(9)} >= {(6, 7), (8, 3)}
    index.clear()
    assert index.hot_prefixes(9) == []


def test_indexes_agree_on_what_is_hot() -> None:
    """Of the same prompts. The hashed index counts block by block, the radix tree by nodes."""
    rng = random.Random(5)
    indexes, free = [make(name) for name in INDEXES], iter(range(100_000))
    for _ in range(300):
        tokens = Tokens([rng.choice((0, 0, 0, 1)) for _ in range(BLOCK * rng.randrange(1, 7))])
        known = indexes[0].lookup(tokens)
        new = [next(free) for _ in range(len(tokens) // BLOCK - known.num_blocks)]
        for index in indexes:
            hit = index.lookup(tokens)
            hit = index.pin(hit) if hit.num_blocks else hit
            index.unpin(index.insert(tokens, [*index.block_ids(hit), *new], pin=True).hit)
            if hit.num_blocks:
                index.unpin(hit)
    found = [
        sorted((each.num_tokens, each.num_blocks, each.num_uses) for each in index.hot_prefixes(10_000))
        for index in indexes
    ]
    assert len(found[0]) > 20
    assert all(each == found[0] for each in found)
