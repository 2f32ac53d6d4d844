"""Copies to a device that the host does not wait for."""

from __future__ import annotations

import torch


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, of the host, on `device`; to a GPU through pinned memory, which torch keeps until then."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
