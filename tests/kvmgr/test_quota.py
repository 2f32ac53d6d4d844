"""Quotas: charges against a slow twin, and which accounts give, block by block and by cuts of the flow."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sagellm.core.errors import BookkeepingError
from sagellm.core.types import NO_ACCOUNT, Account
from sagellm.kvmgr.kv_pool import FreeListPool, QuotaManager, Share

TOTAL = 24
ACCOUNTS = [Account(tenant, service) for tenant in ("x", "y", "z") for service in ("batch", "chat", "")]
shares = st.builds(
    lambda guaranteed, above: Share(guaranteed, None if above is None else guaranteed + above),
    st.integers(0, TOTAL // 2),
    st.none() | st.integers(0, TOTAL // 2),
)
default_shares = st.builds(lambda ceiling: Share(0, ceiling), st.none() | st.integers(4, TOTAL))


@dataclass
class Twin:
    """The same rules, counted anew for every question and applied block by block."""

    tenants: Mapping[str, Share]
    classes: Mapping[str, Share]
    default: Share
    used: Counter[Account] = field(default_factory=Counter)

    def sides(self, account: Account) -> list[tuple[int, str, Share]]:
        tenant = self.tenants.get(account.tenant, self.default)
        return [
            (0, account.tenant, tenant),
            (1, account.service_class, self.classes.get(account.service_class, Share())),
        ]

    def use(self, side: int, name: str) -> int:
        return sum(count for account, count in self.used.items() if account[side] == name)

    def headroom(self, account: Account) -> int:
        rooms = [self.room(side, name, share) for side, name, share in self.sides(account)]
        return min(*rooms, TOTAL)

    def room(self, side: int, name: str, share: Share) -> int:
        return 2 * TOTAL if share.ceiling is None else share.ceiling - self.use(side, name)

    def excesses(self, giver: Account, given: Counter[Account], spared: Account | None) -> list[int]:
        """How far tenant and class of `giver` are above, as far as they count."""
        found = []
        for side, name, share in self.sides(giver):
            counts = side == 0 or share.guaranteed > 0
            if counts and (spared is None or spared[side] != name):
                gone = sum(count for one, count in given.items() if one[side] == name)
                found.append(self.use(side, name) - share.guaranteed - gone)
        return found

    def reclaim(
        self, account: Account, num_blocks: int, evictable: Mapping[Account, int], num_free: int
    ) -> dict[Account, int] | None:
        """One block at a time from the furthest above, first those above both guarantees."""
        given: Counter[Account] = Counter()
        scopes = [(s, name, num_blocks - self.room(s, name, share)) for s, name, share in self.sides(account)]
        for side, name, needed in [*scopes, (None, "", num_blocks - num_free)]:
            members = [one for one in sorted(evictable) if side is None or one[side] == name]
            while sum(given[one] for one in members) < needed:
                giver = self.next_giver(account, members, evictable, given)
                if giver is None:
                    return None
                given[giver] += 1
        return dict(given)

    def next_giver(
        self,
        account: Account,
        members: list[Account],
        evictable: Mapping[Account, int],
        given: Counter[Account],
    ) -> Account | None:
        left = {one: evictable[one] - given[one] for one in members if evictable[one] > given[one]}
        for spared in (None, account):
            levels = {one: min(self.excesses(one, given, spared), default=left[one]) for one in left}
            levels = {one: level for one, level in levels.items() if one != account and level > 0}
            if levels:
                return max(levels, key=levels.__getitem__)
        return account if account in left else None

    def most_of_others(self, account: Account, evictable: Mapping[Account, int]) -> int:
        """The smallest cut between tenants and classes, found by trying all: what others can give at most."""
        edges = {one: count for one, count in evictable.items() if one != account and count}
        nodes = sorted({(side, one[side]) for one in edges for side in (0, 1)})
        cuts = itertools.product([False, True], repeat=len(nodes))
        return min(self.cut(account, edges, dict(zip(nodes, cut, strict=True))) for cut in cuts)

    def cut(
        self, account: Account, edges: Mapping[Account, int], paid: Mapping[tuple[int, str], bool]
    ) -> int:
        size = 0
        for (side, name), pays in paid.items():
            share = (self.tenants.get(name, self.default), self.classes.get(name, Share()))[side]
            if pays and (account[side] == name or (side == 1 and not share.guaranteed)):
                return TOTAL * TOTAL
            size += max(0, self.use(side, name) - share.guaranteed) if pays else 0
        uncut = (one for one in edges if not paid[0, one.tenant] and not paid[1, one.service_class])
        return size + sum(edges[one] for one in uncut)


class QuotaMachine(RuleBasedStateMachine):
    @initialize(
        tenants=st.fixed_dictionaries({"x": shares, "y": shares}),
        classes=st.fixed_dictionaries({"chat": shares, "batch": shares}),
        default=default_shares,
    )
    def begin(self, tenants: dict[str, Share], classes: dict[str, Share], default: Share) -> None:
        self.quota = QuotaManager(TOTAL, tenants, classes, default)
        self.twin = Twin(tenants, classes, default)

    def num_free(self) -> int:
        return TOTAL - self.twin.used.total()

    @rule(account=st.sampled_from(ACCOUNTS), count=st.integers(0, 10))
    def charge(self, account: Account, count: int) -> None:
        count = min(count, self.num_free())
        assert self.quota.charge(account, count) == (count <= self.twin.headroom(account))
        self.twin.used[account] = self.quota.used(account)

    @rule(account=st.sampled_from(ACCOUNTS), data=st.data())
    def refund(self, account: Account, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.twin.used[account]))
        if self.twin.used[account]:
            self.quota.refund(account, count)
            self.twin.used[account] -= count
        with pytest.raises(BookkeepingError, match="cannot give back"):
            self.quota.refund(account, self.twin.used[account] + 1)

    @precondition(lambda self: self.num_free() < 12)
    @rule(
        account=st.sampled_from(ACCOUNTS), count=st.integers(1, 12), data=st.data(), all_of_it=st.booleans()
    )
    def reclaim(self, account: Account, count: int, data: st.DataObject, all_of_it: bool) -> None:
        free = self.num_free()
        has = {one: used for one, used in self.twin.used.items() if used}
        drawn = st.fixed_dictionaries({one: st.integers(0, used) for one, used in has.items()})
        evictable = has if all_of_it else data.draw(drawn, label="evictable")
        gifts = self.quota.reclaim(account, count, evictable, free)
        slow = self.twin.reclaim(account, count, evictable, free)
        if slow is not None and (gifts is None or slow.get(account, 0) == gifts.get(account, 0)):
            assert gifts == slow
        self.says_no_only_if_it_must(account, count, evictable, gifts)
        if gifts is not None:
            self.keeps_promises(account, evictable, gifts)
            self.carry_out(account, count, gifts)

    def says_no_only_if_it_must(
        self,
        account: Account,
        count: int,
        evictable: Mapping[Account, int],
        gifts: Mapping[Account, int] | None,
    ) -> None:
        others, free = self.twin.most_of_others(account, evictable), self.num_free()
        if count > self.twin.headroom(account):
            return
        assert (gifts is not None) == (count - free <= others + evictable.get(account, 0))
        if gifts is not None:
            assert sum(gifts.values()) == max(0, count - free)
            assert gifts.get(account, 0) == max(0, count - free - others)

    def keeps_promises(
        self, account: Account, evictable: Mapping[Account, int], gifts: Mapping[Account, int]
    ) -> None:
        for giver, gift in gifts.items():
            assert 0 < gift <= evictable[giver]
            for side, name, share in self.twin.sides(giver):
                gone = sum(count for one, count in gifts.items() if one[side] == name)
                if account[side] != name:
                    assert self.twin.use(side, name) - gone >= share.guaranteed

    def carry_out(self, account: Account, count: int, gifts: Mapping[Account, int]) -> None:
        for giver, gift in gifts.items():
            self.quota.refund(giver, gift)
            self.twin.used[giver] -= gift
        assert self.quota.charge(account, count)
        self.twin.used[account] += count

    @invariant()
    def books_agree(self) -> None:
        self.quota.check()
        for account in ACCOUNTS:
            assert self.quota.used(account) == self.twin.used[account]
            assert self.quota.headroom(account) == self.twin.headroom(account)


QuotaMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=25)
TestQuota = QuotaMachine.TestCase


@given(
    guarantees=st.lists(st.integers(0, 8), min_size=3, max_size=3),
    uses=st.lists(st.integers(0, TOTAL), min_size=9, max_size=9),
    data=st.data(),
)
def test_a_tenant_always_reaches_its_guarantee_where_the_rest_is_evictable(
    guarantees: list[int], uses: list[int], data: st.DataObject
) -> None:
    quota = QuotaManager(TOTAL, {name: Share(g) for name, g in zip("xyz", guarantees, strict=True)})
    free = TOTAL
    for account, use in zip(ACCOUNTS, uses, strict=True):
        assert quota.charge(account, min(use, free))
        free -= min(use, free)
    account = data.draw(st.sampled_from(ACCOUNTS))
    of_tenant = sum(quota.used(one) for one in ACCOUNTS if one.tenant == account.tenant)
    wanted = max(0, guarantees["xyz".index(account.tenant)] - of_tenant)
    others = {one: quota.used(one) for one in ACCOUNTS if one.tenant != account.tenant}
    assert quota.reclaim(account, wanted, others, free) is not None


@settings(max_examples=300)
@given(
    guarantees=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    uses=st.lists(st.integers(0, 2), min_size=9, max_size=9),
    account=st.sampled_from(ACCOUNTS),
)
def test_others_give_all_that_the_guarantees_leave_before_the_account_itself_gives(
    guarantees: list[int], uses: list[int], account: Account
) -> None:
    tenants = {name: Share(g) for name, g in zip("xy", guarantees[:2], strict=True)}
    classes = {name: Share(g) for name, g in zip(("chat", "batch"), guarantees[2:], strict=True)}
    quota, twin = QuotaManager(TOTAL, tenants, classes), Twin(tenants, classes, Share())
    for one, use in zip(ACCOUNTS, uses, strict=True):
        assert quota.charge(one, use)
        twin.used[one] = use
    others, own = twin.most_of_others(account, twin.used), twin.used[account]
    gifts = quota.reclaim(account, others + own, twin.used)
    assert gifts is not None
    assert gifts.get(account, 0) == own
    assert quota.reclaim(account, others + own + 1, twin.used) is None
    for count in range(others + own):  # no ceiling is in the way: nothing is given beyond what is asked for
        assert sum((quota.reclaim(account, count, twin.used) or {}).values()) == count


A, B, C = Account("a"), Account("b"), Account("c")


@pytest.mark.parametrize(
    ("num_blocks", "gifts"),
    [
        (3, {B: 3}),  # b is 9 above its guarantee, a 6 above
        (5, {B: 4, A: 1}),
        (6, {B: 4, A: 2}),
        (15, {B: 9, A: 6}),
        (17, {B: 9, A: 6, C: 2}),  # its own last
        (18, None),
    ],
)
def test_the_furthest_above_gives_first_down_to_the_next(
    num_blocks: int, gifts: dict[Account, int] | None
) -> None:
    quota = QuotaManager(40, {"a": Share(4), "b": Share(6), "c": Share(10)})
    for account, used in ((A, 10), (B, 15), (C, 2)):
        assert quota.charge(account, used)
    assert quota.reclaim(C, num_blocks, {A: 10, B: 15, C: 2}) == gifts


def test_an_account_within_its_guarantee_gives_to_its_own_tenant_at_most() -> None:
    quota = QuotaManager(20, {"x": Share(12), "y": Share(8)})
    chat, batch, other = Account("x", "chat"), Account("x", "batch"), Account("y", "batch")
    assert quota.charge(batch, 12)
    assert quota.charge(other, 8)
    assert quota.reclaim(other, 1, {batch: 12}) is None
    assert quota.reclaim(chat, 1, {batch: 12, other: 8}) == {batch: 1}


def test_blocks_are_exchanged_where_the_first_choice_leads_nowhere() -> None:
    """Tenants a and b and class chat are one above. After a block of a's chat no account could give, since b
    has only chat; but a can give of its other work instead."""
    quota = QuotaManager(20, {"a": Share(2), "b": Share(1)}, {"chat": Share(3)})
    used = {Account("a", "chat"): 2, Account("a", "work"): 1, Account("b", "chat"): 2}
    for account, count in used.items():
        assert quota.charge(account, count)
    assert quota.reclaim(Account("c"), 1, used) == {Account("a", "chat"): 1}
    assert quota.reclaim(Account("c"), 2, used) == {Account("a", "work"): 1, Account("b", "chat"): 1}
    assert quota.reclaim(Account("c"), 3, used) is None


def test_no_more_is_exchanged_than_is_asked_for() -> None:
    """More than one exchange is needed here, and the last one could give more than is missing."""
    quota = QuotaManager(
        40,
        {"a": Share(2), "b": Share(4), "c": Share(2)},
        {"chat": Share(5), "work": Share(), "talk": Share(3)},
    )
    blocks = {"a": (3, 3, 3, 4), "b": (4, 2, 1, 0), "c": (3, 0, 3, 0)}
    classes = ("chat", "work", "talk", "")
    used = {
        Account(tenant, name): count
        for tenant, counts in blocks.items()
        for name, count in zip(classes, counts, strict=True)
    }
    for account, count in used.items():
        assert quota.charge(account, count)
    gifts = quota.reclaim(Account("d"), 17, used)
    assert gifts is not None
    assert sum(gifts.values()) == 17


def test_accounts_under_a_ceiling_make_room_below_it() -> None:
    quota = QuotaManager(40, {"x": Share(0, 10)}, {"batch": Share(0, 12)})
    mine, sibling, other = Account("x", "chat"), Account("x", "batch"), Account("y", "batch")
    assert quota.charge(sibling, 8)
    assert quota.charge(other, 4)
    assert not quota.charge(mine, 3)
    assert quota.reclaim(mine, 3, {sibling: 8, other: 4}, num_free=28) == {sibling: 1}
    assert quota.reclaim(other, 2, {sibling: 8, other: 4}, num_free=28) == {sibling: 2}
    assert quota.reclaim(mine, 11, {sibling: 8, other: 4}, num_free=28) is None
    assert (quota.ceiling(mine), quota.ceiling(sibling), quota.ceiling(other)) == (10, 10, 12)


def test_fractions_are_rounded_down_to_blocks() -> None:
    quota = QuotaManager.from_fractions(100, {"x": (0.29, 0.5), "y": (1 / 3, None)}, {"c": (0, 0.1)}, 0.2)
    assert [quota.headroom(Account(*one)) for one in (("x",), ("y",), ("z",), ("x", "c"))] == [
        50,
        100,
        20,
        10,
    ]
    assert quota.charge(Account("x"), 29)
    assert quota.reclaim(Account("y"), 1, {Account("x"): 29}) is None
    third = QuotaManager.from_fractions(99, dict.fromkeys("abc", (1 / 3, None)))
    assert third.headroom(Account("a")) == 99


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Share(-1), "at least 0 blocks, got -1"),
        (lambda: Share(5, 4), r"ceiling \(4\) is below the guarantee \(5\)"),
        (lambda: QuotaManager(9, {"x": Share(5), "y": Share(5)}), "tenants are guaranteed 10 blocks .* 9"),
        (lambda: QuotaManager(9, {}, {"x": Share(10)}), "classes are guaranteed 10 blocks"),
        (lambda: QuotaManager(9, default=Share(1)), "name the tenants"),
        (lambda: QuotaManager.from_fractions(9, {"x": (1.5, None)}), "between 0 and 1, got 1.5"),
    ],
)
def test_shares_that_cannot_be_kept_are_refused(make: object, text: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=text):
        make()


def test_a_negative_charge_is_an_error() -> None:
    with pytest.raises(BookkeepingError, match="-1"):
        QuotaManager(9).charge(NO_ACCOUNT, -1)


def test_accounts_that_have_nothing_are_forgotten() -> None:
    quota = QuotaManager(10_000, {"named": Share(1)})
    for number in range(5000):
        account = Account(f"user {number}", f"class {number}")
        assert quota.charge(account, 1)
        if number % 10:
            quota.refund(account, 1)
    quota.check()
    assert all(quota.used(Account(f"user {n}", f"class {n}")) == (not n % 10) for n in range(5000))
    assert quota.headroom(Account("named")) == 10_000
    assert len(quota._accounts) < 2500


def test_the_pool_charges_and_refunds() -> None:
    quota = QuotaManager(10, {"x": Share(2, 4)})
    pool = FreeListPool(10, quota=quota)
    mine = Account("x")
    allocation = pool.allocate(3, "request", mine)
    assert allocation is not None
    assert pool.allocate(2, "another", mine) is None
    assert pool.append_blocks(allocation, 2) is None
    assert pool.num_refused == 2
    handed = pool.hand_over(allocation, 0, 2, "index")
    pool.free(allocation)
    assert (quota.used(mine), pool.num_free) == (2, 8)
    pool.take_back("index", handed, mine)
    assert quota.used(mine) == 0
