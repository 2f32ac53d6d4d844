"""`SelfDraftingBackend`: the native backend of a model that is its own draft."""

from __future__ import annotations

from typing import Any

from sagellm.core.protocols.engine import Progress
from sagellm.core.protocols.fusion import KernelSet
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.kv_schema import kv_schema
from sagellm.engines.native.loading import CheckedModel, ModelWeights, WeightLoader
from sagellm.engines.native.options import dtype_name
from sagellm.engines.native.self_draft import LoadedPart, SelfDraftSpec


class SelfDraftingBackend(NativeBackend):
    """Its pool leaves room for the KV of a draft, whose backend `self_draft` makes.

    The options but `draft` are as in `NativeBackend`, without `ranks`.
    """

    _part: LoadedPart
    _kernel_set: KernelSet

    def __init__(self, *, draft: SelfDraftSpec, **options: Any) -> None:
        self._draft, self._options = draft, options
        super().__init__(**options)

    def self_draft(self) -> NativeBackend:
        """The draft's backend, with KV and rows of its own. Close it first."""
        kernels = self._kernel_set  # those of its matrices, or recorded steps would lack calls
        given = {
            "kernels": lambda _: kernels,
            "num_blocks": self._draft.num_blocks or self._kv.num_blocks // self._schema.num_groups,
            "compute_dtype": dtype_name(self._compute_dtype),
            "kv_memory_bytes": None,
            "kv_memory_fraction": None,
            "host_memory_bytes": 0,
            "share_kv": False,
            "measure_prefill": False,
            "progress": None,
        }
        return PartBackend(self._part, **{**self._options, **given})

    def _weights(self, source: CheckedModel, loader: WeightLoader, progress: Progress | None) -> ModelWeights:
        weights = super()._weights(source, loader, progress)
        self._part = self._draft.part_of(source, weights, loader)
        return weights

    def _take_head(self, source: CheckedModel, weights: ModelWeights, kernels: KernelSet) -> None:
        self._kernel_set = kernels

    def _bytes_beside_pool(self, block_size: int, *, split_kv: bool) -> tuple[int, int]:
        spec, num_blocks = self._part.source.spec, self._draft.num_blocks
        schema = kv_schema(spec, spec.kv_windows, self._compute_dtype, block_size, split_kv=split_kv)
        size = schema.bytes_per_block
        return (size, 0) if num_blocks is None else (0, num_blocks * size)

    def close(self) -> None:
        super().close()
        del self._part


class PartBackend(NativeBackend):
    """Runs weights that another backend has loaded. The options are those of that backend."""

    def __init__(self, part: LoadedPart, **options: Any) -> None:
        self._given = part
        super().__init__(**options)

    def _checked(self, *options: Any) -> CheckedModel:
        return self._given.source

    def _weights(self, source: CheckedModel, loader: WeightLoader, progress: Progress | None) -> ModelWeights:
        return self._given.weights

    def close(self) -> None:
        super().close()
        del self._given
