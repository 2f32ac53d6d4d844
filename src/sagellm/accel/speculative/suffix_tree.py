"""`SuffixTree`: which tokens have followed a text before, and how often.

A suffix tree of bounded depth with counts, after SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). This
is the slow twin of `suffix_tree.cpp`, which does the same steps; it serves where there is no compiler.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sagellm.core.errors import BookkeepingError
from sagellm.core.types import Tokens

MAX_DEPTH = 256
MOST_CONTINUED = 256
"""Continuations of a node, of which more than the best child is looked at."""


@dataclass(frozen=True, slots=True)
class SuffixRules:
    """How trees grow and propose.

    A tree knows substrings of up to `depth` tokens: a match and what is proposed behind it. A match has at
    least `min_match` tokens, and `alpha` tokens are proposed for each of them at most. The chance of a token
    is its share of what has followed, times n / (n + `doubt`) behind n matched and proposed tokens: a short
    match says little. A proposal ends where the product of the chances would fall below `min_probability`.
    Raises `ValueError`.
    """

    depth: int
    alpha: float
    min_probability: float
    min_match: int
    doubt: float

    def __post_init__(self) -> None:
        if not 2 <= self.depth <= MAX_DEPTH:
            raise ValueError(f"depth must be from 2 to {MAX_DEPTH}, got {self.depth}")
        if not 1 <= self.min_match < self.depth:
            raise ValueError(f"min_match must be from 1 to depth - 1, got {self.min_match}")
        if not 0 < self.alpha <= MAX_DEPTH:
            raise ValueError(f"alpha must be above 0, and {MAX_DEPTH} at most, got {self.alpha}")
        if not 0 <= self.min_probability <= 1:
            raise ValueError(f"min_probability must be from 0 to 1, got {self.min_probability}")
        if not 0 <= self.doubt <= MAX_DEPTH:
            raise ValueError(f"doubt must be from 0 to {MAX_DEPTH}, got {self.doubt}")

    def limit(self, match: int, most: int) -> int:
        """The most tokens that may be proposed behind a match."""
        return min(most, int(self.alpha * match))

    def trust(self, num_matched: int) -> float:
        """The chance that what has followed so many tokens follows them again."""
        return num_matched / (num_matched + self.doubt)

    def highest(self, match: int, limit: int) -> float:
        """The score that no match of this length or a shorter one exceeds."""
        product, score = 1.0, 0.0
        for num_matched in range(match, match + limit):
            product *= self.trust(num_matched)
            score += product
        return score


class SuffixProposal(NamedTuple):
    """Proposed tokens, and the chance of each.

    It is that of its acceptance, once those before it are accepted. `parents` are those of a tree. `score`:
    how many tokens of a chain may be expected to be accepted.
    """

    token_ids: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    parents: tuple[int, ...] = ()
    score: float = 0.0


@dataclass(slots=True, eq=False)
class SuffixNode:
    """The edge into it holds the `length` tokens at `start` of the text.

    `count`: how often the path up to the first of these occurs. `continued`: the sum of the children's
    counts. `best`: the child with the highest count; of several, the one entered last.
    """

    start: int
    length: int
    count: int = 0
    continued: int = 0
    best: SuffixNode | None = None
    children: dict[int, SuffixNode] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SuffixPlace:
    """Behind `matched` tokens of the edge into `node`."""

    node: SuffixNode
    parent: SuffixNode
    matched: int = 0


class Match(NamedTuple):
    """The last `num_tokens` tokens of a text in a tree.

    `place`: where they end there, and then what is proposed behind them.
    """

    tree: SuffixTree
    num_tokens: int
    place: SuffixPlace


class SuffixTree:
    """Every substring of up to `depth` tokens of its sequences, with counts.

    A tree holds one sequence that grows (`propose`) or, if it `removes`, sequences that have ended
    (`insert`, `remove_oldest`). A token takes O(depth) at most to append. A node takes about 350 bytes, and a
    token one to two nodes.
    """

    def __init__(self, rules: SuffixRules, *, removes: bool, branches: int = 1) -> None:
        """`branches`: the tokens that a match gives behind the same one; 1: chains."""
        self.rules = rules
        self._removes, self._branches = removes, branches
        self._text: list[int] = []
        self._removed = 0
        """Tokens removed from the beginning of the text."""
        self._root = SuffixNode(0, 0)
        self._active: deque[SuffixPlace] = deque()
        """Of all suffixes that have occurred before, longest first: where each of them stands."""
        self._growing: deque[tuple[int, SuffixNode]] = deque()
        """Leaves whose edge grows with the text, with the start of their suffix."""
        self._ends: deque[int] = deque()

    @property
    def num_tokens(self) -> int:
        return len(self._text)

    @property
    def _end(self) -> int:
        return self._removed + len(self._text)

    def insert(self, token_ids: Iterable[int]) -> None:
        """Add a sequence that has ended."""
        for token_id in token_ids:
            self._append(token_id)
        while self._active:  # afterwards every suffix ends at a node: a count holds for the whole edge
            place = self._active[0]
            if place.matched < place.node.length:
                self._split(place, self._end)
            self._active.popleft()
        for _, leaf in self._growing:
            leaf.length = min(leaf.length, self._end - leaf.start)
        self._growing.clear()
        self._ends.append(self._end)

    def remove_oldest(self) -> int:
        """Remove the sequence that was inserted first; returns the number of its tokens."""
        if not self._ends:
            return 0
        end, begin = self._ends.popleft(), self._removed
        for start in range(begin, end):
            self._remove_suffix(start, min(start + self.rules.depth, end))
        del self._text[: end - begin]
        self._removed = end
        return end - begin

    def propose(self, tokens: Tokens, most: int, shared: SuffixTree | None = None) -> SuffixProposal:
        """Append the tokens behind the first `num_tokens`, and propose up to `most`.

        For each match, the most frequent continuation is followed from token to token. The best-scored
        proposal counts: of equal ones that of the own tree, and of the longest match. With `branches` it is
        a tree (`_propose_tree`).
        """
        for token_id in tokens.slice(len(self._text)):
            self._append(token_id)
        if self._branches > 1:
            return self._propose_tree(most, shared)
        best, match = SuffixProposal(), len(self._active)
        for place in self._active:
            limit = self.rules.limit(match, most)
            if match < self.rules.min_match or best.score >= self.rules.highest(match, limit):
                break
            best = max(best, self._follow(place, match, limit), key=lambda found: found.score)
            match -= 1
        if shared is not None:
            best = self._propose_shared(shared, most, best)
        return best

    def _propose_shared(self, shared: SuffixTree, most: int, best: SuffixProposal) -> SuffixProposal:
        for match in range(min(self.rules.depth - 1, len(self._text)), self.rules.min_match - 1, -1):
            limit = self.rules.limit(match, most)
            if best.score >= self.rules.highest(match, limit):
                break
            place = shared._locate(self._text[-match:])
            if place is not None:
                best = max(best, shared._follow(place, match, limit), key=lambda found: found.score)
        return best

    def _propose_tree(self, most: int, shared: SuffixTree | None) -> SuffixProposal:
        """The likeliest paths, which are the product of their tokens' chances.

        Of several matches the highest chance counts. Of each tree the longest match takes part, and those of
        half its length, a quarter and so on: shorter ones have seen more.
        """
        found = self._matches(shared)
        token_ids: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        numbers = itertools.count()
        coming: list[tuple[float, int, int, float, list[int], list[Match]]] = []

        def expand(node: int, product: float, path: list[int], matches: list[Match]) -> None:
            expected: dict[int, float] = {}
            for tree, num_tokens, place in matches:
                trust = self.rules.trust(num_tokens + len(path))
                for token_id, share in tree._continuations(place, path):
                    expected[token_id] = max(expected.get(token_id, 0.0), trust * share)
            for token_id, chance in expected.items():
                if product * chance >= self.rules.min_probability:
                    item = (-product * chance, next(numbers), node, chance, [*path, token_id], matches)
                    heapq.heappush(coming, item)

        expand(-1, 1.0, [], found)
        while coming and len(token_ids) < most:
            product, _, parent, chance, path, matches = heapq.heappop(coming)
            token_ids.append(path[-1])
            parents.append(parent)
            chances.append(chance)
            moved = [match.tree._step(match, path) for match in matches]
            expand(len(token_ids) - 1, -product, path, [match for match in moved if match is not None])
        return SuffixProposal(tuple(token_ids), tuple(chances), tuple(parents))

    def _matches(self, shared: SuffixTree | None) -> list[Match]:
        longest, least = len(self._active), self.rules.min_match
        found = [Match(self, size, self._active[longest - size]) for size in _halved(longest, least)]
        if shared is not None:
            sizes = range(min(self.rules.depth - 1, len(self._text)), least - 1, -1)
            longest = next((size for size in sizes if shared._locate(self._text[-size:])), 0)
            for size in _halved(longest, least):
                place = shared._locate(self._text[-size:])
                assert place is not None, "all parts of a match are matches"
                found.append(Match(shared, size, place))
        return found

    def _within(self, place: SuffixPlace, path: list[int]) -> int:
        """The next token of the edge. A leaf that grows repeats what is proposed."""
        behind = place.node.start + place.matched - self._end
        return self._at(behind + self._end) if behind < 0 else path[behind]

    def _continuations(self, place: SuffixPlace, path: list[int]) -> list[tuple[int, float]]:
        """What has followed a place, with its share.

        The most frequent tokens come first, of equal ones those with the later label.
        """
        node = place.node
        if place.matched < node.length:
            return [(self._within(place, path), 1.0)]
        if node.best is None:
            return []
        looks = self._branches > 1 and node.continued <= MOST_CONTINUED
        children = list(node.children.values()) if looks else [node.best]
        children.sort(key=lambda child: (-child.count, -child.start))
        return [(self._at(child.start), child.count / node.continued) for child in children[: self._branches]]

    def _step(self, match: Match, path: list[int]) -> Match | None:
        """The match with the last token of `path`; None where another follows."""
        place, token_id = match.place, path[-1]
        if place.matched < place.node.length:
            if self._within(place, path[:-1]) != token_id:
                return None
            return match._replace(place=replace(place, matched=place.matched + 1))
        child = place.node.children.get(token_id)
        return None if child is None else match._replace(place=SuffixPlace(child, place.node, 1))

    def check(self) -> None:
        """Raise `BookkeepingError` unless sums, best children and labels fit."""
        nodes = [self._root]
        for node in nodes:
            nodes += node.children.values()
            counts = [child.count for child in node.children.values()]
            best = node.best.count if node.best else 0
            if sum(counts) != node.continued or best != max(counts, default=0):
                raise BookkeepingError(f"{node.continued} passes in all, {best} at best, of {counts}")
            if node is self._root:
                continue
            if not node.length or node.count < max(1, node.continued):
                raise BookkeepingError(f"{node.count} passes, {node.continued} go on, {node.length} tokens")
            if not self._removed <= node.start < self._end:
                raise BookkeepingError(f"a label at {node.start}, of {self._removed} to {self._end}")
            if self._removes and len(counts) == 1 and node.count == node.continued:
                raise BookkeepingError("two edges that are one")
        if len(self._active) >= self.rules.depth:
            raise BookkeepingError("a suffix that is too long to be active")

    def _at(self, position: int) -> int:
        return self._text[position - self._removed]

    def _append(self, token_id: int) -> None:
        at, depth = self._end, self.rules.depth
        self._text.append(token_id)
        self._active.append(SuffixPlace(self._root, self._root))
        begin = at + 1 - len(self._active)
        while self._active and not self._advance(self._active[0], begin, token_id, at):
            self._active.popleft()
            begin += 1
        for place in list(self._active)[1:]:
            self._advance(place, begin, token_id, at)
        if len(self._active) == depth:
            self._active.popleft()
        while self._growing and self._growing[0][0] + depth <= at:
            self._growing.popleft()

    def _advance(self, place: SuffixPlace, start: int, token_id: int, at: int) -> bool:
        """Move a suffix by the token at `at`. False where no edge continues it: it is a leaf now."""
        node = place.node
        if place.matched < node.length:
            if self._at(node.start + place.matched) != token_id:
                self._split(place, at)
                self._add_leaf(place.node, start, token_id, at)
                return False
            place.matched += 1
        else:
            child = node.children.get(token_id)
            if child is None:
                self._add_leaf(node, start, token_id, at)
                return False
            child.count += 1
            node.continued += 1
            if node.best is None or node.best.count <= child.count:
                node.best = child
            place.node, place.parent, place.matched = child, node, 1
        if place.matched == place.node.length:
            place.node.start = at + 1 - place.node.length  # its latest place
        return True

    def _add_leaf(self, parent: SuffixNode, start: int, token_id: int, at: int) -> None:
        leaf = parent.children[token_id] = SuffixNode(at, self.rules.depth - (at - start), 1)
        parent.continued += 1
        if parent.best is None or parent.best.count <= 1:
            parent.best = leaf
        self._growing.append((start, leaf))

    def _split(self, place: SuffixPlace, at: int) -> None:
        """Cut the edge on which a suffix stands, at its place.

        `at`: the position behind the suffix's tokens. Suffixes that stand on the edge have not come to its
        lower part.
        """
        lower, parent, cut = place.node, place.parent, place.matched
        upper = SuffixNode(at - cut, cut, lower.count, best=lower)
        staying = [other for other in self._active if other.node is lower]
        for other in staying:
            other.node = upper
        lower.count -= len(staying)
        lower.start += cut
        lower.length -= cut
        upper.continued = lower.count
        upper.children[self._at(lower.start)] = lower
        parent.children[self._at(upper.start)] = upper
        if parent.best is lower:
            parent.best = upper

    def _remove_suffix(self, at: int, end: int) -> None:
        """Take the passes of a suffix away.

        The labels of nodes that stay lie in later sequences: a label moves on with each pass.
        """
        path = [self._root]
        while at < end:
            child = path[-1].children[self._at(at)]
            path[-1].continued -= 1
            child.count -= 1
            at += child.length
            path.append(child)
        for parent, node in reversed(list(itertools.pairwise(path))):
            token_id = self._at(node.start)
            if not node.count:
                del parent.children[token_id]
            elif len(node.children) == 1 and node.continued == node.count:
                (child,) = node.children.values()
                child.start -= node.length
                child.length += node.length
                parent.children[token_id] = child
            if parent.best is node:
                parent.best = max(
                    parent.children.values(), key=lambda child: (child.count, child.start), default=None
                )

    def _locate(self, token_ids: list[int]) -> SuffixPlace | None:
        place = SuffixPlace(self._root, self._root)
        for token_id in token_ids:
            if place.matched == place.node.length:
                child = place.node.children.get(token_id)
                if child is None:
                    return None
                place = SuffixPlace(child, place.node)
            if self._at(place.node.start + place.matched) != token_id:
                return None
            place.matched += 1
        return place

    def _follow(self, place: SuffixPlace, match: int, limit: int) -> SuffixProposal:
        node, matched = place.node, place.matched
        token_ids: list[int] = []
        chances: list[float] = []
        product, score = 1.0, 0.0
        while len(token_ids) < limit:
            chance = self.rules.trust(match + len(token_ids))
            if matched == node.length:
                if node.best is None:
                    break
                chance *= node.best.count / node.continued
                node, matched = node.best, 0
            product *= chance
            if product < self.rules.min_probability:
                break
            behind = node.start + matched - self._end  # a leaf that grows: a repetition goes on
            token_ids.append(self._at(node.start + matched) if behind < 0 else token_ids[behind])
            chances.append(chance)
            score += product
            matched += 1
        return SuffixProposal(tuple(token_ids), tuple(chances), score=score)


def _halved(longest: int, least: int) -> Iterator[int]:
    """`longest`, half of it, and so on down to `least`."""
    while longest >= least:
        yield longest
        longest //= 2
