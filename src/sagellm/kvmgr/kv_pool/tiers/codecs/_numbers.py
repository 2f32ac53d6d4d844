"""`StoredNumbers`: reads and writes the numbers of a dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.kvmgr.kv_pool.tiers.codecs import bytes_of_dtype

Numbers = npt.NDArray[Any]
_LARGEST = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0}


class StoredNumbers:
    """Numbers of one dtype. NumPy has no bfloat16: it is computed as the upper half of a float32.

    `width`: bytes of a number. `computed`: the dtype of the computation. `largest`: of all finite numbers.
    """

    def __init__(self, dtype: str) -> None:
        self.width = bytes_of_dtype(dtype)
        self.computed: np.dtype[Any] = np.dtype("f8" if dtype == "float64" else "f4")
        self.largest = _LARGEST.get(dtype, float(np.finfo(self.computed.type).max))
        self._is_bfloat16 = dtype == "bfloat16"
        self._stored: np.dtype[Any] = np.dtype("<u2" if self._is_bfloat16 else dtype)

    def view(self, data: Buffer) -> Numbers:
        """The numbers in a buffer, as they are stored."""
        return np.frombuffer(data, self._stored)

    def load(self, stored: Numbers) -> Numbers:
        """The same numbers in the dtype of the computation; perhaps `stored` itself."""
        if self._is_bfloat16:
            return (stored.astype("<u4") << 16).view("<f4")
        with np.errstate(invalid="ignore"):  # a signalling NaN warns where it is converted
            return stored.astype(self.computed, copy=False)

    def store(self, numbers: Numbers, place: Numbers) -> None:
        """Write numbers into `place`, a `view`, rounded to the nearest of the dtype. Spoils `numbers`."""
        if self._is_bfloat16:
            bits = numbers.view("<u4")
            bits += ((bits >> 16) & 1) + np.uint32(0x7FFF)  # half of what falls away; ties go to even
            place[:] = bits >> 16
        else:
            place[:] = numbers
