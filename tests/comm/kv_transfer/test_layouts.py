"""Blocks of another layout are converted, equal to a slow copy, or refused with what would have worked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.comm.kv_transfer.chunks import cut, cut_by_layer, cut_views
from sagellm.comm.kv_transfer.layouts import agree, reorder
from sagellm.comm.kv_transfer.messages import PROTOCOL, Hello
from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork, InProcessTransport
from sagellm.core.errors import ConfigError, KVDataError
from sagellm.core.protocols.kv_tiers import KVCodec
from sagellm.core.protocols.kv_transfer import BlockLayout, TransferStatus
from sagellm.core.types import Tokens
from sagellm.kvmgr.kv_pool.tiers.codecs import CODECS
from tests.comm.kv_transfer.world import (
    HEAD_FIRST,
    LAYOUT,
    SIZE,
    TOKEN_FIRST,
    Instance,
    content,
    finish,
    introduce,
    prompt,
    until,
)

ORDERS = [TOKEN_FIRST, HEAD_FIRST, "layer.kv.token.head.dim", "token.head.layer.kv.dim"]
HELLO = Hello(
    PROTOCOL, "a", "weights", "00" * 16, LAYOUT.bytes_per_block, True, "", 1 << 20, TOKEN_FIRST, 3, 4, 8,
    SIZE, "float32", 0, 4, "run", 10_000,
)  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn) -> tuple[BlockLayout, BlockLayout]:
    """Two of one model, which may have other heads."""
    total = draw(st.integers(1, 4))
    made = []
    for _ in range(2):
        first = draw(st.integers(0, total - 1))
        made.append(
            BlockLayout(
                draw(st.sampled_from(ORDERS)), 2, total, 3, 2, "float32", first,
                draw(st.integers(1, total - first)),
            )
        )  # fmt: skip
    return made[0], made[1]


@given(layouts(), st.integers(1, 3))
def test_reorder_agrees_with_a_copy_number_by_number(
    pair: tuple[BlockLayout, BlockLayout], num_blocks: int
) -> None:
    source, target = pair
    names = [dict.fromkeys(layout.axes.split(".")) for layout in pair]
    data = np.random.default_rng(0).integers(0, 1 << 32, (num_blocks, *source.shape), np.uint32)
    result = np.zeros((num_blocks, *target.shape), np.uint32)
    expected = result.copy()
    for block, kv, layer, token, head, dim in product(
        range(num_blocks), range(2), range(2), range(2), range(source.total_heads), range(3)
    ):
        if not all(each.first_head <= head < each.last_head for each in pair):
            continue
        at = {"kv": kv, "layer": layer, "token": token, "dim": dim}
        places = [
            (block, *({**at, "head": head - each.first_head}[axis] for axis in order))
            for each, order in zip(pair, names, strict=True)
        ]
        expected[places[1]] = data[places[0]]
    reorder(source, data.tobytes(), target, result.data.cast("B"))
    assert (result == expected).all()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def instances(stack: ExitStack, layouts_of: dict[str, BlockLayout], **options: Any) -> list[Instance]:
    network = InProcessNetwork()
    given = {"options": ChannelOptions(chunk_bytes=5000, stall_s=0.5, offer_wait_s=0.2)} | options
    made = []
    for name, layout in layouts_of.items():
        made.append(Instance(name, InProcessTransport(name, network), layout=layout, **given))
        stack.callback(made[-1].channel.close)
    introduce(*made)
    return made


@pytest.mark.parametrize(("source", "target"), [(a, b) for a in ORDERS[:3] for b in ORDERS[:3] if a != b])
def test_token_first_and_head_first(source: str, target: str, stack: ExitStack) -> None:
    here, there = instances(stack, {"a": replace(LAYOUT, axes=source), "b": replace(LAYOUT, axes=target)})
    tokens = prompt(1, 7)
    here.compute(tokens)
    assert finish(here, here.send(tokens, "b"), there).status is TransferStatus.DONE
    assert there.num_tokens(tokens) == 7 * SIZE
    there.check(tokens)


def test_one_rank_to_two(stack: ExitStack) -> None:
    halves = {"rank 0": LAYOUT.of_heads(0, 2), "rank 1": replace(LAYOUT.of_heads(2, 4), axes=HEAD_FIRST)}
    whole, *ranks = instances(stack, {"whole": LAYOUT} | halves)
    tokens = prompt(2, 9)
    whole.compute(tokens)
    for rank in ranks:
        report = finish(whole, whole.send(tokens, rank.name), rank)
        assert report.status is TransferStatus.DONE
        assert report.num_bytes == 9 * LAYOUT.bytes_per_block // 2, "only the heads that it has"
        rank.check(tokens)


@pytest.mark.parametrize("axes", [TOKEN_FIRST, HEAD_FIRST])
def test_two_ranks_to_one(axes: str, stack: ExitStack) -> None:
    """Both fill the heads of one arrival, which is published when both have ended."""
    halves = {"rank 0": LAYOUT.of_heads(0, 2), "rank 1": LAYOUT.of_heads(2, 4)}
    whole, first, second = instances(stack, {"whole": replace(LAYOUT, axes=axes)} | halves)
    tokens = prompt(3, 9)
    for rank in (first, second):
        rank.compute(tokens)
    ticket = first.send(tokens, "whole")
    until(lambda: whole.arrivals.num_blocks, whole, first)
    assert whole.num_tokens(tokens) == 0
    other = second.send(tokens, "whole")
    assert finish(first, ticket, second, whole).status is TransferStatus.DONE
    assert finish(second, other, first, whole).status is TransferStatus.DONE
    assert whole.num_tokens(tokens) == 9 * SIZE
    whole.check(tokens)


def test_one_of_two_ranks_is_not_enough(stack: ExitStack) -> None:
    whole, first = instances(stack, {"whole": LAYOUT, "rank 0": LAYOUT.of_heads(0, 2)})
    tokens = prompt(4, 3)
    first.compute(tokens)
    report = finish(first, first.send(tokens, "whole"), whole)
    assert (report.status, report.num_tokens) == (TransferStatus.RETRY, 0)
    until(lambda: not whole.arrivals.num_blocks, whole)
    whole.check(tokens)


def test_four_ranks_to_two(stack: ExitStack) -> None:
    quarters = {f"s{i}": LAYOUT.of_heads(i, i + 1) for i in range(4)}
    halves = {f"t{i}": LAYOUT.of_heads(2 * i, 2 * i + 2) for i in range(2)}
    made = instances(stack, quarters | halves)
    tokens = prompt(5, 5)
    tickets = []
    for number, rank in enumerate(made[:4]):
        rank.compute(tokens)
        tickets.append((rank, rank.send(tokens, f"t{number // 2}")))
    until(lambda: all(ticket in rank.reports for rank, ticket in tickets), *made)
    for target in made[4:]:
        assert target.num_tokens(tokens) == 5 * SIZE
        target.check(tokens)


REFUSED = {
    "protocol": (99, "run the same version"),
    "fingerprint": ("other", "load the same weights"),
    "dtype": ("int8", "set model.dtype"),
    "block_size": (8, "set kv.block_size"),
    "num_layers": (6, "load the same model"),
    "head_dim": (16, "load the same model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    value, hint = REFUSED[name]
    changed: Any = {name: value, "digest": "11" * 16}
    theirs = replace(HELLO, **changed)
    if name in ("dtype", "block_size", "num_layers", "head_dim"):
        layout = BlockLayout(
            TOKEN_FIRST, theirs.num_layers, 4, theirs.head_dim, theirs.block_size, theirs.dtype
        )
        theirs = replace(theirs, bytes_per_block=layout.bytes_per_block)
    with pytest.raises(KVDataError, match=hint):
        agree(HELLO, theirs)


def test_other_refusals_say_why() -> None:
    opaque = replace(HELLO, axes="", digest="11" * 16)
    with pytest.raises(KVDataError, match="is not converted"):
        agree(HELLO, opaque)
    half = LAYOUT.bytes_per_block // 2
    ranks = [
        replace(HELLO, digest="22" * 16, first_head=first, num_heads=2, bytes_per_block=half)
        for first in (0, 2)
    ]
    with pytest.raises(KVDataError, match="none in common: send to the rank"):
        agree(*ranks)
    with pytest.raises(KVDataError, match="has not 5 bytes"):
        agree(HELLO, replace(HELLO, digest="11" * 16, bytes_per_block=5))
    assert agree(opaque, opaque).wire_bytes == LAYOUT.bytes_per_block


@pytest.mark.parametrize(
    "wrong", [{"axes": "kv.layer.token.head"}, {"axes": "dim.kv.layer.token.head"}, {"dtype": "int3"},
              {"first_head": 3, "num_heads": 2}, {"num_layers": 0}],
)  # fmt: skip
def test_impossible_layouts(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(LAYOUT, **wrong)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 120), st.booleans())
def test_chunks_cover_all_bytes_once(num_blocks: int, block: int, chunk: int, has_views: bool) -> None:
    rows = np.zeros((num_blocks, block), np.uint8)
    for each in cut(num_blocks, block, chunk, has_views=has_views):
        assert each.num_bytes <= max(chunk, 1 if has_views else block)
        views = [memoryview(row) for row in rows[each.first : each.stop]]
        for view in cut_views(views, 1, each.spans):
            np.frombuffer(view, np.uint8)[:] += 1
    assert (rows == 1).all()


@given(st.sampled_from(ORDERS[:3]), st.integers(1, 9), st.integers(1, 9000))
def test_chunks_by_layer_cover_all_bytes_once(axes: str, num_blocks: int, chunk: int) -> None:
    layout = replace(LAYOUT, axes=axes)
    rows = np.zeros((num_blocks, layout.bytes_per_block), np.uint8)
    layers = []
    for each in cut_by_layer(num_blocks, layout, chunk):
        layers.append(each.num_layers)
        size = layout.bytes_per_block // 6
        views = [
            memoryview(row)[at : at + size]
            for row in rows[each.first : each.stop]
            for at in range(0, layout.bytes_per_block, size)
        ]
        for view in cut_views(views, 6, each.spans):
            np.frombuffer(view, np.uint8)[:] += 1
    assert (rows == 1).all()
    assert layers == sorted(layers)


def test_the_content_of_tests_is_that_of_heads() -> None:
    """The twin of these tests cuts heads as layouts say."""
    whole = np.frombuffer(content(b"x" * 32, LAYOUT), np.uint32).reshape(LAYOUT.shape)
    part = np.frombuffer(content(b"x" * 32, LAYOUT.of_heads(1, 3)), np.uint32)
    assert (whole[:, :, :, 1:3].ravel() == part).all()


@pytest.mark.parametrize("chunk_bytes", [0, 1, 1023])
def test_tiny_chunks_are_refused(chunk_bytes: int) -> None:
    with pytest.raises(KVDataError, match="1024 or more"):
        agree(HELLO, replace(HELLO, chunk_bytes=chunk_bytes))
    with pytest.raises(ConfigError, match="chunk_bytes"):
        ChannelOptions(chunk_bytes=chunk_bytes)


def filled(instance: Instance, tokens: Tokens) -> Any:
    """Compute a prompt with normally distributed numbers: they are returned, as `numbers_of` reads them."""
    instance.compute(tokens)
    ids = list(instance.index.block_ids(instance.index.lookup(tokens)))
    shape = len(ids), instance.layout.bytes_per_block // 4
    numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    instance.memory.rows[ids] = numbers.view(np.uint8)
    return numbers_of(instance, tokens)


def numbers_of(instance: Instance, tokens: Tokens) -> Any:
    """[block, kv, layer, token, head, dim]"""
    ids = list(instance.index.block_ids(instance.index.lookup(tokens)))
    names = instance.layout.axes.split(".")
    order = [1 + names.index(axis) for axis in ("kv", "layer", "token", "head", "dim")]
    numbers = instance.memory.rows[ids].view(np.float32)
    return numbers.reshape(-1, *instance.layout.shape).transpose(0, *order)


def delta_of(layout: BlockLayout | None) -> KVCodec:
    return CODECS.create("delta", dtype="float32", layout=layout)


def check_near(sent: Any, found: Any) -> None:
    largest = np.abs(sent).max(axis=(3, 5), keepdims=True)
    assert sent.shape == found.shape
    assert (np.abs(found - sent) <= delta_of(LAYOUT).max_error * largest).all()
    assert not np.array_equal(found, sent)


@pytest.mark.parametrize("axes", ORDERS[1:])
def test_a_codec_is_made_for_the_layout_on_the_wire(axes: str, stack: ExitStack) -> None:
    here, there = instances(stack, {"a": LAYOUT, "b": replace(LAYOUT, axes=axes)}, codec=delta_of)
    tokens = prompt(1, 7)
    sent = filled(here, tokens)
    report = finish(here, here.send(tokens, "b"), there)
    assert report.status is TransferStatus.DONE
    assert report.num_bytes < 7 * LAYOUT.bytes_per_block / 3
    check_near(sent, numbers_of(there, tokens))


def test_a_codec_between_ranks_and_a_whole_instance(stack: ExitStack) -> None:
    halves = {"rank 0": LAYOUT.of_heads(0, 2), "rank 1": replace(LAYOUT.of_heads(2, 4), axes=HEAD_FIRST)}
    whole, *ranks = instances(stack, {"whole": LAYOUT} | halves, codec=delta_of)
    tokens = prompt(2, 9)
    sent = filled(whole, tokens)
    for rank in ranks:
        assert finish(whole, whole.send(tokens, rank.name), rank).status is TransferStatus.DONE
    halves_found = [numbers_of(rank, tokens) for rank in ranks]
    check_near(sent, np.concatenate(halves_found, axis=4))
    whole.evict_all()
    tickets = [(rank, rank.send(tokens, "whole")) for rank in ranks]
    until(lambda: all(ticket in rank.reports for rank, ticket in tickets), whole, *ranks)
    assert {rank.reports[ticket].status for rank, ticket in tickets} == {TransferStatus.DONE}
    check_near(np.concatenate(halves_found, axis=4), numbers_of(whole, tokens))
