"""A draft of the served model's own weights: some layers, or quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar, cast

import torch

from sagellm.accel.quantization.round_to_nearest import RoundToNearest
from sagellm.core.errors import ConfigError, UnsupportedModelError
from sagellm.core.protocols.fusion import Matrix, StoredMatrix
from sagellm.core.protocols.quantization import WeightQuantizer
from sagellm.engines.native.loading import CheckedModel, ModelWeights, WeightLoader
from sagellm.engines.native.matrices import Quantization
from sagellm.engines.native.model_spec import ModelSpec

BITS = {"int8": 8, "int4": 4}
_LAYER = "layers."
_OPTIONS = "speculative.method self_draft: method_options:"
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class SelfDraftSpec:
    """What of a model is its draft.

    Its `layers`, None for all. `quantizer` makes copies of its matrices; without, they are the model's own.
    `num_blocks` of KV; None: as many as the model has.
    """

    layers: tuple[int, ...] | None
    quantizer: WeightQuantizer | None
    num_blocks: int | None

    @classmethod
    def of(cls, options: Mapping[str, Any], model: ModelSpec, quantized_by: str) -> Self:
        """From `speculative.method_options`; `quantized_by` names the model's quantization, if it has one.

        Without options it is int4. Raises `ConfigError` for options that make no draft of this model.
        """
        layers = _layers(options.get("layers"), model.num_layers)
        name = options.get("quantization", "int4" if layers is None else None)
        if name is not None and name not in BITS:
            raise ConfigError(f"{_OPTIONS} quantization is int4 or int8, not {name!r}")
        if name is not None and quantized_by:
            raise ConfigError(
                f"{_OPTIONS} quantization {name}: the model is quantized already ({quantized_by}): set "
                f"layers alone, a number from 1 to {model.num_layers - 1} or a list of layers"
            )
        if name is None and layers is None:
            raise ConfigError(f"{_OPTIONS} all layers and no quantization make no quicker draft: set one")
        num_blocks = options.get("num_blocks")
        if num_blocks is not None and (type(num_blocks) is not int or num_blocks < 1):
            raise ConfigError(f"{_OPTIONS} num_blocks is a number of blocks, not {num_blocks!r}")
        made = cls(layers, None if name is None else RoundToNearest(BITS[name]), num_blocks)
        try:
            made.spec_of(model)
        except UnsupportedModelError as error:
            raise ConfigError(f"{_OPTIONS} layers: {error}; set other ones, or quantization alone") from error
        return made

    def spec_of(self, model: ModelSpec) -> ModelSpec:
        """The draft's shape. Raises `UnsupportedModelError` where it cannot have these layers alone."""
        return model if self.layers is None else model.with_layers(self.layers)

    def name_of(self, name: str) -> str | None:
        """What the draft calls a weight of the model; None: it lacks it."""
        if self.layers is None or not name.startswith(_LAYER):
            return name
        index, _, own = name.removeprefix(_LAYER).partition(".")
        return f"{_LAYER}{self.layers.index(int(index))}.{own}" if int(index) in self.layers else None

    def part_of(self, source: CheckedModel, weights: ModelWeights, loader: WeightLoader) -> LoadedPart:
        """The draft of a loaded model. Of its weights, quantized matrices alone take memory."""
        assert isinstance(source.spec, ModelSpec)
        spec, quantization = self.spec_of(source.spec), Quantization(self.quantizer)
        matrices = self._kept(weights.matrices)
        if self.quantizer is not None:
            quantizing = replace(loader, quantization=quantization)
            matrices = {name: _quantized(quantizing, name, matrix) for name, matrix in matrices.items()}
        own = ModelWeights(weights.embedding, matrices, self._kept(weights.tensors), weights.layer_table)
        return LoadedPart(replace(source, spec=spec, quantization=quantization), own)

    def _kept(self, named: Mapping[str, Value]) -> dict[str, Value]:
        pairs = ((self.name_of(name), value) for name, value in named.items())
        return {name: value for name, value in pairs if name is not None}


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """A part of a model whose weights are in memory. Its `source.plan` is that of the whole model."""

    source: CheckedModel
    weights: ModelWeights


def _quantized(loader: WeightLoader, name: str, matrix: Matrix) -> Matrix:
    if loader.quantizer_of(f"{name}.weight") is None:
        return matrix
    stored = cast(StoredMatrix, matrix)  # the model is not quantized
    values = stored.rows(torch.arange(stored.shape[0], device=loader.device))
    return loader.matrix_of(f"{name}.weight", values)


def _layers(given: Any, num_layers: int) -> tuple[int, ...] | None:
    """The chosen layers, in order; None for all. Raises `ConfigError` for others than the model has."""
    if given is None:
        return None
    is_list = isinstance(given, list | tuple) and all(type(index) is int for index in given)
    if is_list:
        found = tuple(given)
        is_right = 0 < len(found) < num_layers and found == tuple(sorted(set(found)))
    else:
        is_right = type(given) is int and 0 < given < num_layers
        found = tuple(range(given)) if is_right else ()
    if not is_right:
        raise ConfigError(
            f"{_OPTIONS} layers is how many of the first ones, from 1 to {num_layers - 1}, or a list of some "
            f"in order, such as [0, {num_layers - 1}]; the model has {num_layers}; got {given!r}"
        )
    if found[0] < 0 or found[-1] >= num_layers:
        raise ConfigError(f"{_OPTIONS} layers: the model has layers 0 to {num_layers - 1}; got {given!r}")
    return found
