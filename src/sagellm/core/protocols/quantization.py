"""Contract of quantization: weights, KV or activations in fewer bits, with the price written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from sagellm.core.types import Tokens


class QuantTarget(str, Enum):
    WEIGHTS = "weights"
    KV = "kv"
    ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True)
class QuantizationProfile:
    """What to quantize and how. `group_size` values share one scale; None: one scale per output channel.

    `skip` names layers (by glob) that keep their format. For KV, prefill and decode may differ: `phase_bits`
    overrides `bits` by phase.
    """

    target: QuantTarget
    bits: int
    group_size: int | None = None
    symmetric: bool = True
    skip: tuple[str, ...] = ()
    phase_bits: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(f"bits must be in [1, 16], got {self.bits}")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer: its size before and after and the relative error of its output on the calibration data."""

    name: str
    bytes_before: int
    bytes_after: int
    relative_error: float


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """The model in its new format, with a report per layer that was touched and the names of those that were
    not.
    """

    model: Any
    profile: QuantizationProfile
    layers: tuple[LayerReport, ...]
    skipped: tuple[str, ...] = ()


class Quantizer(Protocol):
    """One method (GPTQ, AWQ, SmoothQuant, round to nearest, ...)."""

    name: str

    def supports(self, profile: QuantizationProfile) -> str | None:
        """None if it can, else why not, with what it could do instead."""
        ...

    def quantize(
        self, model: Any, profile: QuantizationProfile, calibration: Iterable[Tokens] = ()
    ) -> QuantizedModel:
        """The model is left as it was. Seeded: the same input gives the same bytes.

        Raises `SageError` before anything is touched where `supports` says no, where the method needs
        calibration data and got none, or where a layer's width is not a multiple of the group size.
        """
        ...


class KVQuantizer(Protocol):
    """KV blocks in fewer bits, on the way into and out of the pool. Each block carries its own scales."""

    profile: QuantizationProfile

    def bytes_per_block(self, num_values: int) -> int:
        """Packed size of a block of that many values, scales included."""
        ...

    def encode(self, block: Any) -> Any:
        """Values that are not finite raise `ValueError`: a broken block must not become a plausible one."""
        ...

    def decode(self, packed: Any) -> Any: ...
