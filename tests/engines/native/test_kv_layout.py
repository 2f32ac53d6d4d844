"""How layers with KV of different sizes share pages: groups, bytes, and where each layer's numbers lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.types import KVCacheSchema, KVGroup
from sagellm.engines.native.attention import BlockRead
from sagellm.engines.native.kv_cache import LAYOUT, MAX_GROUPS, PagedKV, deal_layers

SIZES = {"small": (1, 8), "twice": (2, 8), "four times": (1, 32), "odd": (3, 4)}
BLOCK_SIZE, NUM_BLOCKS = 4, 6
Kinds = list[tuple[int | None, str]]
kinds = st.lists(
    st.tuples(st.sampled_from([None, 5, 9]), st.sampled_from(sorted(SIZES))), min_size=1, max_size=12
)


def schema_of(windows: list[int | None], shapes: list[tuple[int, int]]) -> KVCacheSchema:
    return KVCacheSchema(
        len(windows), 1, 8, "float32", BLOCK_SIZE, LAYOUT, groups=deal_layers(windows, shapes),
        layer_shapes=tuple(shapes),
    )  # fmt: skip


def pool_of(schema: KVCacheSchema) -> PagedKV:
    return PagedKV(
        schema.num_layers, NUM_BLOCKS, BLOCK_SIZE, schema.num_kv_heads, schema.head_dim, torch.device("cpu"),
        torch.float32, groups=schema.groups, shapes=schema.layer_shapes,
    )  # fmt: skip


@given(kinds)
def test_each_layer_is_in_one_group_of_its_kind(layers: Kinds) -> None:
    windows, shapes = [window for window, _ in layers], [SIZES[size] for _, size in layers]
    groups = deal_layers(windows, shapes)
    if len(set(windows)) == 1:
        assert groups == ()
        return
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
    assert all(len({(windows[i], layers[i][1]) for i in group.layers}) == 1 for group in groups)
    assert len(groups) <= max(MAX_GROUPS, len(set(layers)))
    assert groups[0].window is None
    furthest = max(windows, key=lambda window: window or 1 << 30)
    assert {windows[i] for group in groups if group.window is None for i in group.layers} == {furthest}


@given(kinds)
def test_what_layers_of_a_group_store_in_one_block_stays_apart(layers: Kinds) -> None:
    windows, shapes = [window for window, _ in layers], [SIZES[size] for _, size in layers]
    schema = schema_of(windows, shapes)
    kv = pool_of(schema)
    slots = torch.tensor([5, 9, 6])
    stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for group in schema.groups or (KVGroup(tuple(range(len(layers)))),):
        for layer in group.layers:
            stored[layer] = torch.randn(3, *shapes[layer]), torch.randn(3, *shapes[layer])
            kv.write(layer, slots, *stored[layer])
        for layer in group.layers:
            assert kv.keys[layer].shape == (NUM_BLOCKS, BLOCK_SIZE, *shapes[layer])
            for pool, expected in zip((kv.keys[layer], kv.values[layer]), stored[layer], strict=True):
                assert torch.equal(pool[slots // BLOCK_SIZE, slots % BLOCK_SIZE], expected)
                gathered = BlockRead(1, 2, 0, torch.tensor([1, 2])).of(pool)
                assert torch.equal(gathered, BlockRead(1, 2, 1, None).of(pool))
                assert torch.equal(gathered[0, slots - BLOCK_SIZE], expected)


@given(kinds)
def test_the_pool_has_the_bytes_of_the_schema(layers: Kinds) -> None:
    schema = schema_of([window for window, _ in layers], [SIZES[size] for _, size in layers])
    kv = pool_of(schema)
    held = {kv.keys[i].untyped_storage().data_ptr(): kv.keys[i] for i in range(len(layers))}
    held |= {kv.values[i].untyped_storage().data_ptr(): kv.values[i] for i in range(len(layers))}
    num_bytes = sum(pool.untyped_storage().nbytes() for pool in held.values())
    assert num_bytes == NUM_BLOCKS * schema.bytes_per_page
    used = sum(2 * 4 * heads * dim for heads, dim in schema.layer_shapes)
    assert schema.bytes_per_token == used
    assert schema.padding_per_token == schema.bytes_per_block // BLOCK_SIZE - used >= 0


@pytest.mark.parametrize(
    ("full", "sliding", "num_full", "num_sliding", "layers", "padding"),
    [
        ((1, 512), (1, 256), 3, 12, [3, 6, 6], 0.0),
        ((1, 512), (2, 256), 4, 20, [4, 4, 4, 4, 4, 4], 0.0),
        ((2, 512), (8, 256), 5, 25, [5, 4, 4, 4, 4, 4, 4, 1], 0.14),
        ((4, 512), (16, 256), 10, 50, [10, 8, 8, 8, 8, 8, 8, 2], 0.14),
        ((1, 512), (3, 256), 1, 4, [1, 1, 1, 1, 1], 1 / 15),
    ],
)
def test_groups_where_full_layers_have_other_heads(
    full: tuple[int, int], sliding: tuple[int, int], num_full: int, num_sliding: int, layers: list[int],
    padding: float,
) -> None:  # fmt: skip
    schema = schema_of([None] * num_full + [512] * num_sliding, [full] * num_full + [sliding] * num_sliding)
    assert [len(group.layers) for group in schema.groups] == layers
    assert schema.padding_per_token * BLOCK_SIZE / schema.bytes_per_block == pytest.approx(padding, abs=0.005)


def test_layers_of_one_size_are_dealt_as_before() -> None:
    windows = [512 if (i + 1) % 6 else None for i in range(26)]
    assert deal_layers(windows) == deal_layers(windows, [(4, 256)] * 26)
    assert [len(group.layers) for group in deal_layers(windows)] == [4, 4, 4, 4, 4, 4, 2]
