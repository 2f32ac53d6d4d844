"""The simulated hardware: a device, a model, and the KV blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sagellm.core.clock import ManualClock
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.engines.simulator.backend import configured_backend, configured_blocks
from sagellm.engines.simulator.cost_model import Coefficients, CostModel
from sagellm.engines.simulator.devices import device
from sagellm.engines.simulator.models import MODELS, model


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of one instance: `cost_model` says how long its steps take. `source` names the origin
    of the coefficients; `warnings` say where they do not fit."""

    cost_model: CostModel
    source: str = "default"
    warnings: tuple[str, ...] = ()

    def max_model_len(self, config: Config) -> int:
        """The longest prompt plus answer: the model's context, or what the pool holds."""
        context = config.model.max_model_len or self.cost_model.model.max_model_len
        return min(context, self.num_blocks(config) * config.kv.block_size)

    def num_blocks(self, config: Config) -> int:
        return configured_blocks(self.cost_model, config)

    def backend(self, clock: ManualClock, config: Config) -> InferenceBackend:
        return configured_backend(self.cost_model, config, clock)

    def described(self) -> dict[str, Any]:
        """Describes the hardware for a manifest."""
        cost = self.cost_model
        return {
            "device": cost.device.name,
            "device_source": cost.device.source,
            "model": cost.model.name,
            "dtype": cost.model.dtype,
            "tensor_parallel": cost.tensor_parallel,
            "data_parallel": cost.data_parallel,
            "coefficients": cost.coefficients.as_dict(),
            "coefficients_from": self.source,
            "warnings": list(self.warnings),
        }


def hardware(
    device_name: str,
    model_name: str,
    *,
    tensor_parallel: int = 1,
    data_parallel: int = 1,
    cost_file: Path | None = None,
) -> Hardware:
    """Returns a device and a model by name, with calibrated or default coefficients. Raises `ConfigError`
    or `ModelError` with the known names, and `ConfigError` for coefficients of another device."""
    cost = CostModel(
        device(device_name), model(model_name), tensor_parallel=tensor_parallel, data_parallel=data_parallel
    )
    if cost_file is None:
        return Hardware(cost)
    coefficients, warnings = read_coefficients(cost_file, cost)
    return Hardware(replace(cost, coefficients=coefficients), cost_file.name, warnings)


def read_coefficients(path: Path, cost: CostModel) -> tuple[Coefficients, tuple[str, ...]]:
    """Reads a file that `calibrate` wrote. Returns its coefficients and doubts about them for `cost`.
    Raises `ConfigError` for coefficients of another device."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the coefficients in {path}: {error}") from error
    values = read.get("coefficients", read) if isinstance(read, Mapping) else read
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} must hold coefficients by name, as calibrate writes them")
    coefficients = Coefficients.of(values)
    if "device" not in read:
        return coefficients, (f"{path.name} does not say which device its coefficients are of",)
    if read["device"] != cost.device.name:
        raise ConfigError(
            f"{path}: coefficients of {read['device']} do not hold for {cost.device.name}: calibrate that "
            f"device, simulate --device {read['device']}, or leave out --cost"
        )
    return coefficients, _doubts(read, cost, path.name)


def _doubts(read: Mapping[str, Any], cost: CostModel, name: str) -> tuple[str, ...]:
    """Lists what a simulation of this model assumes instead of having it measured."""
    needed = set(Coefficients().as_dict())
    if not cost.model.num_experts:
        needed -= {coefficient for coefficient in needed if coefficient.startswith("expert_")}
    if cost.num_devices == 1:
        needed -= {coefficient for coefficient in needed if coefficient.startswith("link_")}
    doubts = []
    measured = _setup(read["model"], read.get("tensor_parallel", 1), read.get("data_parallel", 1))
    wanted = _setup(cost.model.name, cost.tensor_parallel, cost.data_parallel)
    if measured != wanted:
        doubts.append(f"{name}: fitted to {measured}, used for {wanted}")
    unknown = sorted(needed.intersection(read.get("fitted", {}).get("not_determined", ())))
    if measured != wanted and unknown:
        doubts.append(f"{name}: not determined by the measurements, so assumed: {', '.join(unknown)}")
    experts = bool(getattr(MODELS.get(read["model"]), "num_experts", 0))
    if experts and not cost.model.num_experts:
        doubts.append(f"{name}: a mixture of experts says little of a dense model; fit to a dense one")
    return tuple(doubts)


def _setup(model_name: str, tensor_parallel: int, data_parallel: int) -> str:
    parts = [model_name]
    parts += [f"tensor parallel {tensor_parallel}"] if tensor_parallel > 1 else []
    parts += [f"data parallel {data_parallel}"] if data_parallel > 1 else []
    return ", ".join(parts)
