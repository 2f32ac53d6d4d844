"""`Suffix`: proposes what followed the last tokens before, here or in earlier outputs.

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). Each running request has a suffix tree of its
prompt and output, and each namespace one of the outputs of its ended requests. Those of a session are found
in the prompt of its next turn, and in the namespace's tree where a chat template leaves them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sagellm.accel.speculative.native_suffix_tree import NativeSuffixTree, native_suffix_trees
from sagellm.accel.speculative.suffix_tree import SuffixRules, SuffixTree
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.speculative import Asked, Proposal
from sagellm.core.types import Namespace, Request, Tokens

CHAIN_PROBABILITY, TREE_PROBABILITY = 0.1, 0.02


class Suffix:
    """Implements `Proposer`. `depth` to `doubt`: see `SuffixRules`.

    `shared_tokens`: the most tokens of ended requests that are kept, over all namespaces; the oldest outputs
    go first. 0 keeps none. A request counts `depth` tokens more than its output has, for the tree that it may
    need. `branches`: above 1 proposals are trees, in which each match gives so many tokens behind another at
    most. `min_probability` is by default 0.1 for chains, and 0.02 for trees, whose paths are less likely.
    `native`: use C++ where it can be compiled.
    """

    def __init__(
        self,
        depth: int = 64,
        alpha: float = 2.0,
        min_probability: float | None = None,
        min_match: int = 1,
        doubt: float = 2.0,
        shared_tokens: int = 262_144,
        branches: int = 1,
        *,
        native: bool = True,
    ) -> None:
        if shared_tokens < 0:
            raise ValueError(f"shared_tokens must be at least 0, got {shared_tokens}")
        if branches < 1:
            raise ValueError(f"branches must be at least 1, got {branches}")
        if min_probability is None:
            min_probability = CHAIN_PROBABILITY if branches == 1 else TREE_PROBABILITY
        rules = SuffixRules(depth, alpha, min_probability, min_match, doubt)
        library = native_suffix_trees() if native else None
        make: Any = partial(NativeSuffixTree, library) if library else SuffixTree
        self._make: Any = partial(make, branches=branches)
        self._rules = rules
        self._trees: dict[str, Any] = {}
        self._shared = SharedOutputs(rules, shared_tokens, self._make)

    def propose(self, asked: Sequence[Asked]) -> Sequence[Proposal]:
        return [self._continuation(*each) for each in asked]

    def _continuation(self, request: Request, tokens: Tokens, num_tokens: int) -> Proposal:
        """The best-scored one of either tree."""
        tree = self._trees.get(request.request_id)
        if tree is None:
            tree = self._trees[request.request_id] = self._make(self._rules, removes=False)
        found = tree.propose(tokens, num_tokens, self._shared.trees.get(request.namespace))
        return Proposal(found.token_ids, acceptance=found.chances, parents=found.parents)

    def observe(self, request_id: str, num_accepted: int) -> None:
        """The trees learn from the tokens themselves."""

    def forget(self, request: Request, tokens: Tokens) -> None:
        """Its output goes to the tree of its namespace.

        Not that of a request which wants no proposals itself, such as a probe of reasoning.
        """
        self._trees.pop(request.request_id, None)
        if request.params.num_speculative_tokens != 0:
            self._shared.add(request, tokens)

    def close(self) -> None:
        """Nothing is held but memory."""

    def check(self) -> None:
        """Raise `BookkeepingError` unless all trees and their sums are in order."""
        for tree in self._trees.values():
            tree.check()
        self._shared.check()


@dataclass(slots=True)
class SharedOutputs:
    """The outputs of ended requests, in a tree for each namespace. `added`: of all, oldest first, the
    namespace and what the output counts."""

    rules: SuffixRules
    max_tokens: int
    make: Any
    trees: dict[Namespace, Any] = field(default_factory=dict)
    added: deque[tuple[Namespace, int]] = field(default_factory=deque)
    num_tokens: int = 0

    def add(self, request: Request, tokens: Tokens) -> None:
        """Add what a request has drawn itself; of too much, its end.

        What it had `generated` when it came is left out: requests that go on for each other, as those of
        reasoning with probes, would add the same tokens each time.
        """
        room, num_given = self.max_tokens - self.rules.depth, len(request.tokens) + len(request.generated)
        output = tokens.slice(max(num_given, len(tokens) - max(0, room)))
        if not output:
            return
        namespace = request.namespace
        tree = self.trees.get(namespace)
        if tree is None:
            tree = self.trees[namespace] = self.make(self.rules, removes=True)
        tree.insert(output)
        counted = len(output) + self.rules.depth
        self.added.append((namespace, counted))
        self.num_tokens += counted
        while self.num_tokens > self.max_tokens:
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        namespace, counted = self.added.popleft()
        self.num_tokens -= counted
        tree = self.trees[namespace]
        tree.remove_oldest()
        if not tree.num_tokens:
            del self.trees[namespace]

    def check(self) -> None:
        """Raise `BookkeepingError` unless trees, sums and the limit are in order."""
        counted: dict[Namespace, int] = {}
        for namespace, num_tokens in self.added:
            counted[namespace] = counted.get(namespace, 0) + num_tokens - self.rules.depth
        held = {namespace: tree.num_tokens for namespace, tree in self.trees.items()}
        if held != counted:
            raise BookkeepingError(f"trees hold {held} tokens, {counted} were added")
        if self.num_tokens > self.max_tokens or self.num_tokens != sum(count for _, count in self.added):
            raise BookkeepingError(f"{self.num_tokens} tokens counted, {self.max_tokens} at most")
        for tree in self.trees.values():
            tree.check()


PLUGIN = Suffix
