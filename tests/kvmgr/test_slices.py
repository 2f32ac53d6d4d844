"""`SliceRegistry` beside a dictionary of token runs, which needs no hash."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.types import Tokens
from sagellm.kvmgr.prefix_cache import slices
from sagellm.kvmgr.prefix_cache.slices import SliceMatch, SliceRegistry, window_hashes

prompts = st.lists(st.lists(st.integers(0, 2), max_size=24), max_size=8)


class SlowRegistry:
    """The same by comparing runs of tokens, and a list in order of use."""

    def __init__(self, slice_tokens: int, max_slices: int) -> None:
        self.size = slice_tokens
        self.max_slices = max_slices
        self.order: list[tuple[int, ...]] = []
        self.known: dict[tuple[int, ...], tuple[int, int]] = {}
        self.next_id = 0

    def observe(self, tokens: list[int], start: int) -> list[SliceMatch]:
        size, found, gaps, at = self.size, [], [], start
        gap = start
        while at + size <= len(tokens):
            run = tuple(tokens[at : at + size])
            if run in self.known:
                found.append((at, run))
                gaps.append((gap, at))
                gap = at = at + size
            else:
                at += 1
        gaps.append((gap, len(tokens)))
        matches = []
        for at, run in found:
            self.order.remove(run)
            self.order.append(run)
            matches.append(SliceMatch(at, *self.known[run]))
        for begin, end in gaps:
            for at in range(begin, end, size):
                run = tuple(tokens[at : at + size])
                if len(run) == size and run not in self.known:
                    if len(self.order) == self.max_slices:
                        del self.known[self.order.pop(0)]
                    self.known[run] = (at, self.next_id)
                    self.order.append(run)
                    self.next_id += 1
        return matches


@given(prompts, st.integers(1, 5), st.integers(1, 6), st.integers(0, 4))
def test_it_finds_what_its_slow_twin_finds(
    texts: list[list[int]], size: int, max_slices: int, start: int
) -> None:
    registry, slow = SliceRegistry(size, max_slices), SlowRegistry(size, max_slices)
    for text in texts:
        seen = registry.find(Tokens(text), start)
        assert registry.observe(Tokens(text), start) == seen == slow.observe(text, start)
        registry.check()
        assert len(registry) == len(slow.order) <= max_slices


@given(st.data())
def test_a_run_that_has_moved_is_found_but_for_its_ends(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 16))
    seeded = random.Random(data.draw(st.integers(0, 2**16)))
    run = [seeded.randrange(2**31) for _ in range(data.draw(st.integers(2 * size, 100)))]
    before, after = (
        [seeded.randrange(2**31) for _ in range(data.draw(st.integers(0, 40)))] for _ in range(2)
    )
    registry = SliceRegistry(size)
    registry.observe(Tokens(before + run))
    found = registry.find(Tokens(after + run))
    assert len(found) * size > len(run) - 2 * size
    for match in found:
        assert match.start - len(after) == match.source_start - len(before)


@given(prompts, st.integers(1, 5), st.data())
def test_what_is_forgotten_is_found_no_more(texts: list[list[int]], size: int, data: st.DataObject) -> None:
    registry = SliceRegistry(size)
    for number, text in enumerate(texts):
        registry.observe(Tokens(text), source=number)
    for text in texts:
        for match in registry.find(Tokens(text)):
            source = texts[match.source] if isinstance(match.source, int) else []
            own = text[match.start : match.start + size]
            assert own == source[match.source_start : match.source_start + size]
        at = data.draw(st.integers(0, 30))
        registry.forget(Tokens(text), at)
        registry.check()
        forgotten = text[at : at + size]
        for match in registry.find(Tokens(text)):
            assert len(forgotten) < size or text[match.start : match.start + size] != forgotten


def test_a_hash_that_two_slices_share_gives_no_wrong_match(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_equal(tokens: Tokens, size: int) -> np.ndarray:
        return np.zeros(max(0, len(tokens) - size + 1), dtype=np.uint64)

    monkeypatch.setattr(slices, "window_hashes", all_equal)
    registry = SliceRegistry(2)
    registry.observe(Tokens([1, 2, 3, 4]))
    assert len(registry) == 1
    assert registry.observe(Tokens([3, 4, 9, 1, 2])) == [SliceMatch(3, 0, 0)]


def test_the_hash_is_that_of_the_window_alone() -> None:
    text = [random.Random(0).randrange(2**31) for _ in range(300)]
    hashes = window_hashes(Tokens(text), 7).tolist()
    assert hashes == [window_hashes(Tokens(text[at : at + 7]), 7).item() for at in range(294)]
    assert window_hashes(Tokens([1, 2]), 3).tolist() == []
    assert window_hashes(Tokens(), 1).tolist() == []


def test_books_that_do_not_add_up() -> None:
    registry = SliceRegistry(1)
    registry.observe(Tokens([1, 2]))
    registry._max_slices = 1
    with pytest.raises(BookkeepingError, match="2 slices are kept, of at most 1"):
        registry.check()
    registry._max_slices = 2
    registry._slices[5] = registry._slices.popitem()[1]
    with pytest.raises(BookkeepingError, match="another hash"):
        registry.check()


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        SliceRegistry(*sizes)
