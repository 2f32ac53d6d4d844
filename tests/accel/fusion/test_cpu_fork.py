"""A child made by fork has none of its parent's helper threads: it starts its own, and gets the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sagellm.accel.fusion.cpu import cpu_kernels

PROGRAM = """
import os, signal, sys, threading
import torch
from sagellm.accel.fusion.cpu import cpu_kernels

torch.set_num_threads(1)
linear = cpu_kernels(2).linear
generator = torch.Generator().manual_seed(0)
x, weight = (torch.randn(rows, 512, generator=generator) for rows in (64, 2048))
matrix = linear.empty(2048, 512, weight.dtype)
matrix.store(0, weight)
expected = linear.apply(x, matrix, None)

def in_child():
    signal.alarm(60)
    alone = len(os.listdir("/proc/self/task"))
    same = all(torch.equal(linear.apply(x, matrix, None), expected) for _ in range(20))
    helped = len(os.listdir("/proc/self/task"))
    os._exit(0 if same and (alone, helped) == (1, 2) else 1)

def forked():
    child = os.fork()
    if child == 0:
        in_child()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def compute():
    while not over:
        linear.apply(x, matrix, None)

print("quiet", forked())
over = False
other = threading.Thread(target=compute)
other.start()
print("computing", *(forked() for _ in range(5)))
over = True
other.join()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux shows them")
def test_a_child_has_helpers_of_its_own() -> None:
    """Whether or not another thread of the parent was computing."""
    if cpu_kernels(2).linear is None:
        pytest.skip("no C++ compiler")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ,
    )
    assert done.stdout.splitlines() == ["quiet 0", "computing" + 5 * " 0"], done.stdout + done.stderr
