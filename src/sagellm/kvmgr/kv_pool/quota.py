"""`QuotaManager`: shares of the pool by tenant and by class of service, with what is idle on loan."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from sagellm.core.errors import BookkeepingError
from sagellm.core.types import Account

_MIN_ACCOUNTS_TO_PRUNE = 1024
_NO_CEILING = 2**62


@dataclass(frozen=True, slots=True)
class Share:
    """Blocks of one tenant or class: what it can always have, and what it can never exceed (None: all there
    is)."""

    guaranteed: int = 0
    ceiling: int | None = None

    def __post_init__(self) -> None:
        if self.guaranteed < 0:
            raise ValueError(f"a guarantee is at least 0 blocks, got {self.guaranteed}")
        if self.ceiling is not None and self.ceiling < self.guaranteed:
            raise ValueError(f"the ceiling ({self.ceiling}) is below the guarantee ({self.guaranteed})")


_NO_SHARE = Share()
_NO_SHARES: Mapping[str, Share] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class _Usage:
    """Of one tenant or one class, over all of its accounts."""

    guaranteed: int
    ceiling: int
    used: int = 0


@dataclass(slots=True, eq=False)
class _Book:
    """Of one account. `promises` decide how far it is above: its tenant, and its class if that has a
    guarantee."""

    tenant: _Usage
    service_class: _Usage
    promises: tuple[_Usage, ...]
    used: int = 0


class QuotaManager:
    """Implements `BlockQuota`. A charge counts on the account, on its tenant and on its class.

    A guarantee is not set aside: others borrow what is idle of it, up to their ceilings, and give it back by
    `reclaim`. `default` is the share of each tenant that has no name here; a class without a name has
    neither guarantee nor ceiling. Only named ones have guarantees, which must fit into the pool together.

    Belongs to one pool, which charges and refunds under its lock; `headroom`, `used` and `reclaim` are for
    the thread that acts on the answer.
    """

    def __init__(
        self,
        total_blocks: int,
        tenants: Mapping[str, Share] = _NO_SHARES,
        classes: Mapping[str, Share] = _NO_SHARES,
        default: Share = _NO_SHARE,
    ) -> None:
        for kind, shares in (("tenants", tenants), ("classes", classes)):
            promised = sum(share.guaranteed for share in shares.values())
            if promised > total_blocks:
                raise ValueError(
                    f"{kind} are guaranteed {promised} blocks together; there are {total_blocks}"
                )
        if default.guaranteed:
            raise ValueError("the default share cannot have a guarantee: name the tenants that have one")
        self.total_blocks = total_blocks
        self._default = default
        self._books: dict[Account, _Book] = {}
        self._tenants = {name: self._usage(share) for name, share in tenants.items()}
        self._classes = {name: self._usage(share) for name, share in classes.items()}
        self._named = frozenset(tenants), frozenset(classes)
        self._prune_at = _MIN_ACCOUNTS_TO_PRUNE

    @classmethod
    def from_fractions(
        cls,
        total_blocks: int,
        tenants: Mapping[str, tuple[float, float | None]] | None = None,
        classes: Mapping[str, tuple[float, float | None]] | None = None,
        default_ceiling: float | None = None,
    ) -> QuotaManager:
        """The same from (guaranteed, ceiling) as fractions of the pool, 0 to 1, rounded down to blocks."""

        def share(guaranteed: float, ceiling: float | None) -> Share:
            return Share(
                _blocks(total_blocks, guaranteed), None if ceiling is None else _blocks(total_blocks, ceiling)
            )

        return cls(
            total_blocks,
            {name: share(*fractions) for name, fractions in (tenants or {}).items()},
            {name: share(*fractions) for name, fractions in (classes or {}).items()},
            share(0.0, default_ceiling),
        )

    # -- the books

    def charge(self, account: Account, num_blocks: int) -> bool:
        if num_blocks < 0:
            raise BookkeepingError(f"{account}: cannot charge {num_blocks} blocks")
        book = self._books.get(account) or self._open(account)
        tenant, service_class = book.tenant, book.service_class
        of_tenant, of_class = tenant.used + num_blocks, service_class.used + num_blocks
        if of_tenant > tenant.ceiling or of_class > service_class.ceiling:
            return False
        tenant.used = of_tenant
        service_class.used = of_class
        book.used += num_blocks
        return True

    def refund(self, account: Account, num_blocks: int) -> None:
        if num_blocks == 0:  # also where the account was forgotten since
            return
        book = self._books.get(account)
        if book is None or not 0 <= num_blocks <= book.used:
            raise BookkeepingError(
                f"{account} is charged for {self.used(account)} blocks and cannot give back {num_blocks}"
            )
        book.used -= num_blocks
        book.tenant.used -= num_blocks
        book.service_class.used -= num_blocks

    def paying(self, account: Account) -> Account:
        """Who pays for an account: itself, but tenants and classes that have no share here pay together, so
        that names which clients make up cost nothing."""
        tenants, classes = self._named
        has_default = self._default.ceiling is not None
        return Account(
            account.tenant if has_default or account.tenant in tenants else "",
            account.service_class if account.service_class in classes else "",
        )

    def headroom(self, account: Account) -> int:
        book = self._books.get(account) or self._open(account)
        return min(_room(book.tenant), _room(book.service_class), self.total_blocks)

    def headrooms(self, account: Account) -> dict[str, int]:
        book = self._books.get(account) or self._open(account)
        usages = ("tenant", account.tenant, book.tenant), ("class", account.service_class, book.service_class)
        return {f"{kind} {name}": _room(use) for kind, name, use in usages if use.ceiling < _NO_CEILING}

    def ceiling(self, account: Account) -> int:
        book = self._books.get(account) or self._open(account)
        return min(book.tenant.ceiling, book.service_class.ceiling)

    def used(self, account: Account) -> int:
        book = self._books.get(account)
        return book.used if book is not None else 0

    # -- who gives

    def reclaim(
        self, account: Account, num_blocks: int, evictable: Mapping[Account, int], num_free: int = 0
    ) -> dict[Account, int] | None:
        """Who gives how many of its evictable blocks so that `account` can have `num_blocks`, or None.

        They sum to `num_blocks - num_free`, `num_free` being blocks that nobody has; to more only where a
        ceiling is in the way, since room below it comes from those that share it.

        How far an account is above its guarantee is the smaller of its tenant's and its class's excess (a
        class without a guarantee does not count). The furthest above gives down to the level of the next,
        then both do, and so on; the first by name gives one more where it does not come out even. Then come
        accounts that can give only because the tenant or class at its guarantee is also that of `account`,
        and so keeps the block; then `account` itself. None only if there is no other way either: between a
        tenant's guarantee and a class's, neither is broken for the other. Changes nothing.
        """
        book = self._books.get(account) or self._open(account)
        givers = _Givers(self._books, account, evictable)
        for scope, needed in (
            (book.tenant, num_blocks - _room(book.tenant)),
            (book.service_class, num_blocks - _room(book.service_class)),
            (None, num_blocks - num_free),
        ):
            if not givers.give(scope, needed):
                return None
        return {one: count for one, count in givers.given.items() if count}

    def check(self) -> None:
        """Raise `BookkeepingError` where an account's books and those of its tenant and class differ, or a
        ceiling is exceeded."""
        for kind, usages, field in (("tenant", self._tenants, 0), ("class", self._classes, 1)):
            charged = dict.fromkeys(usages, 0)
            for account, book in self._books.items():
                charged[account[field]] += book.used
            for name, usage in usages.items():
                if usage.used != charged[name]:
                    raise BookkeepingError(
                        f"{kind} {name!r} uses {usage.used} blocks, its accounts {charged[name]}"
                    )
                if usage.used > usage.ceiling:
                    raise BookkeepingError(f"{kind} {name!r} uses {usage.used} of at most {usage.ceiling}")
        for account, book in self._books.items():
            if book.used < 0:
                raise BookkeepingError(f"{account} uses {book.used} blocks")

    # -- inside

    def _usage(self, share: Share) -> _Usage:
        return _Usage(share.guaranteed, _NO_CEILING if share.ceiling is None else share.ceiling)

    def _open(self, account: Account) -> _Book:
        if len(self._books) >= self._prune_at:
            self._prune()
        tenant = self._tenants.get(account.tenant)
        if tenant is None:
            tenant = self._tenants[account.tenant] = self._usage(self._default)
        service_class = self._classes.get(account.service_class)
        if service_class is None:
            service_class = self._classes[account.service_class] = self._usage(_NO_SHARE)
        promises = (tenant, service_class) if service_class.guaranteed else (tenant,)
        book = self._books[account] = _Book(tenant, service_class, promises)
        return book

    def _prune(self) -> None:
        """Forget accounts, and tenants and classes without a name here, that have nothing: names come from
        outside, and never end."""
        self._books = {account: book for account, book in self._books.items() if book.used}
        tenants, classes = self._named
        self._tenants = {name: use for name, use in self._tenants.items() if use.used or name in tenants}
        self._classes = {name: use for name, use in self._classes.items() if use.used or name in classes}
        self._prune_at = max(_MIN_ACCOUNTS_TO_PRUNE, 2 * len(self._books))


class _Givers:
    """One `reclaim` in the making: who has what left to give, and how far tenants and classes are above."""

    def __init__(
        self, books: Mapping[Account, _Book], asking: Account, evictable: Mapping[Account, int]
    ) -> None:
        self._books = books
        self._asking = asking
        self._left = {one: evictable[one] for one in sorted(evictable) if evictable[one] and one in books}
        self._excess = {
            usage: usage.used - usage.guaranteed for one in self._left for usage in books[one].promises
        }
        self.given = dict.fromkeys(self._left, 0)
        self._firm = self.given

    def give(self, scope: _Usage | None, needed: int) -> bool:
        """All that is given by members of `scope` (None: anybody) is at least `needed` from now on, or
        False."""
        if needed <= 0:
            return True
        self._firm = self.given.copy()
        members = [one for one in self._left if scope is None or scope in _both(self._books[one])]
        needed -= sum(self.given[one] for one in members)
        others = [one for one in members if one != self._asking]
        shared = _both(self._books[self._asking])
        needed -= self._level(others, needed, ())
        needed -= self._level(others, needed, shared)
        needed -= self._exchange(others, needed, shared)
        if self._asking in members:
            needed -= self._take(self._asking, needed)
        return needed <= 0

    def _level(self, accounts: Sequence[Account], needed: int, spared: tuple[_Usage, ...]) -> int:
        """Take `needed` blocks from the top down, or what there is above the guarantees; those of `spared`
        are not touched, since their blocks come back to them. As if block by block, in strides."""
        taken = 0
        counted = {
            one: [usage for usage in self._books[one].promises if usage not in spared] for one in accounts
        }
        while taken < needed:
            levels = {one: self._above(one, counted[one]) for one in accounts if self._left[one]}
            top = max(levels.values(), default=0)
            if top <= 0:
                break
            highest = [one for one, level in levels.items() if level == top]
            below = max((level for level in levels.values() if 0 < level < top), default=0)
            stride = min(top - below, max(1, (needed - taken) // len(highest)))
            for one in highest:
                reach = self._above(one, counted[one]) - (top - stride)
                taken += self._take(one, min(reach, needed - taken))
        return taken

    def _above(self, account: Account, counted: Sequence[_Usage]) -> int:
        """Blocks that the account could give before a guarantee is touched."""
        return min([self._excess[usage] for usage in counted], default=self._left[account])

    def _exchange(self, accounts: Sequence[Account], needed: int, spared: tuple[_Usage, ...]) -> int:
        """More than one account after the other can give, where tenants and classes cross: who gave keeps
        some, so that two others can give more. Augmenting paths, L. R. Ford and D. R. Fulkerson 1956."""
        gained = 0
        while gained < needed:
            path = self._path(accounts, spared)
            if not path:
                break
            ends = (self._books[path[0]].tenant, self._books[path[-1]].service_class)
            most = min(
                needed - gained,
                *(self._spare(usage, spared) for usage in ends),
                *(self._left[one] for one in path[::2]),
                *(self.given[one] - self._firm[one] for one in path[1::2]),
            )
            for place, one in enumerate(path):
                self._move(one, -most if place % 2 else most)
            gained += most
        return gained

    def _path(self, accounts: Sequence[Account], spared: tuple[_Usage, ...]) -> list[Account]:
        """Accounts that would give more, less, more, ..., more, in turns of one class and of one tenant: from
        a tenant that can spare blocks to a class that can. The shortest; empty where there is none."""
        tenants = [self._books[one].tenant for one in accounts]
        paths: dict[_Usage, list[Account]] = {one: [] for one in tenants if self._spare(one, spared) > 0}
        reached = list(paths)
        for usage in reached:
            path = paths[usage]
            at_class = len(path) % 2 == 1
            if at_class and self._spare(usage, spared) > 0:
                return path
            for one in accounts:
                tenant, service_class = _both(self._books[one])
                here, there = (service_class, tenant) if at_class else (tenant, service_class)
                can = self.given[one] > self._firm[one] if at_class else self._left[one] > 0
                if here is usage and can and there not in paths:
                    paths[there] = [*path, one]
                    reached.append(there)
        return []

    def _spare(self, usage: _Usage, spared: tuple[_Usage, ...]) -> int:
        return sys.maxsize if usage in spared else self._excess.get(usage, sys.maxsize)

    def _take(self, account: Account, num_blocks: int) -> int:
        taken = max(0, min(num_blocks, self._left[account]))
        self._move(account, taken)
        return taken

    def _move(self, account: Account, num_blocks: int) -> None:
        self.given[account] += num_blocks
        self._left[account] -= num_blocks
        for usage in self._books[account].promises:
            self._excess[usage] -= num_blocks


def _both(book: _Book) -> tuple[_Usage, _Usage]:
    return book.tenant, book.service_class


def _room(usage: _Usage) -> int:
    return usage.ceiling - usage.used


def _blocks(total_blocks: int, fraction: float) -> int:
    if not 0 <= fraction <= 1:
        raise ValueError(f"a fraction of the pool is between 0 and 1, got {fraction}")
    return int(fraction * total_blocks + 1e-9)  # 0.29 * 100 is 28.999999999999996
