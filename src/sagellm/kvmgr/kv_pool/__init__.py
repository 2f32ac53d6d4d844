"""The block pool: who owns which block of KV memory."""

from sagellm.kvmgr.kv_pool.free_list import BlockAllocationRequest, GPUKVPool

__all__ = ["BlockAllocationRequest", "GPUKVPool"]
