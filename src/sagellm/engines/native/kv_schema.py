"""How a model's KV lies in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sagellm.core.types import KVCacheSchema, Window
from sagellm.engines.native.kv_cache import LAYOUT, deal_layers
from sagellm.engines.native.options import dtype_name
from sagellm.engines.native.recurrent.states import state_bytes

if TYPE_CHECKING:
    from sagellm.engines.native.bridge.description import BridgedSpec
    from sagellm.engines.native.model_spec import ModelSpec


def kv_schema(
    spec: ModelSpec | BridgedSpec, windows: Sequence[Window | None], dtype: torch.dtype, block_size: int,
    *, split_kv: bool,
) -> KVCacheSchema:  # fmt: skip
    """The schema of KV in `dtype`, without a fingerprint.

    `windows` are those of all layers that have KV, a draft head's too. `split_kv`: as for `NativeBackend`.
    """
    return KVCacheSchema(
        len(windows), spec.num_kv_heads, spec.head_dim, dtype_name(dtype), block_size, LAYOUT,
        groups=deal_layers(windows, spec.kv_shapes) if split_kv else (),
        values_in_keys=spec.latent is not None, state_bytes=state_bytes(spec, dtype),
        layer_shapes=spec.kv_shapes,
    )  # fmt: skip
