"""How many KV blocks an engine has on a device: memory by utilisation, less weights, less activations."""

from __future__ import annotations

from sagellm.core.blocks import cdiv
from sagellm.core.errors import CapacityError
from sagellm.engines.simulator.devices import GIB, Device
from sagellm.engines.simulator.models import ModelShape

RUNTIME_BYTES = GIB // 5
"""What libraries and communication hold outside the tensors' allocator."""
SAMPLER_BYTES = 24
"""Per row and word of the vocabulary, at the peak of sampling: logits, sorted logits, probabilities and their
sums as float32, the order as int64."""


def activation_bytes(
    model: ModelShape, max_batched_tokens: int, max_num_seqs: int, tensor_parallel: int = 1
) -> int:
    """The peak of one device beside weights and KV: the widest layer on a full step, or the sampler on a full
    batch, whichever ends up on top of the other's leavings, so both."""
    width = model.shared_intermediate_size + model.intermediate_size * max(1, model.experts_per_token)
    layer = max_batched_tokens * (3 * width // tensor_parallel + 3 * model.hidden_size) * model.itemsize
    return layer + max_num_seqs * model.vocab_size * SAMPLER_BYTES


def num_kv_blocks(
    device: Device,
    model: ModelShape,
    *,
    block_size: int = 16,
    tensor_parallel: int = 1,
    data_parallel: int = 1,
    utilization: float = 0.9,
    max_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
) -> int:
    """Blocks of `block_size` tokens that fit beside the model; raises `CapacityError` where none does.

    Blocks, rows and tokens are those of all data-parallel groups together.
    """
    experts = model.num_experts * model.expert_params * model.itemsize
    weights = cdiv(model.weight_bytes - experts, tensor_parallel)
    weights += cdiv(experts, tensor_parallel * data_parallel)
    usable = int(device.memory_bytes * utilization) - RUNTIME_BYTES - weights
    tokens, rows = cdiv(max_batched_tokens, data_parallel), cdiv(max_num_seqs, data_parallel)
    usable -= activation_bytes(model, tokens, rows, tensor_parallel)
    shards = min(tensor_parallel, model.num_kv_heads)
    blocks = usable // (cdiv(model.kv_bytes_per_token, shards) * block_size)
    if blocks < 1:
        need = weights / GIB
        raise CapacityError(
            f"{model.name} ({need:.1f} GiB of weights per device) leaves no room for KV on {device.name} "
            f"({device.memory_bytes / GIB:.1f} GiB): take more devices (tensor parallel) or a larger one"
        )
    return blocks * data_parallel
