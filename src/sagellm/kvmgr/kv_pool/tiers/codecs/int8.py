"""`Int8Codec`: numbers as 8-bit integers with a scale for each group. Lossy.

The largest absolute number of a group is stored beside its integers in -127..127: absmax quantization, after
T. Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022.
"""

from __future__ import annotations

import numpy as np

from sagellm.core.blocks import cdiv
from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.protocols.kv_transfer import BlockLayout
from sagellm.kvmgr.kv_pool.tiers.codecs import check_size
from sagellm.kvmgr.kv_pool.tiers.codecs._numbers import Numbers, StoredNumbers

GROUP = 64
"""Numbers that share a scale: a row of a head or part of it, so that an outlier costs its neighbours only.
Errors and sizes of other groups: docs/log/2026-11-25-kv-codecs.md."""
PART = GROUP * 1024
"""Numbers that are computed at a time, so that intermediate arrays stay in the processor's cache."""
HEAD_BYTES = 8
SCALED, UNCHANGED = 1, 2


class Int8Codec:
    """Implements `KVCodec`. A block that holds an infinity or a NaN is stored unchanged.

    Stored are one byte that says which of both it is, seven zero bytes, and for a scaled block: the largest
    absolute number of each group, the integers, and the bytes behind the last whole number. Of any dtype,
    an error is at most 1/254 of the largest number of its group, plus the rounding to the dtype.
    """

    name = "int8"
    is_exact = False
    max_error = 1 / 127

    def __init__(self, dtype: str, layout: BlockLayout | None = None) -> None:
        self._numbers = StoredNumbers(dtype)

    def encode(self, data: Buffer) -> Buffer:
        source = memoryview(data).cast("B")
        parts = self._places(len(source))
        stored = bytearray(parts.end)
        scales, codes = self._views(stored, parts)
        stored[0] = SCALED
        numbers = self._numbers.view(source[: parts.num_numbers * self._numbers.width])
        for first in range(0, parts.num_numbers, PART):
            with np.errstate(invalid="ignore"):  # comparing a signalling NaN may warn
                loaded = self._numbers.load(numbers[first : first + PART])
                is_finite = self._encode_part(loaded, scales[first // GROUP :], codes[first:])
            if not is_finite:
                return bytes((UNCHANGED,)).ljust(HEAD_BYTES, b"\0") + source
        stored[parts.tail :] = source[parts.num_numbers * self._numbers.width :]
        return stored

    def decode(self, data: Buffer, target: memoryview) -> None:
        source, target = memoryview(data).cast("B"), target.cast("B")
        if len(source) < HEAD_BYTES or source[0] not in (SCALED, UNCHANGED) or any(source[1:HEAD_BYTES]):
            raise KVDataError("int8: no encoded block")
        if source[0] == UNCHANGED:
            check_size(self.name, len(source), HEAD_BYTES + len(target))
            target[:] = source[HEAD_BYTES:]
            return
        parts = self._places(len(target))
        check_size(self.name, len(source), parts.end)
        scales, codes = self._views(source, parts)
        if not self._are_valid(scales, codes):
            raise KVDataError("int8: a scale or an integer out of range")
        places = self._numbers.view(target[: parts.num_numbers * self._numbers.width])
        for first in range(0, parts.num_numbers, PART):
            last = min(first + PART, parts.num_numbers)
            group_scales = scales[first // GROUP : cdiv(last, GROUP)]
            self._numbers.store(self._decoded_part(codes[first:last], group_scales), places[first:last])
        target[parts.num_numbers * self._numbers.width :] = source[parts.tail :]

    def _places(self, num_bytes: int) -> _Places:
        return _Places(num_bytes, self._numbers.width, self._numbers.computed.itemsize)

    def _views(self, stored: bytearray | memoryview, parts: _Places) -> tuple[Numbers, Numbers]:
        """The scales and the integers of a scaled block."""
        scales = np.frombuffer(stored, self._numbers.computed, parts.num_groups, HEAD_BYTES)
        return scales, np.frombuffer(stored, np.int8, parts.num_numbers, parts.codes)

    def _are_valid(self, scales: Numbers, codes: Numbers) -> bool:
        if not len(codes):
            return True
        in_range = bool(np.all((scales >= 0) & (scales <= self._numbers.largest)))  # false for NaN
        return in_range and bool(codes.min() >= -127)

    def _encode_part(self, numbers: Numbers, scales: Numbers, codes: Numbers) -> bool:
        """Fill scales and integers; false if there is an infinity or a NaN."""
        whole = len(numbers) // GROUP * GROUP
        for start, stop, width in ((0, whole, GROUP), (whole, len(numbers), len(numbers) - whole)):
            if start == stop:
                continue
            rows = numbers[start:stop].reshape(-1, width)
            largest = np.abs(rows).max(axis=1)
            if not np.isfinite(largest).all():
                return False
            scales[start // GROUP :][: len(rows)] = largest
            shares = rows / np.where(largest == 0, 1, largest)[:, None]
            shares *= 127
            codes[start:stop].reshape(-1, width)[:] = np.rint(shares, out=shares)
        return True

    def _decoded_part(self, codes: Numbers, scales: Numbers) -> Numbers:
        shares: Numbers = codes.astype(self._numbers.computed) / self._numbers.computed.type(127)
        whole = len(codes) // GROUP * GROUP
        full = shares[:whole].reshape(-1, GROUP)
        full *= scales[: len(full), None]
        if whole < len(codes):
            shares[whole:] *= scales[-1]
        return shares


class _Places:
    """Where the parts of an encoded block begin, in bytes."""

    def __init__(self, num_bytes: int, width: int, scale_bytes: int) -> None:
        self.num_numbers = num_bytes // width
        self.num_groups = cdiv(self.num_numbers, GROUP)
        self.codes = HEAD_BYTES + self.num_groups * scale_bytes
        self.tail = self.codes + self.num_numbers
        self.end = self.tail + num_bytes % width


PLUGIN = Int8Codec
