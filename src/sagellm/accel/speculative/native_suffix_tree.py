"""`NativeSuffixTree`: `SuffixTree` in C++, compiled when it is first needed."""

from __future__ import annotations

import ctypes
import functools
import logging
import secrets
import weakref
from array import array
from pathlib import Path

from sagellm.accel.speculative.suffix_tree import MAX_DEPTH, SuffixProposal, SuffixRules
from sagellm.core.errors import BookkeepingError, KernelError
from sagellm.core.native_code import compiled, cpu_level, find_compiler, loaded
from sagellm.core.types import TOKEN_BYTES, Tokens

log = logging.getLogger("sagellm.speculative")
_Tree = ctypes.c_void_p


class NativeSuffixTree:
    """What `SuffixTree` is, with the same results. Raises `MemoryError`; the tree is void then.

    A token takes 70 to 140 bytes, in a tree that `removes` 90 to 190, and one of a repetition 4. Calls hold
    Python's lock, which costs less than giving it back.
    """

    def __init__(
        self, library: NativeSuffixTrees, rules: SuffixRules, *, removes: bool, branches: int = 1
    ) -> None:
        self._library, self._branches = library, branches
        self._tree = library.new(rules, removes=removes, branches=branches > 1)
        weakref.finalize(self, library.free, self._tree)
        self._num_seen = 0

    @property
    def num_tokens(self) -> int:
        return self._library.sizes(self._tree)[0]

    @property
    def num_nodes(self) -> int:
        return self._library.sizes(self._tree)[1]

    @property
    def num_bytes(self) -> int:
        return self._library.sizes(self._tree)[2]

    def insert(self, token_ids: array[int]) -> None:
        """Add a sequence that has ended."""
        address, count = token_ids.buffer_info()
        if self._library.insert(self._tree, address, count):
            raise MemoryError("no memory for a suffix tree")

    def remove_oldest(self) -> int:
        """Remove the sequence that was inserted first; returns the number of its tokens."""
        count: int = self._library.remove(self._tree)
        if count < 0:
            raise MemoryError("no memory for a suffix tree")
        return count

    def propose(self, tokens: Tokens, most: int, shared: NativeSuffixTree | None = None) -> SuffixProposal:
        """As `SuffixTree.propose` does; without the score."""
        address, count = tokens.live.buffer_info()
        library, seen = self._library, self._num_seen
        self._num_seen = count
        asked = (
            self._tree,
            shared and shared._tree,
            address + seen * TOKEN_BYTES,
            count - seen,
            min(most, MAX_DEPTH),
            library.token_ids,
            library.chances,
        )
        is_tree = self._branches > 1
        found: int = (
            library.propose_tree(*asked, self._branches, library.parents)
            if is_tree
            else library.propose(*asked)
        )
        if found < 0:
            raise MemoryError("no memory for a suffix tree")
        parents = tuple(library.parents[:found]) if is_tree else ()
        return SuffixProposal(tuple(library.token_ids[:found]), tuple(library.chances[:found]), parents)

    def check(self) -> None:
        """Raise `BookkeepingError` unless sums, best children, links and labels fit."""
        wrong = self._library.check(self._tree)
        if wrong:
            raise BookkeepingError(f"suffix tree: {wrong.decode()}")


class NativeSuffixTrees:
    """The library, and where its answers are written."""

    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path), handle=loaded(path)._handle)
        int64, uint32 = ctypes.c_int64, ctypes.c_uint32
        self.token_ids = (ctypes.c_int32 * MAX_DEPTH)()
        self.chances = (ctypes.c_double * MAX_DEPTH)()
        self.parents = (ctypes.c_int32 * MAX_DEPTH)()
        self._secret = (ctypes.c_uint64 * 2)(secrets.randbits(64), secrets.randbits(64))
        self._new = library.sagellm_suffix_tree_new
        self._new.argtypes = (uint32, uint32, *(ctypes.c_double,) * 3, *(ctypes.c_int,) * 2, ctypes.c_void_p)
        self._new.restype = _Tree
        self.free = library.sagellm_suffix_tree_free
        self.free.argtypes, self.free.restype = (_Tree,), None
        self.insert = library.sagellm_suffix_tree_insert
        self.insert.argtypes = (_Tree, ctypes.c_void_p, int64)
        self.remove = library.sagellm_suffix_tree_remove
        self.remove.argtypes, self.remove.restype = (_Tree,), int64
        self.propose = library.sagellm_suffix_tree_propose
        self.propose.argtypes = (
            *(_Tree, _Tree, ctypes.c_void_p, int64, uint32),
            *(ctypes.c_void_p, ctypes.c_void_p),
        )
        self.propose_tree = library.sagellm_suffix_tree_propose_tree
        self.propose_tree.argtypes = (*self.propose.argtypes, uint32, ctypes.c_void_p)
        self._sizes = library.sagellm_suffix_tree_sizes
        self._sizes.argtypes, self._sizes.restype = (_Tree, ctypes.c_void_p), None
        self.check = library.sagellm_suffix_tree_check
        self.check.argtypes, self.check.restype = (_Tree,), ctypes.c_char_p

    def new(self, rules: SuffixRules, *, removes: bool, branches: bool) -> int:
        """The address of a new tree."""
        settings = rules.depth, rules.min_match, rules.alpha, rules.min_probability, rules.doubt
        tree: int | None = self._new(*settings, removes, branches, self._secret)
        if tree is None:
            raise MemoryError("no memory for a suffix tree")
        return tree

    def sizes(self, tree: int) -> list[int]:
        """Tokens, nodes, bytes."""
        sizes = (ctypes.c_int64 * 3)()
        self._sizes(tree, sizes)
        return list(sizes)


@functools.cache
def native_suffix_trees() -> NativeSuffixTrees | None:
    """The library, from the user's cache or compiled.

    None, which is said once, where there is no compiler.
    """
    try:
        compiler = find_compiler()
        source = Path(__file__).with_name("suffix_tree.cpp")
        path = compiled(source, cpu_level(()), compiler)  # no fused products: scores are those of the twin
        return NativeSuffixTrees(path)
    except KernelError as error:
        log.warning("suffix trees are kept in Python, which takes some 50 times as long: %s", error)
        return None
