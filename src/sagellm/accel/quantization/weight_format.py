"""Which format a checkpoint's `quantization_config` describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sagellm.core.errors import UnsupportedModelError
from sagellm.core.protocols.quantization import WeightFormat
from sagellm.core.registry import registry


def weight_format(config: Mapping[str, Any]) -> WeightFormat:
    """By `quant_method`, among the plug-ins of `formats/`. Raises `UnsupportedModelError` for a method or a
    form of it that cannot be read.

    The method is a checkpoint's word, so it is a known name or none: a registry would import a path.
    """
    method = str(config.get("quant_method", "unknown"))
    formats = registry("weight_format")
    names = formats.names()
    name = method.replace("-", "_")
    if name not in names:
        known = ", ".join(one.replace("_", "-") for one in names)
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
