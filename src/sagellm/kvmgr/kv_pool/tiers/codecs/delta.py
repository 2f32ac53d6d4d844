"""`DeltaCodec`: tokens as differences to the mean of their group, quantized coarsely. Lossy.

After CacheGen (Y. Liu et al., SIGCOMM 2024, arXiv 2310.07240, section 5): tokens of a group have similar keys
and values, so each is stored as its difference to an anchor; later layers bear larger steps; and the integers
are entropy-coded. It differs in three points. The anchor is the mean of the group and not its first token,
since differences to it are smaller. Anchors and differences are multiples of one step, so an anchor adds no
error. Huffman codes of Zstandard, made for each block anew, take the place of arithmetic coding with
statistics of the model. Figures: docs/log/2026-11-26-delta-codec.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np

from sagellm.core.errors import ConfigError, KVDataError
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.protocols.kv_transfer import BlockLayout
from sagellm.kvmgr.kv_pool.tiers.codecs import check_size
from sagellm.kvmgr.kv_pool.tiers.codecs._frames import ZstdFrames
from sagellm.kvmgr.kv_pool.tiers.codecs._numbers import Numbers, StoredNumbers

GROUP = 16
"""Tokens that share an anchor; a block whose size is no multiple of it has one group."""
STEPS = (0.25, 0.5, 0.75)
"""Of the first, second and last third of the layers: the step, in standard deviations of the differences."""
LARGEST_STEP, MOST_STEPS = 0.25, 1 << 14
"""A step is at most that share of the head's largest number, which has at most so many steps."""
PART = 1 << 16
"""Numbers that are computed at a time, so that intermediate arrays stay in the processor's cache."""
MOST = 2.0**100
"""Of an absolute number: no sum, square or product of steps overflows a float32."""
LEAST = {"float16": 2.0**-14}
"""Of a head's largest number, by dtype: rounding to subnormal numbers would exceed the error."""
FRAMES = {"min_match": 7, "hash_log": 10}
"""Almost only Huffman codes: level 1 finds matches by chance that take more bits."""
HEAD_BYTES = 8
CODED, UNCHANGED = 1, 2
WIDE = -128
"""Stands for a difference beyond -127..127, which is stored apart."""
_STD_OF_MEAN = (np.pi / 2) ** 0.5
"""Standard deviation of a normal distribution over its mean absolute deviation, which squares nothing."""
_GROUPS, _TOKENS, _DIMS = 3, 4, 6
"""Axes of arrays here: layer, kv, block, group, token, head, dim."""


class DeltaCodec:
    """Implements `KVCodec` for whole blocks of a known layout.

    Keys and values of a head in a layer and block have one step. An error is at most half a step, plus the
    rounding to the dtype: at most 1/8 of the largest of these numbers, and less than a standard deviation
    times 0.375 if they are normally distributed. Blocks with a NaN, an infinity, a number above `MOST` or a
    head below `LEAST`, and bytes behind the last whole block, are stored unchanged.

    Stored are a byte CODED or UNCHANGED and seven zero bytes; then, if coded: the number of wide differences
    and the bytes of each frame, the steps, the wide differences, a frame of anchors, and for each third of
    the layers a frame of differences. A buffer may hold several blocks; nothing refers to another buffer.
    """

    name = "delta"
    is_exact = False
    max_error = LARGEST_STEP / 2 + 1 / 256

    def __init__(self, dtype: str, layout: BlockLayout | None = None) -> None:
        """Raises `ConfigError` without a layout."""
        self._numbers = StoredNumbers(dtype)
        if layout is None:
            raise ConfigError(
                "the codec delta must know where layers and heads lie in a block, which these blocks do not "
                "say (several KV groups, latent attention, layers of different shapes, recurrent states, or "
                "another engine's): use zstd or int8"
            )
        if layout.dtype != dtype:
            raise ConfigError(f"the codec delta is for KV of {dtype}, and its layout has {layout.dtype}")
        self._block_bytes, self._least = layout.bytes_per_block, LEAST.get(dtype, 1 / MOST)
        num_layers, size = layout.num_layers, layout.block_size
        group = GROUP if size % GROUP == 0 else size
        sizes = {
            "layer": num_layers, "kv": 2, "group": size // group, "token": group, "head": layout.num_heads,
            "dim": layout.head_dim,
        }  # fmt: skip
        axes = layout.axes.replace("token", "group.token").split(".")
        self._shape, self._sizes = [sizes[axis] for axis in axes], list(sizes.values())
        layer, kv, *inner = (1 + axes.index(axis) for axis in sizes)
        self._order = (layer, kv, 0, *inner)
        thirds = [3 * number // num_layers for number in range(num_layers)]
        self._shares = np.array([STEPS[third] for third in thirds], self._numbers.computed)
        begins = [number for number in range(num_layers) if thirds[number] not in thirds[:number]]
        self._spans = list(pairwise([*begins, num_layers]))
        self._head = struct.Struct(f"<B7x{2 + len(self._spans)}Q")
        self._frames = ZstdFrames(self.name, **FRAMES)

    def encode(self, data: Buffer) -> Buffer:
        source = memoryview(data).cast("B")
        num_blocks = len(source) // self._block_bytes
        whole = num_blocks * self._block_bytes
        with np.errstate(invalid="ignore", over="ignore"):  # of numbers that make a block stay unchanged
            coded = self._coded(self._ordered(source[:whole])) if num_blocks else None
        if coded is None:
            return bytes((UNCHANGED,)).ljust(HEAD_BYTES, b"\0") + source
        return b"".join((*coded, source[whole:]))

    def decode(self, data: Buffer, target: memoryview) -> None:
        source, target = memoryview(data).cast("B"), target.cast("B")
        if len(source) < HEAD_BYTES or source[0] not in (CODED, UNCHANGED) or any(source[1:HEAD_BYTES]):
            raise KVDataError("delta: no encoded block")
        if source[0] == UNCHANGED:
            check_size(self.name, len(source), HEAD_BYTES + len(target))
            target[:] = source[HEAD_BYTES:]
            return
        num_blocks = len(target) // self._block_bytes
        whole = num_blocks * self._block_bytes
        if len(source) < self._head.size or not num_blocks:
            raise KVDataError("delta: no encoded block of this size")
        steps, anchors, deltas = self._empty(num_blocks)
        _, num_wide, *frame_sizes = self._head.unpack_from(source)
        *places, end = accumulate((self._head.size, steps.nbytes, 4 * num_wide, *frame_sizes))
        check_size(self.name, len(source), end + len(target) - whole)
        of_steps, of_wide, of_anchors, *of_deltas = (
            source[start:stop] for start, stop in pairwise((*places, end))
        )
        steps = np.frombuffer(of_steps, steps.dtype).reshape(steps.shape)
        wide = np.frombuffer(of_wide, np.int32)
        if not (np.all((steps > 0) & (steps <= MOST)) and np.all((wide > -(1 << 16)) & (wide < 1 << 16))):
            raise KVDataError("delta: a step or a difference out of range")
        planes = self._frames.decompress(of_anchors, anchors.nbytes)
        low, high = np.frombuffer(planes, np.uint8).reshape(2, -1)
        folded = high.astype(np.uint16) << 8 | low
        anchors.reshape(-1)[:] = (folded >> 1 ^ -(folded & 1)).view(np.int16)
        for (first, last), frame in zip(self._spans, of_deltas, strict=True):
            found = self._frames.decompress(frame, deltas[first:last].nbytes)
            deltas[first:last].reshape(-1)[:] = np.frombuffer(found, np.int8)
        if np.count_nonzero(deltas == WIDE) != num_wide:
            raise KVDataError("delta: differences do not add up")
        self._restore(deltas, anchors, steps, wide, self._ordered(target[:whole]))
        target[whole:] = source[end:]

    def _ordered(self, blocks: memoryview) -> Numbers:
        """The stored numbers of whole blocks.

        [layer, kv, block, group, token, head, dim]; what is written to it enters `blocks`.
        """
        return self._numbers.view(blocks).reshape(-1, *self._shape).transpose(self._order)

    def _empty(self, num_blocks: int) -> tuple[Numbers, Numbers, Numbers]:
        """Arrays for steps, anchors and differences, which broadcast."""
        layers, kv, groups, tokens, heads, dims = self._sizes
        begin = layers, kv, num_blocks
        return (
            np.empty((*begin, 1, 1, heads, 1), self._numbers.computed),
            np.empty((*begin, groups, 1, heads, dims), np.int16),
            np.empty((*begin, groups, tokens, heads, dims), np.int8),
        )

    def _parts(self, numbers: Numbers) -> Iterator[slice]:
        """Layers that are computed at a time."""
        per_part = max(1, PART * len(numbers) // numbers.size)
        return (slice(first, first + per_part) for first in range(0, len(numbers), per_part))

    def _coded(self, blocks: Numbers) -> list[Buffer] | None:
        """All but the bytes behind the blocks; None for blocks that stay unchanged."""
        steps, anchors, deltas = self._empty(blocks.shape[2])
        wide: list[Numbers] = []
        for part in self._parts(blocks):
            numbers = self._numbers.load(blocks[part])
            means = numbers.mean(axis=_TOKENS, keepdims=True)
            found = self._steps_of(numbers, means, self._shares[part])
            if found is None:
                return None
            steps[part] = found
            wide.append(_quantize(numbers, means, found, anchors[part], deltas[part]))
        folded = anchors << 1 ^ anchors >> 15  # 0, -1, 1, -2, ...: so that most upper bytes are 0
        planes = np.ascontiguousarray(folded.view(np.uint8).reshape(-1, 2).T)
        frames = [self._frames.compress(planes.data)]
        frames += [self._frames.compress(deltas[first:last].data) for first, last in self._spans]
        differences = np.concatenate(wide)
        head = self._head.pack(CODED, len(differences), *map(len, frames))
        return [head, steps.tobytes(), differences.tobytes(), *frames]

    def _steps_of(self, numbers: Numbers, means: Numbers, shares: Numbers) -> Numbers | None:
        """[layer, kv, block, 1, 1, head, 1]; None where a head cannot be coded."""
        highest = numbers.max(axis=_TOKENS, keepdims=True)
        lowest = numbers.min(axis=_TOKENS, keepdims=True)
        largest = np.maximum(highest, -lowest).max(axis=(_GROUPS, _DIMS), keepdims=True)
        if not np.all((largest == 0) | ((largest >= self._least) & (largest <= MOST))):  # nor for NaN
            return None
        distance = np.abs(numbers - means).mean(axis=_TOKENS, keepdims=True)
        deviation = distance.mean(axis=(_GROUPS, _DIMS), keepdims=True) * _STD_OF_MEAN
        steps: Numbers = deviation * shares.reshape(-1, 1, 1, 1, 1, 1, 1)
        np.clip(steps, largest / MOST_STEPS, largest * LARGEST_STEP, out=steps)
        steps[largest == 0] = 1
        return steps

    def _restore(
        self, deltas: Numbers, anchors: Numbers, steps: Numbers, wide: Numbers, blocks: Numbers
    ) -> None:
        for part in self._parts(deltas):
            numbers = deltas[part].astype(self._numbers.computed)
            if len(wide):
                is_wide = deltas[part] == WIDE
                num_wide = np.count_nonzero(is_wide)
                numbers[is_wide], wide = wide[:num_wide], wide[num_wide:]
            numbers += anchors[part].astype(self._numbers.computed)
            numbers *= steps[part]
            if self._numbers.largest < MOST:  # the multiple of a step next to it may be an infinity
                np.clip(numbers, -self._numbers.largest, self._numbers.largest, out=numbers)
            self._numbers.store(numbers, blocks[part])


def _quantize(numbers: Numbers, means: Numbers, steps: Numbers, anchors: Numbers, deltas: Numbers) -> Numbers:
    """Fill anchors and differences; returns the wide ones in their order."""
    per_step = 1 / steps
    codes = numbers * per_step
    np.rint(codes, out=codes)
    centers = np.rint(means * per_step)
    np.copyto(anchors, centers, casting="unsafe")
    codes -= centers
    wide = np.empty(0, np.int32)
    if codes.max() > 127 or codes.min() < -127:
        is_wide = np.abs(codes) > 127
        wide = codes[is_wide].astype(np.int32)
        codes[is_wide] = WIDE
    np.copyto(deltas, codes, casting="unsafe")
    return wide


PLUGIN = DeltaCodec
