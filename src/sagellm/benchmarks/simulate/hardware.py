"""What is simulated: a device, a model on it, and how many KV blocks that leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.benchmarks.simulate.instance import InstanceClock
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.engines.simulator.backend import SimulatedBackend
from sagellm.engines.simulator.cost_model import Coefficients, CostModel
from sagellm.engines.simulator.devices import device
from sagellm.engines.simulator.memory import num_kv_blocks
from sagellm.engines.simulator.models import model

UTILIZATION = 0.9
"""Share of the device's memory for weights, activations and KV, where the configuration names none."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One instance's hardware: `cost_model` prices its steps. `source`: where its coefficients are from."""

    cost_model: CostModel
    source: str = "default"

    @property
    def vocab_size(self) -> int:
        return self.cost_model.model.vocab_size

    @property
    def num_devices(self) -> int:
        """Of one instance."""
        return self.cost_model.tensor_parallel

    @property
    def network_bytes_per_s(self) -> float:
        return self.cost_model.device.network

    def max_model_len(self, config: Config) -> int:
        """The longest prompt with its answer: the model's context, or what the pool holds."""
        context = config.model.max_model_len or self.cost_model.model.max_model_len
        return min(context, self.num_blocks(config) * config.kv.block_size)

    def num_blocks(self, config: Config) -> int:
        """`kv.num_blocks`, or what memory leaves; raises `CapacityError` where that is nothing."""
        if config.kv.num_blocks is not None:
            return config.kv.num_blocks
        return num_kv_blocks(
            self.cost_model.device,
            self.cost_model.model,
            block_size=config.kv.block_size,
            tensor_parallel=self.cost_model.tensor_parallel,
            utilization=config.kv.memory_fraction or UTILIZATION,
            max_batched_tokens=config.scheduler.max_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
        )

    def backend(self, clock: InstanceClock, config: Config) -> InferenceBackend:
        return SimulatedBackend(
            self.cost_model,
            clock,
            num_blocks=self.num_blocks(config),
            block_size=config.kv.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len,
            host_memory_bytes=int(config.kv.swap_space_gb * 2**30),
        )

    def described(self) -> dict[str, Any]:
        """For a manifest."""
        cost = self.cost_model
        return {
            "device": cost.device.name,
            "device_source": cost.device.source,
            "model": cost.model.name,
            "dtype": cost.model.dtype,
            "tensor_parallel": cost.tensor_parallel,
            "coefficients": cost.coefficients.as_dict(),
            "coefficients_from": self.source,
        }


def hardware(
    device_name: str, model_name: str, *, tensor_parallel: int = 1, cost_file: Path | None = None
) -> Hardware:
    """A device and a model by name, with the coefficients of a file that `calibrate` wrote, or the defaults.

    Raises `ConfigError` or `ModelError` with the names that there are.
    """
    coefficients, source = Coefficients(), "default"
    if cost_file is not None:
        coefficients, source = _coefficients(cost_file), cost_file.name
    cost = CostModel(device(device_name), model(model_name), coefficients, tensor_parallel)
    return Hardware(cost, source)


def _coefficients(path: Path) -> Coefficients:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the coefficients in {path}: {error}") from error
    values = read.get("coefficients", read) if isinstance(read, Mapping) else read
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} must hold coefficients by name, as calibrate writes them")
    return Coefficients.of(values)
