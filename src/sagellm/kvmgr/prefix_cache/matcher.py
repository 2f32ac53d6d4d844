"""`PrefixMatcher`: what a router asks of an index, without touching it."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.protocols.prefix_cache import Branch, PrefixReuseIndex
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.prefix_cache._simple_door import PrefixMatch


class PrefixMatcher:
    """Reads one index and changes nothing: no pin, no split, no stamp.

    A router has one per instance, asks each for `match` and sends the request where most tokens are resident.
    `best` also says what stands behind the shared part.
    """

    def __init__(self, index: PrefixReuseIndex) -> None:
        self._index = index

    def match(
        self,
        tokens: Tokens | Sequence[int],
        namespace: Namespace = Namespace(),
        max_tokens: int | None = None,
    ) -> PrefixMatch:
        """The longest resident prefix, in the design documents' form. The blocks stay the index's: without a
        pin they may be gone after its next `evict`."""
        hit = self._index.lookup(_as_tokens(tokens), namespace, max_tokens)
        return PrefixMatch(hit.num_tokens, self._index.block_ids(hit).tolist())

    def best(
        self, tokens: Tokens | Sequence[int], namespace: Namespace = Namespace(), k: int = 1
    ) -> list[Branch]:
        """At most `k` resident branches that begin like the tokens: the longest match first, then the last
        used. Where several answers to one prompt are resident (`n > 1`), each is a branch."""
        return self._index.branches(_as_tokens(tokens), k, namespace)


def _as_tokens(tokens: Tokens | Sequence[int]) -> Tokens:
    return tokens if isinstance(tokens, Tokens) else Tokens(tokens)
