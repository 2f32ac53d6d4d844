"""`StreamExecutor` with kernels and copies of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sagellm.comm.overlap.executors import StreamExecutor
from sagellm.comm.overlap.managers import CriticalPathManager
from sagellm.comm.overlap.patterns import sent_by_layer
from sagellm.core.errors import TaskFailedError

pytestmark = pytest.mark.gpu
NUM_LAYERS, SIZE = 16, 4096


def test_copies_to_the_host_run_behind_matrices_and_bring_the_right_numbers() -> None:
    layer = torch.randn(SIZE, SIZE, device="cuda") / SIZE**0.5
    states = [torch.randn(SIZE, SIZE, device="cuda")]
    states += [torch.empty_like(states[0]) for _ in range(NUM_LAYERS)]
    sent = torch.empty(NUM_LAYERS, SIZE, SIZE, pin_memory=True)
    schedule = CriticalPathManager().schedule(*sent_by_layer([1.0] * NUM_LAYERS, [1.0] * NUM_LAYERS))

    def compute(i: int) -> None:
        torch.matmul(states[i], layer, out=states[i + 1])

    def send(i: int) -> None:
        sent[i].copy_(states[i + 1], non_blocking=True)

    work = {f"compute:{i}": lambda i=i: compute(i) for i in range(NUM_LAYERS)}
    work |= {f"send:{i}": lambda i=i: send(i) for i in range(NUM_LAYERS)}
    StreamExecutor(torch.cuda).run(schedule, work)  # warm
    run = StreamExecutor(torch.cuda).run(schedule, work)
    run.timeline.check(tolerance_s=1e-4)
    assert run.timeline.hidden_fraction > 0.0
    torch.testing.assert_close(sent, torch.stack(states[1:]).cpu(), rtol=0, atol=0)


def test_a_task_that_fails_stops_what_waits_for_it() -> None:
    schedule = CriticalPathManager().schedule(*sent_by_layer([1.0] * 2, [1.0] * 2))

    def fail() -> None:
        torch.ones(2, device="cuda") @ torch.ones(3, device="cuda")

    work: dict[str, Callable[[], object]] = dict.fromkeys(("compute:0", "send:0", "send:1"), int)
    work["compute:1"] = fail
    with pytest.raises(TaskFailedError, match="'compute:1'") as caught:
        StreamExecutor(torch.cuda).run(schedule, work)
    assert caught.value.run.skipped == ("compute:1", "send:1")
