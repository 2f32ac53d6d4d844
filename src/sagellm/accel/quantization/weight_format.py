"""Which format a checkpoint's `quantization_config` describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sagellm.core.errors import UnknownNameError, UnsupportedModelError
from sagellm.core.protocols.quantization import WeightFormat
from sagellm.core.registry import registry


def weight_format(config: Mapping[str, Any]) -> WeightFormat:
    """By `quant_method`, among the plug-ins of `formats/`. Raises `UnsupportedModelError` for a method or a
    form of it that cannot be read.
    """
    method = str(config.get("quant_method", "unknown"))
    formats = registry("weight_format")
    try:
        found: WeightFormat = formats.create(method.replace("-", "_"), config=config)
    except UnknownNameError as error:
        known = ", ".join(name.replace("_", "-") for name in formats.names())
        raise UnsupportedModelError(
            f"quantized checkpoints ({method}) are not supported: use one by {known}, or the float32, "
            "bfloat16 or float16 one with model.quantization"
        ) from error
    return found
