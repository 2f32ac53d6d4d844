"""`DeltaCodec`: the error that it states, a slow twin, other layouts, damaged bytes."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import ConfigError, KVDataError
from sagellm.core.protocols.kv_transfer import BlockLayout
from sagellm.kvmgr.kv_pool.tiers.codecs import BYTES_OF_DTYPE, delta
from sagellm.kvmgr.kv_pool.tiers.codecs.delta import CODED, GROUP, STEPS, UNCHANGED, WIDE, DeltaCodec
from tests.kvmgr.tiers.storages.test_kv_codecs import bytes_of, numbers_of, returned

DTYPES = sorted(BYTES_OF_DTYPE)
TOKEN_FIRST, HEAD_FIRST = "kv.layer.token.head.dim", "kv.layer.head.token.dim"
ORDERS = ["layer.kv.token.head.dim", "token.head.layer.kv.dim", "head.kv.token.layer.dim", HEAD_FIRST]
LAYOUT = BlockLayout(TOKEN_FIRST, num_layers=5, total_heads=2, head_dim=8, block_size=32, dtype="float32")
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-20, "float64": 2.0**-40}
"""More than half of the distance of neighbouring numbers, relative to the larger."""


def codec_for(layout: BlockLayout, dtype: str = "float32") -> DeltaCodec:
    return DeltaCodec(dtype, replace(layout, dtype=dtype))


def ordered(numbers: npt.NDArray[Any], layout: BlockLayout) -> npt.NDArray[Any]:
    """Whole blocks as [block, kv, layer, head, token, dim]."""
    names = layout.axes.split(".")
    order = [1 + names.index(axis) for axis in ("kv", "layer", "head", "token", "dim")]
    whole = len(numbers) // int(np.prod(layout.shape)) * int(np.prod(layout.shape))
    return numbers[:whole].reshape(-1, *layout.shape).transpose(0, *order)


def steps_of(heads: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The step of each head, computed plainly: [block, kv, layer, head, 1, 1]."""
    num_layers, size = heads.shape[2], heads.shape[4]
    group = GROUP if size % GROUP == 0 else size
    tokens = heads.reshape(*heads.shape[:4], size // group, group, -1)
    distance = np.abs(tokens - tokens.mean(axis=5, keepdims=True)).mean(axis=(4, 5, 6))
    shares = np.array([STEPS[3 * layer // num_layers] for layer in range(num_layers)])
    steps = distance * (np.pi / 2) ** 0.5 * shares[:, None]
    most = np.abs(heads).max(axis=(4, 5))
    found: npt.NDArray[Any] = np.clip(steps, most / 2**14, most / 4)[..., None, None]
    return found


def check_error(data: bytes, after: bytearray, layout: BlockLayout, dtype: str) -> None:
    """Half a step and the rounding to the dtype; and the bound in the contract."""
    before, now = (ordered(numbers_of(each, dtype), layout) for each in (data, after))
    most = np.abs(before).max(axis=(4, 5), keepdims=True)
    errors = np.abs(now - before)
    assert (errors <= steps_of(before) * 0.505 + ROUNDING[dtype] * most * 1.13).all()
    assert (errors <= DeltaCodec.max_error * most).all()


def random_numbers(seed: int, count: int, kind: str) -> npt.NDArray[Any]:
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(count)
    if kind == "outliers":
        numbers[rng.integers(0, count, max(1, count // 50))] *= 3000
    elif kind == "uniform":
        numbers = rng.random(count) * 2 - 1
    elif kind == "two values":
        numbers = np.sign(numbers)
    elif kind == "far from zero":
        numbers = 1000 + numbers
    elif kind == "channels":  # some channels are larger by far, as those of keys are
        numbers *= np.tile(10.0 ** (np.arange(8) - 4), count // 8 + 1)[:count]
    elif kind == "zeros":
        numbers[:] = 0.0
    elif kind == "constant":
        numbers[:] = 0.3
    elif kind == "mostly zeros":
        numbers[rng.random(count) < 0.99] = 0.0
    elif kind == "near the largest":
        numbers = np.clip(numbers * 30_000, -65504, 65504)
    return numbers


KINDS = [
    "normal", "outliers", "uniform", "two values", "far from zero", "channels", "zeros", "constant",
    "mostly zeros", "near the largest",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [4, 16, 24, 32])
def test_the_stated_error(kind: str, dtype: str, size: int) -> None:
    layout = replace(LAYOUT, block_size=size)
    count = 3 * int(np.prod(layout.shape)) + 5
    data = bytes_of(random_numbers(1, count, kind), dtype)
    codec = codec_for(layout, dtype)
    stored = codec.encode(data)
    assert stored[0] == CODED, "these numbers can be coded"
    after = returned(codec, data)
    check_error(data, after, layout, dtype)
    assert after[-5 * BYTES_OF_DTYPE[dtype] :] == data[-5 * BYTES_OF_DTYPE[dtype] :], "behind whole blocks"
    if kind in ("zeros", "constant"):
        assert numbers_of(after, dtype) == pytest.approx(numbers_of(data, dtype), rel=1e-4)
        assert len(stored) < len(data) / 8


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.binary(max_size=700))
def test_its_error_whatever_the_bits(dtype: str, data: bytes) -> None:
    """Subnormal and largest numbers, too. What cannot be coded comes back unchanged."""
    layout = BlockLayout(TOKEN_FIRST, 2, 1, 2, 2, dtype)
    codec = codec_for(layout, dtype)
    stored, after = codec.encode(data), returned(codec, data)
    if stored[0] == UNCHANGED:
        assert after == data
    else:
        check_error(data, after, layout, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**101, 2.0**-101, 2.0**-15])
def test_what_cannot_be_coded_is_unchanged(dtype: str, value: float) -> None:
    """A head with nothing but such a number, among others."""
    numbers = random_numbers(2, 2 * int(np.prod(LAYOUT.shape)), "normal")
    heads = ordered(numbers, LAYOUT)
    heads[1, 1, 2, 1] = 0.0
    heads[1, 1, 2, 1, 3, 3] = value
    with np.errstate(over="ignore"):
        data = bytes_of(numbers, dtype)
    codec = codec_for(LAYOUT, dtype)
    kept = numbers_of(data, dtype)[np.flatnonzero(numbers == value)] if np.isfinite(value) else [value]
    is_coded = bool(kept[0] == 0 or (dtype != "float16" and value == 2.0**-15))
    assert codec.encode(data)[0] == (CODED if is_coded else UNCHANGED)
    if not is_coded:
        assert returned(codec, data) == data
        assert len(codec.encode(data)) == 8 + len(data)


@pytest.mark.parametrize("axes", ORDERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_order_of_axes_changes_nothing(axes: str, dtype: str) -> None:
    """The same numbers in another order come back as the same numbers."""
    other = replace(LAYOUT, axes=axes)
    first = random_numbers(3, 2 * int(np.prod(LAYOUT.shape)), "outliers")
    second = np.empty_like(first)
    ordered(second, other)[:] = ordered(first, LAYOUT)
    results = [
        ordered(numbers_of(returned(codec_for(layout, dtype), bytes_of(numbers, dtype)), dtype), layout)
        for layout, numbers in ((LAYOUT, first), (other, second))
    ]
    near = np.isclose(results[0], results[1], rtol=1e-2 if dtype == "bfloat16" else 1e-5, atol=0)
    assert near.mean() > 0.999, "sums in another order may round some to another step"


def test_blocks_are_coded_independently() -> None:
    """Decoded numbers do not depend on what else is in the buffer, and a part of it is a whole buffer."""
    data = bytes_of(random_numbers(4, 3 * int(np.prod(LAYOUT.shape)), "normal"), "bfloat16")
    codec, size = codec_for(LAYOUT, "bfloat16"), len(data) // 3
    together = returned(codec, data)
    alone = [returned(codec, data[at : at + size]) for at in range(0, len(data), size)]
    assert bytes(together) == b"".join(map(bytes, alone))


def test_parts_agree_with_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes_of(random_numbers(5, 4 * int(np.prod(LAYOUT.shape)), "outliers"), "bfloat16")
    codec = codec_for(LAYOUT, "bfloat16")
    expected = bytes(codec.encode(data)), returned(codec, data)
    for part in (1, 1 << 14, 1 << 30):
        monkeypatch.setattr(delta, "PART", part)
        assert (bytes(codec.encode(data)), returned(codec, data)) == expected


def slow_decode(stored: bytes, num_blocks: int, layout: BlockLayout) -> npt.NDArray[Any]:
    """Number by number, from the form that the class describes, in float32."""
    num_layers, size = layout.num_layers, layout.block_size
    group = GROUP if size % GROUP == 0 else size
    thirds = [3 * layer // num_layers for layer in range(num_layers)]
    num_frames = 1 + len(set(thirds))
    num_wide, *sizes = struct.unpack_from(f"<{1 + num_frames}Q", stored, 8)
    at = 8 * (2 + num_frames)
    num_steps = num_layers * 2 * num_blocks * layout.num_heads
    steps = list(struct.unpack_from(f"<{num_steps}f", stored, at))
    wide = list(struct.unpack_from(f"<{num_wide}i", stored, at + 4 * num_steps))
    at += 4 * (num_steps + num_wide)
    frames = []
    for num_bytes in sizes:
        frames.append(zstandard.ZstdDecompressor().decompress(stored[at : at + num_bytes]))
        at += num_bytes
    half = len(frames[0]) // 2
    folded = [frames[0][i] + 256 * frames[0][half + i] for i in range(half)]
    anchors = [number // 2 if number % 2 == 0 else -(number + 1) // 2 for number in folded]
    deltas = list(np.frombuffer(b"".join(frames[1:]), np.int8).tolist())
    assert at == len(stored)
    found = np.empty((num_blocks, 2, num_layers, layout.num_heads, size, layout.head_dim), np.float32)
    heads, dims = layout.num_heads, layout.head_dim
    places = product(range(num_layers), range(2), range(num_blocks), range(size), range(heads), range(dims))
    for stored_delta, (layer, kv, block, token, head, dim) in zip(deltas, places, strict=True):
        base = (layer * 2 + kv) * num_blocks + block
        anchor = anchors[((base * (size // group) + token // group) * heads + head) * dims + dim]
        difference = wide.pop(0) if stored_delta == WIDE else stored_delta
        step = np.float32(steps[base * heads + head])
        found[block, kv, layer, head, token, dim] = np.float32(anchor + difference) * step
    assert not wide
    return found


@pytest.mark.parametrize("kind", ["normal", "outliers", "constant"])
@pytest.mark.parametrize("size", [6, 32])
def test_a_slow_twin_reads_the_same_numbers(kind: str, size: int) -> None:
    layout = BlockLayout(HEAD_FIRST, 4, 2, 4, size, "float32")
    data = bytes_of(random_numbers(6, 2 * int(np.prod(layout.shape)), kind), "float32")
    codec = codec_for(layout)
    found = slow_decode(bytes(codec.encode(data)), 2, layout)
    assert (ordered(numbers_of(returned(codec, data), "float32"), layout) == found).all()


def test_wide_differences_occur_and_come_back() -> None:
    numbers = random_numbers(7, int(np.prod(LAYOUT.shape)), "normal")
    numbers[::997] *= 1e4
    data = bytes_of(numbers, "float32")
    codec = codec_for(LAYOUT)
    assert struct.unpack_from("<Q", codec.encode(data), 8)[0] > 3
    check_error(data, returned(codec, data), LAYOUT, "float32")


def test_similar_tokens_take_less_and_a_normal_block_a_quarter() -> None:
    layout = BlockLayout(TOKEN_FIRST, 12, 4, 64, 16, "bfloat16")
    rng, codec = np.random.default_rng(8), codec_for(layout, "bfloat16")
    plain = rng.standard_normal(layout.shape)
    assert len(codec.encode(bytes_of(plain.ravel(), "bfloat16"))) < plain.size * 2 / 3.5
    offsets = 20 * rng.standard_normal((2, 12, 1, 4, 64))
    similar = bytes_of((plain + offsets).ravel(), "float32")
    exact = codec_for(layout, "float32")
    assert len(exact.encode(similar)) < 1.2 * len(exact.encode(bytes_of(plain.ravel(), "float32")))


def test_sizes_are_linear() -> None:
    codec, size = codec_for(LAYOUT, "bfloat16"), LAYOUT.bytes_per_block // 2
    data = bytes_of(random_numbers(9, 64 * size // 2, "outliers"), "bfloat16")
    per_block = [len(codec.encode(data[: count * size])) / count for count in (8, 64)]
    assert per_block[1] < 1.05 * per_block[0]


def test_without_a_layout_or_with_another_dtype() -> None:
    with pytest.raises(ConfigError, match=r"latent attention.*use zstd or int8"):
        DeltaCodec("bfloat16")
    with pytest.raises(ConfigError, match="for KV of bfloat16, and its layout has float32"):
        DeltaCodec("bfloat16", LAYOUT)


# -- damaged bytes

SMALL = BlockLayout(TOKEN_FIRST, 3, 1, 16, 16, "float16")


@cache
def small_block() -> tuple[bytes, bytes]:
    numbers = random_numbers(10, 3 * int(np.prod(SMALL.shape)), "normal")
    numbers[5], numbers[100] = 3000, -2000  # wide
    data = bytes_of(numbers, "float16")
    return data, bytes(codec_for(SMALL, "float16").encode(data))


@given(
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6),
    cut=st.integers(-20, 20),
    size=st.sampled_from([0, 1, 3071, 3072, 9216, 9217, 18432]),
)
def test_damaged_bytes_are_finite_numbers_or_an_error(
    changes: list[tuple[int, int]], cut: int, size: int
) -> None:
    """Whatever is changed, nothing but `KVDataError` is raised, and no NaN comes out of it."""
    _, stored = small_block()
    damaged = bytearray(stored[:cut] if cut < 0 else stored + bytes(cut))
    for at, value in changes:
        damaged[at % len(damaged)] = value
    target = bytearray(size)
    try:
        codec_for(SMALL, "float16").decode(bytes(damaged), memoryview(target))
    except KVDataError:
        return
    if damaged[0] == CODED:
        whole = len(target) // 3072 * 3072
        assert np.isfinite(numbers_of(target[:whole], "float16")).all()


@given(sizes=st.lists(st.integers(0, 2**64 - 1), min_size=5, max_size=5))
def test_sizes_that_lie_are_refused_before_memory_is_taken(sizes: list[int]) -> None:
    data, stored = small_block()
    damaged = stored[:8] + struct.pack("<5Q", *sizes) + stored[48:]
    codec = codec_for(SMALL, "float16")
    if damaged == stored:
        return
    with pytest.raises(KVDataError, match="delta"):
        codec.decode(damaged, memoryview(bytearray(len(data))))


def rebuilt(stored: bytes, **changed: Any) -> bytes:
    """A small block with other steps, wide differences or frames, and sizes that fit."""
    num_wide, *sizes = struct.unpack_from("<5Q", stored, 8)
    num_steps = 3 * 2 * 3
    at = 48
    parts = {"steps": stored[at : at + 4 * num_steps]}
    at += 4 * num_steps
    parts["wide"] = stored[at : at + 4 * num_wide]
    at += 4 * num_wide
    for number, size in enumerate(sizes):
        parts[f"frame{number}"] = stored[at : at + size]
        at += size
    parts |= changed
    frames = [parts[f"frame{number}"] for number in range(4)]
    counts = [len(parts["wide"]) // 4, *map(len, frames)]
    return stored[:8] + struct.pack("<5Q", *counts) + parts["steps"] + parts["wide"] + b"".join(frames)


def test_fields_out_of_range_are_refused() -> None:
    data, stored = small_block()
    codec, target = codec_for(SMALL, "float16"), memoryview(bytearray(len(data)))
    assert rebuilt(stored) == stored
    compress = zstandard.ZstdCompressor(write_content_size=True).compress
    num_wide = struct.unpack_from("<Q", stored, 8)[0]
    assert num_wide == 2
    for step in (0.0, -1.0, np.nan, np.inf, 2.0**101):
        with pytest.raises(KVDataError, match="out of range"):
            codec.decode(rebuilt(stored, steps=struct.pack("<18f", *[step] * 18)), target)
    for wide in (1 << 16, -(1 << 31)):
        with pytest.raises(KVDataError, match="out of range"):
            codec.decode(rebuilt(stored, wide=struct.pack("<2i", wide, 200)), target)
    for changed in ({"wide": b""}, {"wide": bytes(12)}, {"frame1": compress(bytes([128]) * 1536)}):
        with pytest.raises(KVDataError, match="do not add up"):
            codec.decode(rebuilt(stored, **changed), target)
    for frame in (
        compress(bytes(1 << 24)), compress(bytes(1535)), compress(bytes(1536)) + b"x", b"", b"no frame",
    ):  # fmt: skip
        with pytest.raises(KVDataError, match="delta"):
            codec.decode(rebuilt(stored, frame1=frame), target)
    with pytest.raises(KVDataError, match="no encoded block of this size"):
        codec.decode(stored, memoryview(bytearray(100)))
    with pytest.raises(KVDataError, match="no encoded block"):
        codec.decode(bytes([3]) + stored[1:], target)
