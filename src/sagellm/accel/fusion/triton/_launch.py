"""What the Triton kernels of this folder share: which inputs can be launched on."""

from __future__ import annotations

import torch
import triton

from sagellm.core.errors import KernelError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def device_obstacle(*tensors: torch.Tensor) -> str:
    """Why no kernel can be launched on these; empty where one can. Triton's interpreter takes any device."""
    device = tensors[0].device
    if any(tensor.device != device for tensor in tensors):
        return (
            f"inputs are on {', '.join(sorted({str(tensor.device) for tensor in tensors}))}: use one device"
        )
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"Triton's kernels run on a CUDA device, the inputs are on {device}"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "these kernels have no gradient"
    return ""


def refuse(reason: str) -> None:
    """Raise `KernelError` for a reason that is not empty."""
    if reason:
        raise KernelError(reason)
