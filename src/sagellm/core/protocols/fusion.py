"""Contract of fused kernels: one pass over memory instead of several, the same result within a stated
tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sagellm.core.protocols.quantization import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a kernel may be from its plain twin, for one dtype."""

    dtype: str
    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class KernelSupport:
    """Whether a kernel runs on given inputs; where it does not, `reason` names the first thing in the way."""

    usable: bool
    reason: str = ""


class FusedKernel(Protocol):
    """One fused operation with its slow twin. Kernels are built at first use, never at import."""

    name: str
    tolerances: tuple[Tolerance, ...]

    def supports(self, *inputs: Any) -> KernelSupport:
        """Looks at device, dtype, shape and strides only, and is cheap enough to be asked on every call."""
        ...

    def apply(self, *inputs: Any) -> Any:
        """The result within `tolerances` of `reference`; inputs are not changed.

        Where `supports` says no it raises `SageError` with that reason and computes nothing: whoever calls
        decides to use the twin, so that a slow path is never taken unseen.
        """
        ...

    def reference(self, *inputs: Any) -> Any:
        """The same operation from plain operators; runs wherever the engine runs."""
        ...


class QuantizedKernel(FusedKernel, Protocol):
    """`x W^T + bias` for a packed W: inputs are x [T, in], what `pack` gave, and maybe a bias."""

    def pack(self, matrix: QuantizedMatrix) -> Any:
        """The matrix as the kernel reads it; raises `KernelError` for one that it has no form for."""
        ...


@dataclass(frozen=True, slots=True)
class KernelSet:
    """What a machine has kernels for; where there is none, plain operators do it.

    `linear`: `x W^T + bias` of x [T, in], weight [out, in] and maybe a bias. `attention`: of query, pools of
    keys and values, spans, tables and maybe a window. `quantized`: as `QuantizedKernel` says.
    """

    linear: Sequence[FusedKernel] = ()
    attention: FusedKernel | None = None
    quantized: QuantizedKernel | None = None
