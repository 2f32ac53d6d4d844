"""`sagellm bench micro parallel`: two ranks of one thread beside two threads.

The model has the shape S (184 M parameters, bfloat16) and random weights. Both compute the same step in
turns, so other load of the machine affects both. Times are wall time: ranks are processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from sagellm.benchmarks.engine.shapes import SHAPES, write_model
from sagellm.benchmarks.micro.cases import MicroBenchmark, MicroBenchPlan, MicroBenchRow, Section, Stopwatch
from sagellm.core.blocks import cdiv
from sagellm.core.config import Config
from sagellm.core.errors import UnknownNameError, nearest
from sagellm.core.plan import ExecutionPlan, Join, Prefill
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.core.types import SamplingParams, Tokens
from sagellm.engines.build import build_backend

BACKENDS = ("shared_memory", "auto", "torch_distributed")
PREFILL, DECODE = "prefill of a prompt", "decode of so many rows behind 16 tokens"
WHOLE, RANKS = "one process, 2 threads", "2 ranks, 1 thread each"
RATIO, SHARE = "speed of the ranks / of the process", "share of a step in communication"
SHAPE = "S"
_ROUNDS, _DECODE_STEPS, _PROMPT, _BLOCK = 7, 16, 16, 16


def _check(name: str) -> None:
    if name not in BACKENDS:
        raise UnknownNameError(f"unknown collectives {name!r}.{nearest(name, BACKENDS)}")


def _backend(folder: Path, plan: MicroBenchPlan, backend: str | None) -> InferenceBackend:
    ranks = {} if backend is None else {"tensor": 2, "backend": backend}
    longest = max(plan.lengths)
    config = {
        "model": {"name": str(folder), "device": "cpu", "max_model_len": longest + _BLOCK},
        "kv": {"block_size": _BLOCK, "num_blocks": cdiv(longest, _BLOCK) + 64},
        "scheduler": {"max_num_seqs": 16},
        "engine": {"threads": 2 if backend is None else 1},
        "parallel": ranks,
    }
    return build_backend(Config.model_validate(config))


def _joined(rows: int, num_tokens: int) -> ExecutionPlan:
    """Prompts of so many tokens join the first rows, which they replace."""
    blocks = cdiv(num_tokens + _DECODE_STEPS, _BLOCK)
    tokens, params = Tokens([5] * num_tokens).tobytes(), SamplingParams(max_tokens=1, temperature=0.0)
    joins = (
        Join(row, f"r{row}", tokens, num_tokens, 0, tuple(range(row * blocks, (row + 1) * blocks)), params,
             frozenset())
        for row in range(rows)
    )  # fmt: skip
    prefills = (Prefill(row, f"r{row}", 0, num_tokens, samples=True) for row in range(rows))
    return ExecutionPlan(0, joined=tuple(joins), prefills=tuple(prefills))


class Spent(NamedTuple):
    """Seconds of a step, and those of them spent in communication."""

    step_s: float
    communication_s: float


def _prefill(backend: InferenceBackend, size: int) -> Spent:
    plan = _joined(1, size)
    return _timed(backend, lambda: backend.execute(plan), 1)


def _decode(backend: InferenceBackend, rows: int) -> Spent:
    backend.execute(_joined(rows, _PROMPT))

    def steps() -> None:
        for step in range(_DECODE_STEPS):
            positions = (_PROMPT + step,) * rows
            backend.execute(ExecutionPlan(0, decode_rows=tuple(range(rows)), decode_positions=positions))

    return _timed(backend, steps, _DECODE_STEPS)


def _timed(backend: InferenceBackend, run: Callable[[], object], num_steps: int) -> Spent:
    before_s, began_s = _communication_s(backend), time.perf_counter()
    run()
    spent_s = time.perf_counter() - began_s
    return Spent(spent_s / num_steps, (_communication_s(backend) - before_s) / num_steps)


def _section(
    letter: str, case: str, sizes: Callable[[MicroBenchPlan], tuple[int, ...]],
    spent: Callable[[InferenceBackend, int], Spent],
) -> Section:  # fmt: skip
    def section(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="sagellm-bench-")))
            write_model(SHAPES[SHAPE].changed(num_hidden_layers=plan.layers), folder, plan.seed)
            whole = _backend(folder, plan, None)
            stack.callback(whole.close)
            for variant in plan.variants:
                ranks = _backend(folder, plan, variant)
                stack.callback(ranks.close)
                for size in sizes(plan):
                    yield from _rows(letter, case, size, variant, _in_turns(plan, whole, ranks, spent, size))

    return section


def _in_turns(
    plan: MicroBenchPlan, whole: InferenceBackend, ranks: InferenceBackend,
    spent: Callable[[InferenceBackend, int], Spent], size: int,
) -> dict[str, float]:  # fmt: skip
    """Medians of seconds, of the ratios of each turn, and the share of communication."""
    for backend in (whole, ranks):
        spent(backend, size)
    pairs: list[tuple[Spent, Spent]] = []
    for turn in range(min(plan.repeats, _ROUNDS)):
        if turn % 2:
            ours, theirs = spent(ranks, size), spent(whole, size)
        else:
            theirs, ours = spent(whole, size), spent(ranks, size)
        pairs.append((theirs, ours))
    return {
        WHOLE: median(theirs.step_s for theirs, _ in pairs),
        RANKS: median(ours.step_s for _, ours in pairs),
        RATIO: median(theirs.step_s / ours.step_s for theirs, ours in pairs),
        SHARE: median(ours.communication_s / ours.step_s for _, ours in pairs),
    }


def _communication_s(backend: InferenceBackend) -> float:
    spent_s: float = getattr(backend, "communication_s", 0.0)
    return spent_s


def _rows(
    letter: str, case: str, size: int, variant: str, found: dict[str, float]
) -> Iterator[MicroBenchRow]:
    for name, value in found.items():
        is_time = name in (WHOLE, RANKS)
        unit, value = ("ms", value * 1e3) if is_time else ("", value)
        yield MicroBenchRow(letter, f"{case}: {name}", size, variant, unit, value)


BENCHMARK = MicroBenchmark(
    "parallel",
    lambda: BACKENDS,
    _check,
    {
        "p": _section("p", PREFILL, lambda plan: plan.lengths, _prefill),
        "d": _section("d", DECODE, lambda plan: (1, 8), _decode),
    },
)
