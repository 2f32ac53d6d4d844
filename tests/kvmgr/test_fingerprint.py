"""Chained block hashes: one name for equal KV in every process, and another for everything else."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens
from sagellm.kvmgr.prefix_cache.fingerprint import HASH_BYTES, chain, fingerprint

BLOCK = 2
STEP = BLOCK * TOKEN_BYTES
SPACES = (
    Namespace(),
    Namespace(tenant="a"),
    Namespace(model="a"),
    Namespace(adapter="a"),
    Namespace(kv_dtype="a"),
    Namespace(tenant="a", model="b"),
    Namespace(tenant="ab"),
)
prompts = st.lists(st.integers(0, 2**31 - 1), max_size=12)


def test_the_hashes_are_the_same_in_every_process_and_version() -> None:
    """Tiers on disk and other machines keep these: whoever changes them makes all of that unreadable."""
    first, second = fingerprint(Tokens([1, 2, 3, 4, 5]), BLOCK, Namespace("t", "m", "a", "fp8"))
    assert first.hex() == "891aa36be5f00f09a75945a917979d24bebff0ce2ba51e48fe164c01a3e9d230"
    assert second.hex() == "0ed6953b36c51031e477455ea7fd73e3656beeb84c10a2e94a138c536f9995fb"
    assert (
        fingerprint(Tokens([1, 2]), BLOCK)[0].hex()
        == "953f4ebe90b68ed102c15fd71213e80bf02ce4e3edbeab264817b39f8234f49b"
    )


@given(prompts, st.integers(0, 6))
def test_block_by_block_is_the_same_as_at_once(tokens: list[int], cut: int) -> None:
    data = Tokens(tokens).tobytes()
    at_once = chain(data, STEP, Namespace())
    head = chain(data[: cut * STEP], STEP, Namespace())
    tail = chain(data[cut * STEP :], STEP, Namespace(), head[-1] if head else None)
    assert head + tail == at_once
    assert at_once == fingerprint(Tokens(tokens), BLOCK)
    assert len(at_once) == len(tokens) // BLOCK
    assert {len(one) for one in at_once} <= {HASH_BYTES}


@given(prompts, prompts)
def test_hashes_are_equal_as_far_as_whole_blocks_are(left: list[int], right: list[int]) -> None:
    pairs = zip(fingerprint(Tokens(left), BLOCK), fingerprint(Tokens(right), BLOCK), strict=False)
    for position, (one, other) in enumerate(pairs, start=1):
        assert (one == other) == (left[: position * BLOCK] == right[: position * BLOCK])


def test_no_two_namespaces_share_a_hash() -> None:
    hashes = [fingerprint(Tokens([1, 2, 3, 4]), BLOCK, space) for space in SPACES]
    for left, right in itertools.combinations(hashes, 2):
        assert not set(left) & set(right)


def test_the_same_block_elsewhere_has_another_hash() -> None:
    hashes = fingerprint(Tokens([7, 7] * 5), BLOCK)
    assert len(set(hashes)) == 5


def test_fewer_tokens_than_a_block_have_no_hash() -> None:
    assert fingerprint(Tokens([1]), BLOCK) == []
    assert fingerprint(Tokens(), BLOCK) == []
