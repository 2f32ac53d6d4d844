"""Engines in simulated time, and measurements that the simulator itself made."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from sagellm.core.config import Config
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.simulator.cost_model import CostModel
from sagellm.engines.simulator.measured import RequestTiming, SimulatedRun, simulate


def config(preset: str = "vllm-like", **settings: Any) -> Config:
    """A preset; settings with `__` for the dot."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return load_config(preset=preset, cli=given, environ={}).config


def arrivals(number: int, *, rate: float, seed: int = 0, mean_prompt: int = 600) -> list[RequestTiming]:
    """Poisson arrivals with lengths of all kinds, not measured yet."""
    draw, now_s, found = random.Random(seed), 0.0, []
    for index in range(number):
        prompt = 1 + int(draw.expovariate(1 / mean_prompt))
        output = draw.randint(10, 90)
        found.append(RequestTiming(f"r{index}", prompt, output, now_s, now_s, now_s, now_s, now_s))
        now_s += draw.expovariate(rate)
    return found


def measured(
    requests: Sequence[RequestTiming], run: SimulatedRun, *, noise_s: float = 0.0, seed: int = 1
) -> list[RequestTiming]:
    """The timings of a simulation as if they had been measured."""
    draw = random.Random(seed)
    return [
        RequestTiming(
            one.request_id,
            one.num_prompt_tokens,
            one.num_output_tokens,
            one.arrival_s,
            twin.queued_s,
            twin.scheduled_s,
            twin.first_token_s + draw.random() * noise_s,
            twin.last_token_s + noise_s + draw.random() * noise_s,
        )
        for one, twin in zip(requests, run.timings, strict=True)
    ]


def serve(
    requests: Sequence[RequestTiming],
    cost_model: CostModel,
    *,
    num_blocks: int = 4000,
    max_num_seqs: int = 32,
    pipelined: bool = True,
) -> SimulatedRun:
    made = config(kv__num_blocks=num_blocks, scheduler__max_num_seqs=max_num_seqs)
    return simulate(requests, cost_model, made, build_engine, pipelined=pipelined)
