"""Options of `NativeBackend`, as they are checked before a model is loaded or only sized."""

from __future__ import annotations

import torch

from sagellm.core.errors import ConfigError
from sagellm.engines.native.architectures import ModelSpec


def check_counts(**counts: int | None) -> None:
    """Raise `ConfigError` for a number below 1."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


def usable_device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU, or the CPU. Raises `ConfigError` for one that is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device {name!r} cannot be used: {str(error).splitlines()[0]}; cpu always can"
        ) from error
    return device


def model_length(spec: ModelSpec, wanted: int | None) -> int:
    """Tokens of the longest sequence. Raises `ConfigError` for more than the model has positions for."""
    if wanted is not None and wanted > spec.max_model_len:
        raise ConfigError(
            f"max_model_len {wanted} is more than this model's {spec.max_model_len} positions: give less"
        )
    return wanted or spec.max_model_len
