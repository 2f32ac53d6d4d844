"""`CostModel` prices engine steps on a simulated device: a roofline with measured coefficients.

Williams et al. 2009 (roofline); for language models Pope et al. 2023 and Agrawal et al. 2024 (Vidur, which
shows that linear layers, attention over cached KV and attention of prompt chunks are enough). The parts of a
step and their formulas: docs/simulator.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from sagellm.core.errors import ConfigError
from sagellm.engines.simulator.devices import DeviceSpec
from sagellm.engines.simulator.models import ModelShape

Floats: TypeAlias = npt.NDArray[np.float64]
Number = TypeVar("Number", float, Floats)
LAYERS = 32


class StepShape(NamedTuple):
    """What a step computes and moves.

    `decode_context`: tokens that each decoding row attends to, its own included, summed over the rows.
    `prefills`: (start, num_tokens) of each prompt chunk. `bytes_copied`: from block to block of the device.
    """

    num_decodes: int = 0
    decode_context: int = 0
    prefills: tuple[tuple[int, int], ...] = ()
    bytes_copied: int = 0
    bytes_transferred: int = 0


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Shares of the peaks that are reached, and seconds that no peak explains.

    `overlap`: the exponent that joins reading and multiplying in linear layers; 1 is one after the other,
    infinity the perfect overlap of a roofline. `link_latency`: a multiple of the device's, per collective.
    `chunk_step_s`: for a model of `LAYERS` layers; it grows with them.
    """

    weight_bandwidth: float = 0.85
    kv_bandwidth: float = 0.85
    compute: float = 0.75
    chunk_attention: float = 0.45
    overlap: float = 2.3
    step_s: float = 2e-3
    chunk_step_s: float = 4e-3
    row_s: float = 5e-6
    expert_bandwidth: float = 0.7
    expert_compute: float = 0.25
    expert_row_s: float = 1.5e-5
    link_bandwidth: float = 0.6
    link_latency: float = 1.0

    def __post_init__(self) -> None:
        values: dict[str, Any] = self.as_dict()
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < np.inf:
                raise ConfigError(f"coefficient {name}: a number that is not negative, not {value!r}")
        dense = (self.weight_bandwidth, self.kv_bandwidth, self.compute, self.chunk_attention)
        if min(*dense, self.expert_bandwidth, self.expert_compute, self.link_bandwidth) <= 0:
            raise ConfigError("coefficients: shares of a peak must be positive")
        if self.overlap < 1:
            raise ConfigError(f"coefficient overlap: at least 1 (no overlap at all), not {self.overlap}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Coefficients:
        """From a mapping by name; raises `ConfigError` for an unknown name."""
        known = [coefficient.name for coefficient in fields(cls)]
        unknown = sorted(values.keys() - set(known))
        if unknown:
            raise ConfigError(f"no coefficient {', '.join(unknown)}; they are {', '.join(known)}")
        return cls(**values)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def overlapped_s(exponent: float, read_s: Number | float, multiply_s: Number) -> Number:
    """Seconds of reading and multiplying together.

    By exponent: 1 is one after the other, infinity perfect overlap.
    """
    joined: Number = (read_s**exponent + multiply_s**exponent) ** (1 / exponent)
    return joined


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices steps in seconds. Pure: the same shape always has the same price.

    `tensor_parallel` devices share each layer. `data_parallel` groups of such devices have requests of their
    own and share the experts; they step together, so a step takes as long as the group with most work.
    """

    device: DeviceSpec
    model: ModelShape
    coefficients: Coefficients = field(default_factory=Coefficients)
    tensor_parallel: int = 1
    data_parallel: int = 1
    _decode_s: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.model.num_heads % self.tensor_parallel:
            raise ConfigError(
                f"tensor_parallel {self.tensor_parallel} does not divide the {self.model.num_heads} heads of "
                f"{self.model.name}"
            )
        if self.data_parallel < 1 or (self.data_parallel > 1 and not self.model.num_experts):
            raise ConfigError(
                f"data_parallel {self.data_parallel}: {self.model.name} has no experts to share; "
                "simulate several instances instead"
            )
        self.device.peak_flops(self.model.dtype)

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.data_parallel

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step."""
        num_decodes = shape.num_decodes
        if shape.prefills:
            fixed = self.compute_s(*self.columns(StepShape(num_decodes, 0, shape.prefills)))
        else:
            fixed = self._rows_s(num_decodes)
        seconds = fixed + self._kv_s() / self.data_parallel * shape.decode_context
        if shape.bytes_copied or shape.bytes_transferred:
            seconds += self.moves_s(shape)
        return seconds

    def decode_steps_s(self, shape: StepShape, k: int) -> Floats:
        """Seconds of each of `k` decode steps in a row, from `shape` on.

        The context of each row grows by one token per step. The floats are those of `step_s` for single
        steps, bit for bit. Raises `ValueError` for a shape with chunks or moves.
        """
        if shape.prefills or shape.bytes_copied or shape.bytes_transferred:
            raise ValueError("only steps that decode and do nothing else can be priced together")
        contexts = shape.decode_context + shape.num_decodes * np.arange(k, dtype=np.float64)
        steps_s: Floats = self._rows_s(shape.num_decodes) + self._kv_s() / self.data_parallel * contexts
        return steps_s

    def moves_s(self, shape: StepShape) -> float:
        """Seconds of copies within the device, which read and write, and of transfers."""
        return 2 * shape.bytes_copied / self.device.bandwidth + shape.bytes_transferred / self.device.network

    def columns(self, shape: StepShape) -> tuple[float, float, float, float, float, float, float]:
        """The arguments of `compute_s`: the work of the data-parallel group with most work.

        Decoding rows are spread evenly over the groups; whole chunks go to the group with least tokens.
        """
        groups = [[0, 0, 0, 0] for _ in range(self.data_parallel)]
        for start, number in sorted(shape.prefills, key=lambda chunk: -chunk[1]):
            least = min(groups)
            least[0] += number
            least[1] += 1
            least[2] += start + number
            least[3] += number * start + number * (number + 1) // 2
        tokens, chunks, keys, pairs = map(float, max(groups))
        decodes, context = shape.num_decodes / self.data_parallel, shape.decode_context / self.data_parallel
        all_tokens = shape.num_decodes + sum(group[0] for group in groups)
        return decodes, context, tokens, chunks, keys, pairs, float(all_tokens)

    def compute_s(
        self,
        num_decodes: Number,
        decode_context: Number,
        chunk_tokens: Number,
        num_chunks: Number,
        chunk_keys: Number,
        chunk_pairs: Number,
        all_tokens: Number,
    ) -> Number:
        """The price without moves, of one step or, with arrays, of many.

        `chunk_keys`: tokens whose KV the chunks read. `chunk_pairs`: (query, key) pairs that they multiply.
        `all_tokens`: tokens of all data-parallel groups, which share the experts.
        """
        rows = num_decodes + num_chunks
        has_chunks = num_chunks / (num_chunks + 1e-300)
        reached = self.coefficients
        row_s = reached.row_s + (reached.expert_row_s if self.model.num_experts else 0.0)
        fixed = self._linear_s(num_decodes + chunk_tokens, rows, all_tokens)
        fixed = fixed + self._chunk_attention_s(chunk_keys, chunk_pairs) + row_s * rows
        layers = self.model.num_layers / LAYERS
        fixed = fixed + reached.step_s + reached.chunk_step_s * layers * has_chunks
        return fixed + self._kv_s() * decode_context

    def _rows_s(self, num_decodes: int) -> float:
        """Seconds of a decode step without attention; cached by batch size."""
        found = self._decode_s.get(num_decodes)
        if found is None:
            found = self._decode_s[num_decodes] = self.compute_s(*self.columns(StepShape(num_decodes)))
        return found

    def _linear_s(self, tokens: Number, rows: Number, all_tokens: Number) -> Number:
        """Seconds of the linear layers, the output projection (on `rows`) and the experts."""
        model, reached, device = self.model, self.coefficients, self.device
        peak = device.peak_flops(model.dtype)
        read = (model.always_read_params + model.head_params) * model.itemsize / self.tensor_parallel
        flops = 2 * (model.always_read_params * tokens + model.head_params * rows) / self.tensor_parallel
        read_s = read / (device.bandwidth * reached.weight_bandwidth)
        total = self._overlapped(read_s, flops / (peak * reached.compute))
        if model.num_experts:
            expert_bytes = model.expert_params * model.itemsize / self.num_devices
            visits = 2 * model.experts_per_token * model.expert_params * all_tokens / self.num_devices
            visit_s = visits / (peak * reached.expert_compute)
            missed = 1.0 - model.experts_per_token / model.num_experts
            met = model.num_experts * (1.0 - missed**all_tokens)  # expected, all being equally likely
            bandwidth = device.bandwidth * reached.expert_bandwidth
            total = total + self._overlapped(expert_bytes * met / bandwidth, visit_s)
        return total + self.collectives_s(tokens, all_tokens)

    def _overlapped(self, read_s: Number | float, multiply_s: Number) -> Number:
        return overlapped_s(self.coefficients.overlap, read_s, multiply_s)

    def collectives_s(self, tokens: Number, all_tokens: Number) -> Number:
        """Seconds of collectives: two per layer.

        With several devices per layer they are ring all-reduces. Where groups share experts, hidden states of
        all tokens are gathered and results are scattered.
        """
        shards, groups, model = self.tensor_parallel, self.data_parallel, self.model
        reached, token_bytes = self.coefficients, model.hidden_size * model.itemsize
        num_bytes = 2 * (shards - 1) / shards * token_bytes * tokens
        num_bytes = num_bytes + (groups - 1) / groups * token_bytes * all_tokens
        latency_s = ((shards > 1) + (groups > 1)) * self.device.collective_s * reached.link_latency
        return 2 * model.num_layers * (latency_s + num_bytes / (self.device.link * reached.link_bandwidth))

    def _chunk_attention_s(self, keys: Number, pairs: Number) -> Number:
        model, reached = self.model, self.coefficients
        flops = 4 * model.num_layers * model.num_heads * model.head_dim * pairs
        peak = self.device.peak_flops(model.dtype) * reached.chunk_attention * self.tensor_parallel
        read_s, multiply_s = self._kv_s() * keys, flops / peak
        return (read_s + multiply_s + abs(read_s - multiply_s)) / 2  # their maximum, for arrays too

    def _kv_s(self) -> float:
        """Seconds to read the KV of one token."""
        shards = min(self.tensor_parallel, self.model.num_kv_heads)
        reached = self.device.bandwidth * self.coefficients.kv_bandwidth
        return self.model.kv_bytes_per_token / shards / reached
