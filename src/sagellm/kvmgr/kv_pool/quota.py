"""`QuotaManager`: how many blocks each tenant and each class of service may have.

Idle guarantees are lent to others, which give blocks back when the owner needs them (`reclaim`).
"""

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
    """The share of one tenant or class, in blocks.

    It can always have `guaranteed` blocks and never more than `ceiling` (None: the whole pool).
    """

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
class _ShareUsage:
    """The blocks of one tenant or one class, over all of its accounts."""

    guaranteed: int
    ceiling: int
    used: int = 0


@dataclass(slots=True, eq=False)
class _AccountUsage:
    """The blocks of one account.

    `guarantors` decide how far it is above its guarantee: its tenant, and its class if that has one.
    """

    tenant: _ShareUsage
    service_class: _ShareUsage
    guarantors: tuple[_ShareUsage, ...]
    used: int = 0


class QuotaManager:
    """Implements `BlockQuota`. A charge counts for the account, for its tenant and for its class.

    A guarantee is not set aside: others borrow what is idle of it, up to their ceilings, and give it back by
    `reclaim`. `default` is the share of each tenant that is not in `tenants`. A class that is not in
    `classes` has neither guarantee nor ceiling. The guarantees must fit into the pool together.

    A quota belongs to one pool, which charges and refunds under its lock. `headroom`, `used` and `reclaim`
    are for the thread that acts on the answer.
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
        self._accounts: dict[Account, _AccountUsage] = {}
        self._tenants = {name: _share_usage(share) for name, share in tenants.items()}
        self._classes = {name: _share_usage(share) for name, share in classes.items()}
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
        """A quota from (guaranteed, ceiling) as fractions of the pool, rounded down to blocks."""

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

    # -- charges

    def charge(self, account: Account, num_blocks: int) -> bool:
        if num_blocks < 0:
            raise BookkeepingError(f"{account}: cannot charge {num_blocks} blocks")
        usage = self._accounts.get(account) or self._open(account)
        tenant, service_class = usage.tenant, usage.service_class
        of_tenant, of_class = tenant.used + num_blocks, service_class.used + num_blocks
        if of_tenant > tenant.ceiling or of_class > service_class.ceiling:
            return False
        tenant.used = of_tenant
        service_class.used = of_class
        usage.used += num_blocks
        return True

    def refund(self, account: Account, num_blocks: int) -> None:
        if num_blocks == 0:  # also for an account that was forgotten since
            return
        usage = self._accounts.get(account)
        if usage is None or not 0 <= num_blocks <= usage.used:
            raise BookkeepingError(
                f"{account} is charged for {self.used(account)} blocks and cannot give back {num_blocks}"
            )
        usage.used -= num_blocks
        usage.tenant.used -= num_blocks
        usage.service_class.used -= num_blocks

    def paying(self, account: Account) -> Account:
        """The account that is charged for this one.

        Tenants and classes without a share of their own are charged together, so that names that clients
        make up cost nothing.
        """
        tenants, classes = self._named
        has_default = self._default.ceiling is not None
        return Account(
            account.tenant if has_default or account.tenant in tenants else "",
            account.service_class if account.service_class in classes else "",
        )

    def headroom(self, account: Account) -> int:
        usage = self._accounts.get(account) or self._open(account)
        return min(_headroom(usage.tenant), _headroom(usage.service_class), self.total_blocks)

    def headrooms(self, account: Account) -> dict[str, int]:
        usage = self._accounts.get(account) or self._open(account)
        shares = (
            ("tenant", account.tenant, usage.tenant),
            ("class", account.service_class, usage.service_class),
        )
        return {
            f"{kind} {name}": _headroom(share) for kind, name, share in shares if share.ceiling < _NO_CEILING
        }

    def ceiling(self, account: Account) -> int:
        usage = self._accounts.get(account) or self._open(account)
        return min(usage.tenant.ceiling, usage.service_class.ceiling)

    def used(self, account: Account) -> int:
        usage = self._accounts.get(account)
        return usage.used if usage is not None else 0

    # -- reclaiming

    def reclaim(
        self, account: Account, num_blocks: int, evictable: Mapping[Account, int], num_free: int = 0
    ) -> dict[Account, int] | None:
        """Evictable blocks that each account gives so that `account` can have `num_blocks`.

        They sum to `num_blocks - num_free`, where `num_free` blocks belong to no account; to more only where
        a ceiling is in the way, since headroom below it comes from the accounts that share it. Returns None
        if there is no way; changes nothing.

        The excess of an account is that of its tenant or of its class, whichever is smaller (a class without
        a guarantee does not count). The account with most excess gives down to the level of the next, then
        both do, and so on; if it does not come out even, the first by name gives one more. Next come accounts
        that can give only because the tenant or class at its guarantee is also that of `account`, and so
        keeps the block; then `account` itself. Between a tenant's guarantee and a class's, neither is broken
        for the other.
        """
        usage = self._accounts.get(account) or self._open(account)
        reclaim = _Reclaim(self._accounts, account, evictable)
        for share, needed in (
            (usage.tenant, num_blocks - _headroom(usage.tenant)),
            (usage.service_class, num_blocks - _headroom(usage.service_class)),
            (None, num_blocks - num_free),
        ):
            if not reclaim.take_from(share, needed):
                return None
        return {giver: count for giver, count in reclaim.given.items() if count}

    def check(self) -> None:
        """Raise `BookkeepingError` where accounts do not add up, or a ceiling is exceeded."""
        for kind, shares, field in (("tenant", self._tenants, 0), ("class", self._classes, 1)):
            charged = dict.fromkeys(shares, 0)
            for account, usage in self._accounts.items():
                charged[account[field]] += usage.used
            for name, share in shares.items():
                if share.used != charged[name]:
                    raise BookkeepingError(
                        f"{kind} {name!r} uses {share.used} blocks, its accounts {charged[name]}"
                    )
                if share.used > share.ceiling:
                    raise BookkeepingError(f"{kind} {name!r} uses {share.used} of at most {share.ceiling}")
        for account, usage in self._accounts.items():
            if usage.used < 0:
                raise BookkeepingError(f"{account} uses {usage.used} blocks")

    # -- inside

    def _open(self, account: Account) -> _AccountUsage:
        if len(self._accounts) >= self._prune_at:
            self._prune()
        tenant = self._tenants.get(account.tenant)
        if tenant is None:
            tenant = self._tenants[account.tenant] = _share_usage(self._default)
        service_class = self._classes.get(account.service_class)
        if service_class is None:
            service_class = self._classes[account.service_class] = _share_usage(_NO_SHARE)
        guarantors = (tenant, service_class) if service_class.guaranteed else (tenant,)
        usage = self._accounts[account] = _AccountUsage(tenant, service_class, guarantors)
        return usage

    def _prune(self) -> None:
        """Forget accounts, and unnamed tenants and classes, without blocks: clients invent names for ever."""
        self._accounts = {account: usage for account, usage in self._accounts.items() if usage.used}
        tenants, classes = self._named
        self._tenants = {
            name: share for name, share in self._tenants.items() if share.used or name in tenants
        }
        self._classes = {
            name: share for name, share in self._classes.items() if share.used or name in classes
        }
        self._prune_at = max(_MIN_ACCOUNTS_TO_PRUNE, 2 * len(self._accounts))


class _Reclaim:
    """One `reclaim` while it is computed.

    `given`: blocks that each account gives so far. `_left`: evictable blocks that it has beyond those.
    `_excess`: blocks of each tenant and class above its guarantee.
    """

    def __init__(
        self, usages: Mapping[Account, _AccountUsage], asking: Account, evictable: Mapping[Account, int]
    ) -> None:
        self._usages = usages
        self._asking = asking
        self._left = {
            account: evictable[account]
            for account in sorted(evictable)
            if evictable[account] and account in usages
        }
        guarantors = (share for account in self._left for share in usages[account].guarantors)
        self._excess = {share: share.used - share.guaranteed for share in guarantors}
        self.given = dict.fromkeys(self._left, 0)
        self._given_before = self.given

    def take_from(self, share: _ShareUsage | None, needed: int) -> bool:
        """Have the accounts of a tenant or class (None: all) give `needed` blocks together.

        What was given before stays given. False if they cannot.
        """
        if needed <= 0:
            return True
        self._given_before = self.given.copy()
        members = [account for account in self._left if share is None or share in self._shares(account)]
        needed -= sum(self.given[account] for account in members)
        others = [account for account in members if account != self._asking]
        shared = self._shares(self._asking)
        needed -= self._by_level(others, needed, ())
        needed -= self._by_level(others, needed, shared)
        needed -= self._by_exchange(others, needed, shared)
        if self._asking in members:
            needed -= self._take(self._asking, needed)
        return needed <= 0

    def _by_level(self, accounts: Sequence[Account], needed: int, ignored: tuple[_ShareUsage, ...]) -> int:
        """Take up to `needed` blocks from the accounts with most excess; returns how many.

        The result is as if block by block, in strides. Guarantees of `ignored` shares are not checked: they
        get the blocks.
        """
        taken = 0
        counted = {
            account: [share for share in self._usages[account].guarantors if share not in ignored]
            for account in accounts
        }
        while taken < needed:
            levels = {acc: self._excess_of(acc, counted[acc]) for acc in accounts if self._left[acc]}
            top = max(levels.values(), default=0)
            if top <= 0:
                break
            highest = [account for account, level in levels.items() if level == top]
            below = max((level for level in levels.values() if 0 < level < top), default=0)
            stride = min(top - below, max(1, (needed - taken) // len(highest)))
            for account in highest:
                reach = self._excess_of(account, counted[account]) - (top - stride)
                taken += self._take(account, min(reach, needed - taken))
        return taken

    def _excess_of(self, account: Account, counted: Sequence[_ShareUsage]) -> int:
        """Blocks that the account could give before a counted guarantee is broken."""
        return min([self._excess[share] for share in counted], default=self._left[account])

    def _by_exchange(self, accounts: Sequence[Account], needed: int, ignored: tuple[_ShareUsage, ...]) -> int:
        """Take more where tenants and classes cross.

        An account gives less, so that two others give more. Augmenting paths: L. R. Ford and D. R. Fulkerson,
        1956.
        """
        taken = 0
        while taken < needed:
            path = self._augmenting_path(accounts, ignored)
            if not path:
                break
            ends = (self._usages[path[0]].tenant, self._usages[path[-1]].service_class)
            most = min(
                needed - taken,
                *(self._spare(share, ignored) for share in ends),
                *(self._left[account] for account in path[::2]),
                *(self.given[account] - self._given_before[account] for account in path[1::2]),
            )
            for index, account in enumerate(path):
                self._move(account, -most if index % 2 else most)
            taken += most
        return taken

    def _augmenting_path(
        self, accounts: Sequence[Account], ignored: tuple[_ShareUsage, ...]
    ) -> list[Account]:
        """The shortest list of accounts that can give more, less, more, ..., more.

        Empty if there is none. It goes from a tenant that can spare blocks to a class that can; neighbours
        share a class, then a tenant, in turns.
        """
        tenants = [self._usages[account].tenant for account in accounts]
        paths: dict[_ShareUsage, list[Account]] = {
            tenant: [] for tenant in tenants if self._spare(tenant, ignored) > 0
        }
        reached = list(paths)
        for share in reached:
            path = paths[share]
            at_class = len(path) % 2 == 1
            if at_class and self._spare(share, ignored) > 0:
                return path
            for account in accounts:
                tenant, service_class = self._shares(account)
                near, far = (service_class, tenant) if at_class else (tenant, service_class)
                given = self.given[account] - self._given_before[account]
                can_move = given > 0 if at_class else self._left[account] > 0
                if near is share and can_move and far not in paths:
                    paths[far] = [*path, account]
                    reached.append(far)
        return []

    def _spare(self, share: _ShareUsage, ignored: tuple[_ShareUsage, ...]) -> int:
        return sys.maxsize if share in ignored else self._excess.get(share, sys.maxsize)

    def _shares(self, account: Account) -> tuple[_ShareUsage, _ShareUsage]:
        return self._usages[account].tenant, self._usages[account].service_class

    def _take(self, account: Account, num_blocks: int) -> int:
        taken = max(0, min(num_blocks, self._left[account]))
        self._move(account, taken)
        return taken

    def _move(self, account: Account, num_blocks: int) -> None:
        self.given[account] += num_blocks
        self._left[account] -= num_blocks
        for share in self._usages[account].guarantors:
            self._excess[share] -= num_blocks


def _share_usage(share: Share) -> _ShareUsage:
    return _ShareUsage(share.guaranteed, _NO_CEILING if share.ceiling is None else share.ceiling)


def _headroom(share: _ShareUsage) -> int:
    return share.ceiling - share.used


def _blocks(total_blocks: int, fraction: float) -> int:
    if not 0 <= fraction <= 1:
        raise ValueError(f"a fraction of the pool is between 0 and 1, got {fraction}")
    return int(fraction * total_blocks + 1e-9)  # 0.29 * 100 is 28.999999999999996
