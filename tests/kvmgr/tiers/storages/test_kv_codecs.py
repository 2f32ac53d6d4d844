"""Codecs of KV tiers: round trips, stated errors, damaged bytes."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sagellm.core.errors import ConfigError, KVDataError, MissingExtraError, UnknownNameError
from sagellm.core.protocols.kv_tiers import KVCodec
from sagellm.core.protocols.kv_transfer import BlockLayout
from sagellm.kvmgr.kv_pool.tiers.codecs import BYTES_OF_DTYPE, CODECS

DTYPES = sorted(BYTES_OF_DTYPE)
NAMES = CODECS.names()
LOSSLESS = ["raw", "zstd"]
SIZES = (0, 1, 7, 8, 126, 128, 129, 512, 4096 + 6, 2 * 65536, 4 * 65536 + 130)


def codec_of(name: str, dtype: str) -> KVCodec:
    """Made for blocks of 48 numbers, where a codec cares."""
    layout = BlockLayout("kv.layer.token.head.dim", 3, 1, 2, 4, dtype)
    return CODECS.create(name, dtype=dtype, layout=layout)


def numbers_of(data: bytes | bytearray, dtype: str) -> npt.NDArray[Any]:
    """The whole numbers of a block, exactly, as float64."""
    data = bytes(data[: len(data) - len(data) % BYTES_OF_DTYPE[dtype]])
    if dtype == "bfloat16":
        numbers: npt.NDArray[Any] = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        numbers = np.frombuffer(data, dtype)
    with np.errstate(invalid="ignore"):
        return numbers.astype(np.float64)


def bytes_of(numbers: npt.NDArray[Any], dtype: str) -> bytes:
    """Numbers in a dtype; those of bfloat16 are cut, not rounded."""
    if dtype == "bfloat16":
        return (numbers.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return numbers.astype(dtype).tobytes()


def returned(codec: KVCodec, data: bytes) -> bytearray:
    target = bytearray(b"\xaa" * len(data))
    codec.decode(codec.encode(data), memoryview(target))
    return target


def normal(size: int, dtype: str, scale: float = 1.0) -> bytes:
    """A block that looks like KV: normal numbers and a few larger ones."""
    generator = np.random.default_rng(size)
    numbers = generator.standard_normal(size // BYTES_OF_DTYPE[dtype]) * scale
    numbers[::37] *= 20
    return bytes_of(numbers, dtype) + bytes(range(size % BYTES_OF_DTYPE[dtype]))


def test_what_there_is() -> None:
    assert NAMES == ["delta", "int8", "raw", "zstd"]
    assert [name for name in NAMES if codec_of(name, "bfloat16").is_exact] == LOSSLESS
    for name in NAMES:
        codec = codec_of(name, "float16")
        assert codec.name == name
        assert codec.is_exact == (codec.max_error == 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSLESS)
@given(data=st.binary(max_size=600))
def test_lossless_codecs_give_every_bit_back(name: str, dtype: str, data: bytes) -> None:
    assert returned(codec_of(name, dtype), data) == data


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_sizes(name: str, dtype: str, size: int) -> None:
    """Some end in the middle of a number, a group or a part."""
    codec, data = codec_of(name, dtype), normal(size, dtype)
    after = returned(codec, data)
    before, now = numbers_of(data, dtype), numbers_of(after, dtype)
    largest = np.abs(before).max(initial=0.0)
    assert np.abs(before - now).max(initial=0.0) <= codec.max_error * largest
    assert memoryview(codec.encode(data)).nbytes <= 1.2 * size + 700, "linear"
    whole = size - size % BYTES_OF_DTYPE[dtype]
    assert after[whole:] == data[whole:]


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.binary(max_size=600))
def test_int8_keeps_its_error_whatever_the_bits(dtype: str, data: bytes) -> None:
    """Subnormal and largest numbers, too. Blocks with infinities and NaNs come back unchanged."""
    after = returned(codec_of("int8", dtype), data)
    before, now = numbers_of(data, dtype), numbers_of(after, dtype)
    if not np.isfinite(before).all():
        assert after == data
        return
    for first in range(0, len(before), 64):
        group = before[first : first + 64]
        error = np.abs(group - now[first : first + 64]).max()
        assert error <= codec_of("int8", dtype).max_error * np.abs(group).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["delta", "int8"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_block_that_is_not_finite_is_stored_unchanged(name: str, dtype: str, value: float) -> None:
    numbers = np.linspace(-3, 3, 70_000)
    numbers[60_000] = value
    data = bytes_of(numbers, dtype)
    codec = codec_of(name, dtype)
    assert returned(codec, data) == data
    assert len(codec.encode(data)) == len(data) + 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-44, 1e-40, 6e-8, 6e4])
def test_int8_of_zeros_and_extreme_scales(dtype: str, scale: float) -> None:
    data = bytes_of(np.linspace(-1, 1, 1000) * scale, dtype)
    before, now = numbers_of(data, dtype), numbers_of(returned(codec_of("int8", dtype), data), dtype)
    assert np.abs(before - now).max() <= np.abs(before).max() / 127


def test_int8_stores_about_half_and_an_outlier_spoils_its_group_only() -> None:
    numbers = np.full(64 * 100, 0.25)
    numbers[100] = 1000.0
    data = bytes_of(numbers, "bfloat16")
    codec = codec_of("int8", "bfloat16")
    assert len(codec.encode(data)) == 8 + 64 * 100 + 4 * 100
    now = numbers_of(returned(codec, data), "bfloat16")
    assert set(now[64:128]) == {0.0, 1000.0}
    assert set(now[:64]) == set(now[128:]) == {0.25}


def test_int8_rounds_to_the_nearest_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    data = normal(4096, "bfloat16")
    rows = torch.tensor(numbers_of(data, "bfloat16"), dtype=torch.float32).reshape(-1, 64)
    largest = rows.abs().amax(dim=1, keepdim=True)
    expected = ((rows / largest * 127).round() / 127 * largest).to(torch.bfloat16).flatten()
    now = torch.frombuffer(returned(codec_of("int8", "bfloat16"), data), dtype=torch.bfloat16)
    assert torch.equal(now, expected)


def test_zstd_makes_kv_smaller() -> None:
    for dtype, most in {"bfloat16": 0.8, "float16": 0.95, "float32": 0.92}.items():
        data = normal(1 << 18, dtype)
        assert len(codec_of("zstd", dtype).encode(data)) < most * len(data)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(max_size=400), size=st.integers(0, 300))
def test_any_bytes_are_a_block_or_an_error(name: str, data: bytes, size: int) -> None:
    with suppress(KVDataError):
        codec_of(name, "float16").decode(data, memoryview(bytearray(size)))


@pytest.mark.parametrize("name", NAMES)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.integers(0, 40))
@example(at=0, bit=0, cut=0)
def test_a_flipped_bit_or_a_cut_is_a_block_or_an_error(name: str, at: int, bit: int, cut: int) -> None:
    codec = codec_of(name, "float16")
    stored = bytearray(codec.encode(normal(512, "float16")))
    stored[at % len(stored)] ^= 1 << bit
    target = memoryview(bytearray(512))
    try:
        codec.decode(bytes(stored[: len(stored) - cut]), target)
    except KVDataError:
        return
    assert cut == 0


def test_a_frame_of_another_size_is_refused_before_memory_is_taken() -> None:
    zstandard = pytest.importorskip("zstandard")
    codec = codec_of("zstd", "float16")
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    target = memoryview(bytearray(4096))
    with pytest.raises(KVDataError, match="268435456 bytes where a block of this size has 4096"):
        codec.decode(bomb, target)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4096))
    with pytest.raises(KVDataError, match="zstd"):
        codec.decode(unsized, target)
    with pytest.raises(KVDataError, match="zstd"):
        codec.decode(bytes(codec.encode(bytes(4096))) + b"more", target)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [("float16", np.inf), ("float16", 1e6), ("bfloat16", 3.4e38), ("float32", np.nan), ("float64", -1.0)],
)
def test_a_scale_that_no_block_has_is_refused(dtype: str, scale: float) -> None:
    codec = codec_of("int8", dtype)
    stored = bytearray(codec.encode(normal(1024, dtype)))
    places = np.frombuffer(stored, "f8" if dtype == "float64" else "f4", 1, 8)
    places[0] = scale
    with pytest.raises(KVDataError, match="out of range"):
        codec.decode(stored, memoryview(bytearray(1024)))


@pytest.mark.parametrize("name", NAMES)
def test_threads_share_a_codec(name: str) -> None:
    codec, right = codec_of(name, "float32"), []
    blocks = [normal(40_000, "float32", scale) for scale in (1.0, 2.0, 3.0, 4.0)]
    expected = {data: returned(codec, data) for data in blocks}

    def work(data: bytes) -> None:
        right.append(all(returned(codec, data) == expected[data] for _ in range(20)))

    threads = [threading.Thread(target=work, args=(data,)) for data in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 4


def test_errors_say_what_would_have_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'bfloat16'"):
        CODECS.create("zstd", dtype="bfloat")
    with pytest.raises(UnknownNameError, match="Did you mean 'zstd'"):
        codec_of("zst", "bfloat16")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for name in ("zstd", "delta"):
        with pytest.raises(MissingExtraError, match=r"zstandard, which is not installed: .*\[tiers\]"):
            codec_of(name, "bfloat16")
