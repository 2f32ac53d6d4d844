"""`PoolBytes` beside kernels that have not run yet."""

from __future__ import annotations

import pytest
import torch

from sagellm.engines.native.block_bytes import PoolBytes

pytestmark = pytest.mark.gpu
CYCLES = 200_000_000
"""About a tenth of a second."""


def test_blocks_are_copied_behind_what_is_queued() -> None:
    rows = torch.zeros(8, 4096, dtype=torch.uint8, device="cuda")
    pool, data = PoolBytes([rows]), bytearray(2 * 4096)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    rows.fill_(7)
    pool.follow_steps()
    pool.read_blocks([1, 5], memoryview(data))
    assert set(data) == {7}
    torch.cuda._sleep(CYCLES)
    rows.fill_(1)
    pool.follow_steps()
    pool.write_blocks([1, 5], bytes([9]) * len(data))
    torch.cuda.synchronize()
    assert rows[:, 0].tolist() == [1, 9, 1, 1, 1, 9, 1, 1]
