"""Reductions whose values travel in fewer bytes, over any backend.

Each rank sends the others their pieces in the wire format, adds what it gets in float32 and in order of rank,
and all gather the sums in the wire format. A value is thus rounded twice, alike on all ranks.

Let x_r be rank r's value, and m_r the largest magnitude of its block of `INT8_BLOCK` values. In float32's
normal range, a sum differs from the exact one by at most

    BF16    sum of |x_r| over the ranks / 127     two roundings to 8 bits, each by at most 2^-8 of the value
    INT8    sum of m_r over the ranks / 127       two roundings, each by at most half a step of a 127th

and a maximum or minimum by at most a 127th of the largest |x_r| or m_r. A block that holds a value that is
not finite becomes NaN as a whole with INT8.
"""

from __future__ import annotations

import torch

from sagellm.comm.collectives._buffers import as_bytes, check_apart, reduced
from sagellm.core.blocks import cdiv
from sagellm.core.protocols.collectives import CommBackendProtocol, ReduceOp, WireFormat

INT8_BLOCK = 256
"""Values that share a float32 scale: 1.6 % more bytes."""
_STEPS = 127


def all_reduce_rounded(
    backend: CommBackendProtocol, buffer: torch.Tensor, op: ReduceOp, wire: WireFormat
) -> None:
    """Reduce a floating-point buffer in place. Raises `ValueError` for another dtype."""
    if not buffer.is_floating_point():
        raise ValueError(f"the wire format {wire.value} is for floating-point buffers, got {buffer.dtype}")
    check_apart(buffer)
    world_size, count = backend.world_size, buffer.numel()
    piece = cdiv(max(1, count), world_size * INT8_BLOCK) * INT8_BLOCK
    values = torch.zeros(world_size * piece, dtype=torch.float32, device=buffer.device)
    values[:count] = buffer.detach().reshape(-1)
    sent = _encoded(values.view(world_size, piece), wire)
    received = torch.empty_like(sent)
    backend.all_to_all(received, sent).wait()
    total = reduced(list(_decoded(received, piece, wire)), op)
    part = _encoded(total.view(1, piece), wire)
    gathered = torch.empty_like(sent)
    backend.all_gather(gathered, part).wait()
    with torch.no_grad():
        buffer.copy_(_decoded(gathered, piece, wire).view(-1)[:count].view(buffer.shape))


def _encoded(rows: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """Rows of float32 values as rows of bytes. With INT8 the scales follow the values."""
    if wire is WireFormat.BF16:
        return as_bytes(rows.to(torch.bfloat16)).view(len(rows), -1)
    blocks = rows.view(-1, INT8_BLOCK)
    scales = blocks.abs().amax(1) / _STEPS
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    steps = (blocks / scales[:, None]).round_().to(torch.int8)  # of a scale 0 or NaN: of no account
    parts = as_bytes(steps).view(len(rows), -1), as_bytes(scales).view(len(rows), -1)
    return torch.cat(parts, dim=1)


def _decoded(rows: torch.Tensor, size: int, wire: WireFormat) -> torch.Tensor:
    """Rows of `size` float32 values."""
    if wire is WireFormat.BF16:
        return rows.view(torch.bfloat16).float()
    scales = rows[:, size:].contiguous().view(torch.float32)
    blocks = rows[:, :size].view(torch.int8).float().view(len(rows), -1, INT8_BLOCK)
    return (blocks * scales[:, :, None]).view(len(rows), size)
