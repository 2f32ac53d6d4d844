"""`PoolBytes`: blocks as bytes, in the memory of a CPU and as a GPU copies them."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sagellm.engines.native import block_bytes
from sagellm.engines.native.block_bytes import PoolBytes

WIDTHS, NUM_BLOCKS = (24, 8, 40), 9
BLOCK_BYTES = sum(WIDTHS)
Pools = Sequence[torch.Tensor]


class FakeCuda:
    """Torch's calls for a GPU, on a CPU. `calls` notes what is locked, unlocked and waited for."""

    def __init__(self, patch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._error = error
        runtime = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        patch.setattr(torch.cuda, "device", nullcontext)
        patch.setattr(torch.cuda, "stream", nullcontext)

    def synchronize(self) -> None:
        self.calls.append(("synchronize",))

    def pool_bytes(self, pools: Pools) -> PoolBytes:
        made = PoolBytes(pools)
        made._arrays, made._module, made._stream = [], torch.cuda, self
        return made

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append(("register", address, num_bytes, flags))
        return self._error

    def _unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


def random_pools() -> list[torch.Tensor]:
    """The last one has gaps between its rows, as layers of other engines may have."""
    made = [torch.randint(256, (NUM_BLOCKS, width), dtype=torch.uint8) for width in WIDTHS[:-1]]
    wide = torch.randint(256, (NUM_BLOCKS, WIDTHS[-1] + 8), dtype=torch.uint8)
    return [*made, wide[:, : WIDTHS[-1]]]


def expected(pools: Pools, ids: Sequence[int]) -> bytes:
    return b"".join(bytes(pool[i].tolist()) for i in ids for pool in pools)


@pytest.fixture(params=["cpu", "gpu"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Pools], PoolBytes]:
    return PoolBytes if request.param == "cpu" else FakeCuda(monkeypatch).pool_bytes


@pytest.mark.parametrize("ids", [[4], [0, 1, 2], [8, 0, 5, 3], []])
def test_blocks_go_and_come(made: Callable[[Pools], PoolBytes], ids: list[int]) -> None:
    pools = random_pools()
    data, target = made(pools), memoryview(bytearray(len(ids) * BLOCK_BYTES))
    assert data.bytes_per_block == BLOCK_BYTES
    data.read_blocks(ids, target)
    assert bytes(target) == expected(pools, ids)
    before = [pool.clone() for pool in pools]
    others = [i for i in range(NUM_BLOCKS) if i not in ids]
    written = bytearray(np.random.default_rng(1).bytes(len(target)))
    data.write_blocks(ids, written)
    assert expected(pools, ids) == bytes(written)
    assert expected(pools, others) == expected(before, others)


def test_each_call_waits_for_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    data, memory = cuda.pool_bytes(random_pools()), memoryview(bytearray(2 * BLOCK_BYTES))
    data.read_blocks([1, 2], memory)
    data.write_blocks([1, 2], memory)
    assert cuda.calls == [("synchronize",)] * 2


def test_a_buffer_is_unlocked_before_its_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    data = cuda.pool_bytes(random_pools())
    mapping = mmap.mmap(-1, 8192)
    data.lock_pages(memoryview(mapping)[:5000])
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    assert cuda.calls == [("register", address, 5000, 0)]
    with pytest.raises(BufferError, match="exported pointers exist"):
        mapping.close()  # the mapping is held while its pages are locked
    del data
    gc.collect()
    assert cuda.calls[1:] == [("unregister", address)]
    mapping.close()


def test_cuda_refuses_to_lock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its error, which the thread's next kernel reports again, fails no copy."""
    cuda, drained = FakeCuda(monkeypatch, error=2), []

    def ones(*_: object, **__: object) -> None:
        drained.append(True)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", ones)
    data = cuda.pool_bytes(random_pools())
    data.lock_pages(memoryview(bytearray(64)))
    assert drained == [True]
    assert "locks no 64 bytes of host memory (error 2)" in caplog.text
    del data
    gc.collect()
    assert [name for name, *_ in cuda.calls] == ["register"]


def test_a_cpu_locks_nothing_and_is_near_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("a CPU has no CUDA"))
    data = PoolBytes(random_pools())
    data.lock_pages(memoryview(bytearray(64)))
    assert data.numa_node is None


def test_address_of_a_gpu_in_sysfs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert block_bytes._pci_address(torch.device("cuda:0")) == "0000:3b:00.0"


def test_views_are_the_blocks_themselves() -> None:
    pools = [torch.arange(60, dtype=torch.uint8).view(5, 12), torch.arange(40, dtype=torch.uint8).view(5, 8)]
    blocks = PoolBytes(pools)
    read = bytearray(3 * blocks.bytes_per_block)
    blocks.read_blocks([4, 0, 2], memoryview(read))
    assert b"".join(blocks.views([4, 0, 2])) == read
    blocks.views([3])[1][:] = bytes(8)
    assert not pools[1][3].any()
    assert blocks.has_views
    assert not PoolBytes([pools[0][:, :6]]).has_views, "rows with gaps have none"
