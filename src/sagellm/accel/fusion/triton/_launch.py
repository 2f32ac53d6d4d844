"""The base of the Triton kernels of this folder."""

from __future__ import annotations

import torch
import triton

from sagellm.accel.fusion.checked_kernels import CheckedKernel


class TritonKernel(CheckedKernel):
    """A kernel that is launched on a CUDA device; Triton's interpreter takes any device."""

    def _device_obstacle(self, *tensors: torch.Tensor) -> str:
        device = tensors[0].device
        if any(tensor.device != device for tensor in tensors):
            found = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
            return f"inputs are on {found}: use one device"
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            return f"Triton's kernels run on a CUDA device, the inputs are on {device}"
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return "these kernels have no gradient"
        return ""
