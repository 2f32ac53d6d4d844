"""What has ended holds no memory."""

from __future__ import annotations

import gc
import random
from collections import deque

import pytest

from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.plan import RequestState
from sagellm.core.types import Namespace
from sagellm.engines.build_kv import build_kv
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir import PassPipeline, strategies
from tests.builders import request

AT_ONCE = 2


@pytest.mark.parametrize("strategy", strategies.STRATEGIES)
def test_requests_that_have_ended_are_freed(strategy: str) -> None:
    """Passes that remember requests by rank, goal or missing tokens once kept the last 256 or more of them.

    With prompts of 128K tokens these took 500 MB.
    """
    backend, clock = TokenMemoryBackend(num_blocks=200), ManualClock()
    kv = build_kv(KVConfig(block_size=backend.capability().block_size), 200, clock=clock)
    engine = Engine(backend, kv, PassPipeline(strategies.make(strategy)), clock=clock)
    waiting = deque(range(150))
    num_open, rng = 0, random.Random(0)
    while waiting or num_open:
        while waiting and num_open < AT_ONCE:
            number = waiting.popleft()
            prompt = [rng.randrange(97) for _ in range(80)]
            namespace = Namespace(tenant=f"t{number % 3}")
            engine.add(request(f"ended-{number}", prompt, 2, namespace=namespace, arrival_s=clock.now()))
            num_open += 1
        num_open -= sum(output.finish_reason is not None for output in engine.step())
        clock.advance(0.01)
    gc.collect()
    held = [
        each
        for each in gc.get_objects()
        if type(each) is RequestState and each.request_id.startswith("ended-")
    ]
    assert len(held) <= 40, "each pass may keep 16"
    engine.close()
