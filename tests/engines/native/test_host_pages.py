"""A KV pool is zero, costs what was written, and is refused where it could not be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sagellm.core.errors import CapacityError
from sagellm.core.plan import BlockCopy
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.memory import (
    FEWEST_BYTES,
    available_bytes,
    check_fits,
    lazy_zeros,
    shared_zeros,
)
from tests.tiny_models import save_tiny

CPU = torch.device("cpu")
MB = 1 << 20
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 4), (3,), (5, 7, 11), (FEWEST_BYTES // 8, 9)])
def test_zeros_that_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = lazy_zeros(shape, dtype)
    assert (tuple(made.shape), made.dtype, made.is_contiguous()) == (shape, dtype, True)
    assert not made.count_nonzero()
    made.fill_(2)
    assert bool((made == 2).all())


def test_two_tensors_share_nothing() -> None:
    first, second = lazy_zeros((FEWEST_BYTES,), torch.uint8), lazy_zeros((FEWEST_BYTES,), torch.uint8)
    first.fill_(1)
    assert not second.count_nonzero()


def test_a_view_keeps_its_pages() -> None:
    view = lazy_zeros((FEWEST_BYTES,), torch.uint8)[5:9]
    view.fill_(3)
    assert view.tolist() == [3, 3, 3, 3]


@ON_LINUX
def test_shared_zeros_lie_in_pages_that_others_may_map() -> None:
    from sagellm.core.shared_pages import mapped_to_read

    pages, (first, second) = shared_zeros([(3, 5), (7, 4)], torch.float32)
    assert pages is not None
    assert first.shape == (3, 5)
    assert second.shape == (7, 4)
    assert not first.count_nonzero()
    assert not second.count_nonzero()
    first.fill_(2)
    second[6, 3] = 5
    seen = mapped_to_read(pages.fd, MB)
    for tensor in (first, second):
        offset = pages.offset_of(tensor.numpy().data.cast("B"))
        assert offset is not None
        assert bytes(seen[offset : offset + tensor.nbytes]) == tensor.numpy().tobytes()


@ON_LINUX
def test_without_such_memory_zeros_are_private(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: object) -> int:
        raise OSError("told to")

    monkeypatch.setattr(os, "memfd_create", refuse)
    pages, [made] = shared_zeros([(3, 5)], torch.bfloat16)
    assert pages is None
    assert (tuple(made.shape), int(made.count_nonzero())) == ((3, 5), 0)
    assert "two copies, not one: told to" in caplog.text


@ON_LINUX
@pytest.mark.parametrize("value_dim", [None, 8])
def test_a_shared_pool_is_the_same_pool(value_dim: int | None) -> None:
    kv, plain = (
        PagedKV(3, 6, 4, 2, 8, CPU, torch.float32, value_dim=value_dim, is_shared=is_shared)
        for is_shared in (True, False)
    )
    assert plain.shared_pages is None
    assert kv.shared_pages is not None
    assert [pool.shape for pool in kv.as_bytes()] == [pool.shape for pool in plain.as_bytes()]
    for pool in kv.as_bytes():
        assert kv.shared_pages.offset_of(pool.numpy().data.cast("B")) is not None


@ON_LINUX
def test_a_pool_is_resident_where_it_was_written() -> None:
    """Run apart, so that what the other tests gave back to the allocator is not mistaken for pages."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _RESIDENCE]
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    born, written, read = map(int, found.stdout.split())
    assert born < 8 * MB
    assert 16 * MB <= written < 48 * MB
    assert read < written + 8 * MB


_RESIDENCE = """
from pathlib import Path
import torch
from sagellm.engines.native.kv_cache import PagedKV

def resident_bytes() -> int:
    # Anonymous memory of this process that is really there.
    text = Path("/proc/self/status").read_text(encoding="ascii")
    [line] = [line for line in text.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024

torch.ones(1).sum()
before = resident_bytes()
kv = PagedKV(4, 1 << 12, 16, 8, 64, torch.device("cpu"), torch.float32)
print(resident_bytes() - before)
rows = torch.ones(1024, 8, 64)
for layer in range(4):
    kv.write(layer, torch.arange(1024), rows, rows)
print(resident_bytes() - before)
assert not kv.keys[3][64:].any()
print(resident_bytes() - before)
"""


def test_blocks_are_cleared_and_copied() -> None:
    kv = PagedKV(2, 1024, 16, 2, 64, CPU, torch.float32)
    assert kv.keys[0].nbytes > FEWEST_BYTES
    kv.write(1, torch.tensor([33]), torch.ones(1, 2, 64), torch.full((1, 2, 64), torch.inf))
    kv.copy_blocks([BlockCopy(2, 1000)])
    assert torch.isinf(kv.values[1][1000, 1]).all()
    kv.clear_blocks([2])
    assert not kv.values[1][2].any()
    assert bool((kv.keys[1][1000, 1] == 1).all())


def test_address_space_that_the_system_refuses() -> None:
    with pytest.raises(CapacityError, match=r"out of memory on cpu.*fewer blocks"):
        lazy_zeros((1 << 40, 1 << 20), torch.float32)


def test_more_blocks_than_memory(tmp_path: Path) -> None:
    available = available_bytes(CPU)
    check_fits(CPU, available // (1 << 20) // 2, 1 << 20)
    with pytest.raises(CapacityError, match=r"2,147,483,647 KV blocks.*at most"):
        check_fits(CPU, 2**31 - 1, 1 << 20)
    check_fits(torch.device("cuda"), 2**31 - 1, 1 << 20)
    save_tiny(tmp_path, "llama")
    with pytest.raises(CapacityError, match=r"KV blocks.*more than is available on cpu"):
        NativeBackend(tmp_path, threads=1, num_blocks=2**31 - 1)
