"""`AdmissionFilter` beside an exact count."""

from __future__ import annotations

import random
from collections import Counter
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.kvmgr.kv_pool.tiers.admission import MAX_LOAD, AdmissionFilter


def path(*tokens: int) -> list[bytes]:
    """Chained hashes."""
    hashes, above = [], b""
    for token in tokens:
        above = blake2b(above + token.to_bytes(8, "little"), digest_size=32).digest()
        hashes.append(above)
    return hashes


@pytest.mark.parametrize(("min_uses", "admitted"), [(1, [3, 3, 3]), (2, [0, 3, 3]), (3, [0, 0, 3])])
def test_a_block_is_admitted_from_its_nth_use_on(min_uses: int, admitted: list[int]) -> None:
    made = AdmissionFilter(64, min_uses)
    assert [made.num_admitted(path(1, 2, 3), ends=True) for _ in admitted] == admitted


def test_a_request_counts_once_however_often_it_is_offered() -> None:
    made = AdmissionFilter(64, 2)
    assert [made.num_admitted(path(1, 2), ends=ends) for ends in (False, False, True)] == [0, 0, 0]
    assert made.num_admitted(path(1, 2), ends=False) == 2
    assert made.num_admitted(path(1, 2, 3), ends=True) == 2, "the third is new"
    assert made.num_admitted([], ends=True) == 0


@given(st.integers(0, 1 << 30), st.integers(1, 4))
def test_never_fewer_than_the_exact_count(seed: int, min_uses: int) -> None:
    draw, made, exact = random.Random(seed), AdmissionFilter(256, min_uses), Counter[bytes]()
    for _ in range(120):
        hashes = path(*(draw.randrange(3) for _ in range(draw.randrange(1, 6))))
        expected = next((i for i, one in enumerate(hashes) if exact[one] < min_uses - 1), len(hashes))
        assert made.num_admitted(hashes, ends=True) == expected, "few blocks: no two share all cells"
        exact.update(hashes)


def test_new_blocks_are_rarely_taken_for_old_ones() -> None:
    made = AdmissionFilter(1_000, 2)
    taken = sum(made.num_admitted(path(number), ends=True) for number in range(20_000))  # each once
    assert taken < 20_000 * 0.03


def test_old_prompts_are_forgotten() -> None:
    made = AdmissionFilter(8, 2)
    made.num_admitted(path(1 << 60), ends=True)
    for number in range(int(MAX_LOAD * made._num_cells)):
        made.num_admitted(path(number), ends=True)
    assert made.num_admitted(path(1 << 60), ends=False) == 0
    assert made._num_seen < MAX_LOAD * made._num_cells
