"""`SeparatedCost` prices decode steps whose attention and FFN are on different devices.

Groups of attention devices, each with requests of its own, share FFN devices. The rows of a step are cut in
micro-batches that take turns, so that one attends while the MLPs of another are computed and a third is on
its way (MegaScale-Infer: Zhu et al. 2025, arXiv:2504.02263; Step-3: Wang et al. 2025, arXiv:2507.19427).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sagellm.core.errors import ConfigError
from sagellm.engines.simulator.cost_model import Coefficients, CostModel, overlapped_s
from sagellm.engines.simulator.devices import DeviceSpec
from sagellm.engines.simulator.models import ModelShape


@dataclass(frozen=True, slots=True)
class SeparatedCost:
    """Prices decode steps in seconds, with the formulas and coefficients of `CostModel`.

    There are `num_groups` of `tensor_parallel` devices `attention`, and `num_ffn` devices `ffn`. Those share
    each dense MLP, and deal the experts. `latency_s`: of a message between the sides. Hidden states travel
    once in each direction over the devices' networks; to several experts' devices, once to each.
    """

    model: ModelShape
    attention: DeviceSpec
    ffn: DeviceSpec
    num_groups: int = 1
    tensor_parallel: int = 1
    num_ffn: int = 1
    num_micro_batches: int = 2
    latency_s: float = 20e-6
    coefficients: Coefficients = field(default_factory=Coefficients)

    def __post_init__(self) -> None:
        counts = (self.num_groups, self.tensor_parallel, self.num_ffn, self.num_micro_batches)
        if min(counts) < 1 or self.latency_s < 0:
            raise ConfigError(
                "separated: at least 1 device of each side and 1 micro-batch, no latency below 0"
            )
        if self.model.num_heads % self.tensor_parallel:
            raise ConfigError(
                f"tensor_parallel {self.tensor_parallel} does not divide the {self.model.num_heads} heads of "
                f"{self.model.name}"
            )

    @property
    def num_devices(self) -> int:
        return self.num_groups * self.tensor_parallel + self.num_ffn

    @property
    def attention_weight_bytes(self) -> float:
        """Of each attention device, with embedding and head."""
        model = self.model
        ends = model.head_params * (1 if model.tied_embeddings else 2)
        return (model.attention_params + ends) * model.itemsize / self.tensor_parallel

    @property
    def ffn_weight_bytes(self) -> float:
        """Of each FFN device."""
        model = self.model
        routed = model.num_experts * model.expert_params
        return (model.shared_ffn_params + routed) * model.itemsize / self.num_ffn

    def step_s(self, num_rows: float, context: float) -> float:
        """Seconds of a step of `num_rows` rows in each group. Each attends to `context` tokens."""
        reached, rows = self.coefficients, num_rows / self.num_micro_batches
        row_s = reached.row_s + (reached.expert_row_s if self.model.num_experts else 0.0)
        layers_s = turns_s(
            self.model.num_layers,
            self.num_micro_batches,
            self._attention_s(rows, context),
            self._ffn_s(rows * self.num_groups),
            self._transfer_s(rows),
        )
        return layers_s + self._head_s(num_rows) + reached.step_s + row_s * num_rows

    def _attention_s(self, rows: float, context: float) -> float:
        """Seconds of one layer for one micro-batch of a group."""
        model, reached, device, shards = self.model, self.coefficients, self.attention, self.tensor_parallel
        linear_s = self._dense_s(device, model.attention_params / model.num_layers, rows, shards)
        kv_bytes = model.kv_bytes_per_token / model.num_layers / min(shards, model.num_kv_heads)
        read_s = rows * context * kv_bytes / (device.bandwidth * reached.kv_bandwidth)
        return linear_s + read_s + self._sum_s(device, rows, shards)

    def _ffn_s(self, rows: float) -> float:
        """Seconds of one layer for one micro-batch of all groups."""
        model, reached, device = self.model, self.coefficients, self.ffn
        linear_s = self._dense_s(device, model.shared_ffn_params / model.num_layers, rows, self.num_ffn)
        if not model.num_experts:
            return linear_s + self._sum_s(device, rows, self.num_ffn)
        expert_params = model.expert_params / model.num_layers / self.num_ffn
        missed: float = (1.0 - model.experts_per_token / model.num_experts) ** rows
        met = model.num_experts * (1.0 - missed)
        read_s = expert_params * model.itemsize * met / (device.bandwidth * reached.expert_bandwidth)
        flops = 2 * model.experts_per_token * expert_params * rows
        multiply_s = flops / (device.peak_flops(model.dtype) * reached.expert_compute)
        return linear_s + overlapped_s(reached.overlap, read_s, multiply_s)

    def _transfer_s(self, rows: float) -> float:
        """Seconds of the hidden states of a group's micro-batch, one way."""
        model = self.model
        copies = min(self.num_ffn, model.experts_per_token) if model.num_experts else 1
        num_bytes = rows * copies * model.hidden_size * model.itemsize
        by_attention = num_bytes / (self.tensor_parallel * self.attention.network)
        by_ffn = num_bytes * self.num_groups / (self.num_ffn * self.ffn.network)
        return self.latency_s + max(by_attention, by_ffn) / self.coefficients.link_bandwidth

    def _head_s(self, rows: float) -> float:
        return self._dense_s(self.attention, self.model.head_params, rows, self.tensor_parallel)

    def _dense_s(self, device: DeviceSpec, params: float, rows: float, shards: int) -> float:
        reached, itemsize = self.coefficients, self.model.itemsize
        read_s = params * itemsize / shards / (device.bandwidth * reached.weight_bandwidth)
        multiply_s = 2 * params * rows / shards / (device.peak_flops(self.model.dtype) * reached.compute)
        return overlapped_s(reached.overlap, read_s, multiply_s)

    def _sum_s(self, device: DeviceSpec, rows: float, shards: int) -> float:
        """Seconds of a ring all-reduce of hidden states."""
        if shards == 1:
            return 0.0
        num_bytes = 2 * (shards - 1) / shards * rows * self.model.hidden_size * self.model.itemsize
        reached = self.coefficients
        return device.collective_s * reached.link_latency + num_bytes / (device.link * reached.link_bandwidth)


def turns_s(
    num_layers: int, num_micro_batches: int, attention_s: float, ffn_s: float, transfer_s: float
) -> float:
    """Seconds of all layers for micro-batches that take turns.

    Attention, the way there, the FFN and the way back each take in one micro-batch at a time. A layer of a
    micro-batch begins when its last layer has come back.
    """
    slowest = max(attention_s, ffn_s, transfer_s)
    alone_s = attention_s + ffn_s + 2 * transfer_s
    period_s = max(alone_s, num_micro_batches * slowest)
    return alone_s + (num_layers - 1) * period_s + (num_micro_batches - 1) * slowest


def whole_cost(cost: CostModel, num_rows: float, context: float) -> float:
    """Seconds of a decode step where devices have whole layers. Each group has `num_rows` rows."""
    all_rows = num_rows * cost.data_parallel
    return cost.compute_s(num_rows, num_rows * context, 0.0, 0.0, 0.0, 0.0, all_rows)
