"""Contract of the prefix index: which leading tokens already have their KV in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import add, sub
from typing import NamedTuple, Protocol

from sagellm.core.protocols.eviction import NO_USE, Hint, PolicyFactory, Use
from sagellm.core.types import Account, BlockIds, Namespace, Retention, Tokens


class SharedTail(NamedTuple):
    """`num_tokens` leading tokens of block `position` of the table of `request_id`, which is running."""

    request_id: str
    position: int
    num_tokens: int


class IndexNode:
    """Where a hit ends: an index's own record, which means nothing to a caller."""

    __slots__ = ()


@dataclass(slots=True)
class PrefixHit:
    """What `lookup` found: the first `num_tokens` tokens stand in `num_blocks` blocks of the index.

    The manager may add a `tail`: tokens behind the whole blocks that a running request holds in its last,
    partial block, and that can be copied from there. `num_tokens` counts them.

    `version` is the index's state at look-up. The blocks of a hit that is not pinned may leave at the next
    `evict`. `block_ids` fetches their ids. A hit does not change once it is made; it is not frozen because
    that would double the time of a look-up.
    """

    num_tokens: int
    num_blocks: int
    tokens: Tokens
    namespace: Namespace
    node: IndexNode | None = None
    version: int = 0
    tail: SharedTail | None = None


class InsertResult(NamedTuple):
    """Which inserted blocks were duplicates, and the hit on all of them.

    The index had `num_existing` leading blocks already (where the ids differ, the duplicates stay the
    caller's); the blocks behind them belong to the index from now on. `hit` covers all that was inserted."""

    num_existing: int
    hit: PrefixHit


class EvictedPath(NamedTuple):
    """A path from its first token to a block that was evicted.

    Its bytes still lie in `block_ids`, of which the last were evicted, or all. `account` brought the end,
    `use` used it last.
    """

    tokens: Tokens
    namespace: Namespace
    block_ids: BlockIds
    account: Account
    use: Use


class Branch(NamedTuple):
    """A resident branch that shares a prefix with the queried tokens. `hit` is the shared prefix,
    `num_blocks` the length of the whole branch. `used_s`: its last use, by the index's clock."""

    hit: PrefixHit
    num_blocks: int
    used_s: float


class ReusedPrefix(NamedTuple):
    """A resident prefix that was used again. `digest` names its last part and shows no text.

    It has `num_tokens` from the prompt's beginning; its last `num_blocks` blocks were used `num_uses` times:
    each prompt that is found there counts, and each that is stored. `idle_s`: since the last of them."""

    digest: str
    num_tokens: int
    num_blocks: int
    num_uses: int
    idle_s: float


class SharedPrefix(NamedTuple):
    """A resident prefix of whole blocks behind which `num_prompts` stored prompts part."""

    tokens: Tokens
    namespace: Namespace
    num_prompts: int


class MatchEnd(Enum):
    """Why a match ended where it did."""

    COMPLETE = "every whole block of the tokens is resident"
    NOT_ALIGNED = "the tokens differ inside a block; only whole blocks are shared"
    NEVER_SEEN = "these tokens were never seen here, or so long ago that it is forgotten"
    EVICTED = "they were resident and were evicted"
    OTHER_NAMESPACE = "they are resident in another namespace, which shares nothing with this one"


@dataclass(frozen=True, slots=True)
class MatchReport:
    """How far a match goes and why it ends there; the answer of `explain`. `at_s` and `cause` describe an
    eviction. `num_elsewhere`: leading blocks that another namespace holds, if more."""

    num_tokens: int
    num_blocks: int
    end: MatchEnd
    at_s: float | None = None
    cause: str | None = None
    num_elsewhere: int = 0

    def __str__(self) -> str:
        text = f"{self.num_tokens} tokens in {self.num_blocks} blocks match; {self.end.value}"
        return text if self.at_s is None else f"{text} at {self.at_s:.3f} s ({self.cause})"


@dataclass(frozen=True, slots=True)
class PrefixReuseSnapshot:
    """The numbers at one moment. Ratios are 0 to 1, and 0 where nothing was counted.

    `sharing`: the sum over all requests of the fraction of their blocks that was resident. `match_buckets`:
    pairs of an upper end in seconds and the number of look-ups at or under it, the last end infinite: the
    cumulative form that Prometheus reads.
    """

    num_requests: int
    num_hit_requests: int
    num_tokens: int
    num_hit_tokens: int
    num_blocks: int
    num_hit_blocks: int
    sharing: float
    match_sum_s: float
    match_buckets: tuple[tuple[float, int], ...]

    @property
    def request_hit_ratio(self) -> float:
        """Requests that reused any token, over all requests."""
        return self.num_hit_requests / self.num_requests if self.num_requests else 0.0

    @property
    def token_hit_ratio(self) -> float:
        return self.num_hit_tokens / self.num_tokens if self.num_tokens else 0.0

    @property
    def block_hit_ratio(self) -> float:
        return self.num_hit_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def mean_sharing(self) -> float:
        return self.sharing / self.num_requests if self.num_requests else 0.0

    @property
    def num_matches(self) -> int:
        return self.match_buckets[-1][1]

    def match_quantile(self, q: float) -> float | None:
        """Seconds under which the fraction `q` of the look-ups stayed; None before the first.

        Known to a factor of 2.5, and to 0.25 us: linear inside a bucket, as Prometheus' `histogram_quantile`
        does it. What is above the last finite end counts as that end. Raises `ValueError` for `q` outside
        0 to 1.
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q must be between 0 and 1, got {q}")
        if not self.num_matches:
            return None
        rank, low, below = q * self.num_matches, 0.0, 0
        for high, at_or_under in self.match_buckets[:-1]:
            if at_or_under > below and at_or_under >= rank:
                return low + (high - low) * (rank - below) / (at_or_under - below)
            low, below = high, at_or_under
        return low


class TenantReuse(NamedTuple):
    """Tokens that one tenant's requests looked up, and the reused ones among them."""

    num_tokens: int = 0
    num_hit_tokens: int = 0


class ReuseRecorder(Protocol):
    """Keeps the figures of reuse, which the manager reports to it."""

    def record(
        self, num_tokens: int, num_hit_tokens: int, num_blocks: int, num_hit_blocks: int, *, tenant: str = ...
    ) -> None:
        """A request of `tenant` was admitted for the first time."""

    def observe_match(self, seconds: float) -> None:
        """A look-up took so long."""

    def snapshot(self) -> PrefixReuseSnapshot:
        """The figures now."""

    def by_tenant(self) -> Mapping[str, TenantReuse]:
        """The tokens by tenant. The number of names is bounded by the configuration, not by the clients."""


class MissCounts(NamedTuple):
    """Prompt blocks that had to be computed, by cause; each block has one.

    `cold`: never computed here, or so long ago that it is forgotten. `capacity`: evicted to make room;
    `premature`: so recently that it was a poor choice. `quota`: evicted for another account's share.
    `preemption`: its request had computed it, was preempted, and lost it meanwhile. `namespace`: resident in
    a namespace that shares nothing with this one.
    """

    cold: int = 0
    capacity: int = 0
    premature: int = 0
    quota: int = 0
    preemption: int = 0
    namespace: int = 0

    def plus(self, other: MissCounts | None) -> MissCounts:
        """The sums of both, by cause."""
        return self if other is None else MissCounts(*map(add, self, other))

    def minus(self, other: MissCounts | None) -> MissCounts:
        """The differences, by cause."""
        return self if other is None else MissCounts(*map(sub, self, other))


class SpanState(Enum):
    """What the cache knows of a part of a prompt.

    INCOMPLETE: cached, but computed again, since a window or recurrent state was not kept with it. UNKNOWN:
    never seen, or its eviction is forgotten.
    """

    HIT = "hit"
    INCOMPLETE = "incomplete"
    EVICTED = "evicted"
    NEVER_SEEN = "never_seen"
    UNKNOWN = "unknown"
    PARTIAL_BLOCK = "partial_block"


class Evictor(NamedTuple):
    """The call that needed the room of evicted blocks, and its tenant.

    `call` is the last part of `Request.client`, else the request's id. Both are empty where no request
    did."""

    call: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Tokens `[start, stop)` of a prompt and what the cache knows of them.

    Of evicted blocks also: how many seconds ago the first of them went, the cause, for which request, and
    `num_blocks_since`: how many blocks were evicted from then on, these included. LRU with so many more
    blocks would have kept them.
    """

    start: int
    stop: int
    state: SpanState
    seconds_ago: float | None = None
    cause: str | None = None
    evictor: Evictor | None = None
    num_blocks_since: int | None = None


class MissObserver(Protocol):
    """Attributes missing blocks to causes; the manager reports each admitted request to it."""

    def observe(
        self,
        index: PrefixReuseIndex,
        tokens: Tokens,
        namespace: Namespace,
        num_hit_blocks: int,
        *,
        preempted: bool = False,
    ) -> MissCounts:
        """Count the whole blocks of an admitted request's prompt that are not resident.

        `num_hit_blocks` leading blocks came from the index, in which nothing has changed since; `preempted`:
        the request ran before."""

    def snapshot(self) -> MissCounts:
        """The sums now."""

    def evictions_are_for(self, evictor: Callable[[], Evictor]) -> None:
        """Ask `evictor` at each eviction which request needs the room."""

    def explain(self, index: PrefixReuseIndex, tokens: Tokens, namespace: Namespace) -> list[PromptSpan]:
        """What is known of a prompt, span by span. Of other namespaces nothing is told."""


class PrefixReuseIndex(Protocol):
    """A map from token prefixes to blocks, in whole blocks, per namespace.

    `lookup` is read-only. A pinned hit, and every prefix of it, is never evicted. Blocks belong to the index
    from `insert` until `evict` or `clear` gives them back. Each block is charged to the account that brought
    it, and `evict_from` gives up one account's. Clients choose the names of accounts, without end: accounts
    that have no blocks are forgotten, with their policies.
    """

    @property
    def block_size(self) -> int: ...

    def lookup(self, tokens: Tokens, namespace: Namespace = ..., max_tokens: int | None = None) -> PrefixHit:
        """The longest resident prefix of `tokens`, at most `max_tokens` long, in whole blocks."""

    def branches(self, tokens: Tokens, k: int, namespace: Namespace = ...) -> list[Branch]:
        """At most `k` resident branches that share a first block with the tokens. The longest match comes
        first, then the last used."""

    def block_ids(self, hit: PrefixHit) -> BlockIds:
        """The blocks of a hit, in order of position."""

    def verify(self, hit: PrefixHit) -> bool:
        """Whether all of the hit is resident now, its tokens compared one by one."""

    def pin(self, hit: PrefixHit, *, is_use: bool = True) -> PrefixHit:
        """Add one to the reference counts of the hit; returns the hit for `unpin`. If the index changed since
        the look-up, the hit is looked up again, and may have become shorter. `is_use=False`: it is held for a
        copy, which counts as no use."""

    def unpin(self, hit: PrefixHit, use: Use = NO_USE, *, is_use: bool = True) -> None:
        """Take one from the reference counts; raises `BookkeepingError` if the hit is not pinned. `use`: what
        the eviction policy may know of the request. `is_use` as in `pin`."""

    def insert(
        self,
        tokens: Tokens,
        block_ids: Sequence[int],
        namespace: Namespace = ...,
        *,
        account: Account = ...,
        retention: Sequence[Retention] = (),
        pin: bool = False,
    ) -> InsertResult:
        """Register `block_ids[i]` for tokens `[i * block_size, (i + 1) * block_size)`.

        `tokens` may be longer than the blocks; the rest is ignored. `retention` biases the policy for ranges
        of the tokens, whether they were there before or not. With `pin` the hit is pinned already.
        """

    def extend(
        self,
        above: IndexNode | None,
        tokens: Tokens,
        block_ids: Sequence[int],
        namespace: Namespace = ...,
        *,
        account: Account = ...,
    ) -> IndexNode:
        """Register blocks behind a path. Linear in these blocks; `insert` reads the path too.

        `above`: what `extend` returned for the path, with no other call in between; None: nothing is before
        them. `block_ids[i]` has tokens `[i * block_size, (i + 1) * block_size)`. Uses of the path are not
        counted. Raises `BookkeepingError` for no blocks, another number of tokens, and where the first block
        is resident behind the path.
        """

    def hint(self, hit: PrefixHit, hint: Hint) -> int:
        """Apply a hint to a resident prefix; it holds until the next use. It concerns the end of the prefix
        and the blocks before it up to the last branching. Returns their number."""

    def set_policy(self, factory: PolicyFactory) -> None:
        """Choose by new policies from now on. Cached blocks stay, in order of their last use."""

    def retract(self, result: InsertResult) -> None:
        """Undo the last `insert`, if it was pinned and nothing happened since. Its new blocks leave the index
        and belong to the caller again."""

    def evict(self, num_blocks: int, cause: str = ...) -> BlockIds | None:
        """Evict exactly `num_blocks` unpinned blocks chosen by the policy. Returns None, and changes nothing,
        if there are fewer."""

    def evict_paths(
        self,
        num_blocks: int,
        account: Account | None = None,
        cause: str = ...,
        max_path_blocks: float = ...,
    ) -> tuple[BlockIds, Sequence[EvictedPath]]:
        """Evict at most `num_blocks` blocks, and say what was in them.

        Of one account or of all. Returns the blocks, and each path that had its end in them; none whose
        session has ended or whose history was edited (`Hint`). A path that is a part of another is left out.
        Fewer blocks go where the paths have more than about `max_path_blocks` together: short branches of a
        long prefix, each of which is a path of its own.
        """

    def evict_tail(self, hit: PrefixHit, num_blocks: int, cause: str = "capacity") -> BlockIds:
        """Evict up to `num_blocks` blocks from the end of a prefix, past the policy.

        Fewer where a pin or another prefix holds them; none if blocks stand behind the hit.
        """

    def evict_from(self, account: Account, num_blocks: int, cause: str = ...) -> BlockIds:
        """Evict at most `num_blocks` unpinned blocks of one account. Fewer only where all of its other blocks
        lead to pinned blocks or another account's."""

    def evictable_by_account(self) -> Mapping[Account, int]:
        """Blocks that could be evicted, of each account with blocks in the index."""

    def num_unpinned_on_path(self, hit: PrefixHit) -> int:
        """Unpinned blocks of the hit: what pinning it takes from `num_evictable`."""

    def num_held_alone(self, hit: PrefixHit) -> int:
        """Blocks of a pinned hit that no other pin holds. Unpinning it adds that many to `num_evictable`."""

    @property
    def num_cached(self) -> int:
        """Blocks in the index."""

    @property
    def num_evictable(self) -> int:
        """Blocks in the index that no pin holds."""

    def clear(self) -> BlockIds:
        """Evict every unpinned block."""

    def report_hit(self, hit: PrefixHit) -> None:
        """Emit the blocks of a resident hit as `BlocksStored`, from the first one on.

        Nothing changes. Events do not show hits otherwise; so a router learns which blocks are reused."""

    def explain(self, tokens: Tokens, namespace: Namespace = ...) -> MatchReport:
        """Where a match of the tokens ends, and why. Not for hot paths."""

    def hot_prefixes(self, count: int) -> Sequence[ReusedPrefix]:
        """The resident prefixes that saved most blocks, at most so many, the best first.

        Each ends where prompts part, or have ended. Linear in the index. Not for hot paths."""

    def shared_prefixes(self, count: int) -> Iterator[SharedPrefix | None]:
        """Search for the prefixes with which most stored prompts begin, at most so many.

        The index is read extent by extent; None stands for a step that has found nothing. Between two steps
        the index may change: what is found then may be gone, in part or as a whole.
        """

    def all_block_ids(self) -> BlockIds:
        """Every block in the index, in no particular order."""

    def remap(self, moves: Mapping[int, int]) -> None:
        """After a compaction: block `source` is now `target`."""

    def check(self) -> None:
        """Raise `BookkeepingError` naming the first invariant that does not hold."""
