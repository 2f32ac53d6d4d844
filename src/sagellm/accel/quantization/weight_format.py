"""Which format a checkpoint's `quantization_config` describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sagellm.core.errors import UnsupportedModelError
from sagellm.core.protocols.quantization import WeightFormat
from sagellm.core.registry import registry


def weight_format(config: Mapping[str, Any]) -> WeightFormat:
    """The reader of a checkpoint's `quantization_config`, by its `quant_method`. Raises
    `UnsupportedModelError` for a method or form that cannot be read. The method comes from a checkpoint, so
    only known names count: the registry would import a path.
    """
    method = str(config.get("quant_method", "unknown"))
    formats = registry("weight_format")
    names = formats.names()
    name = method.replace("-", "_")
    if name not in names:
        known = ", ".join(known_name.replace("_", "-") for known_name in names)
        raise UnsupportedModelError(
            f"quantized checkpoints ({method}) are not supported: use one by {known}, or the float32, "
            "bfloat16 or float16 one with model.quantization"
        )
    try:
        found: WeightFormat = formats.create(name, config=config)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise UnsupportedModelError(
            f"config.json: quantization_config is none that {method} writes ({error!r}): fetch it again"
        ) from error
    return found
