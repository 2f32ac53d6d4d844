"""Section a of `bench micro speculative`: speed by acceptance, batch and proposed tokens.

A model of shape S with a third of its layers and random weights computes every step; `speculative.method:
synthetic` makes as many proposed tokens right as are asked for. One engine for each constant number of
tokens, and one that chooses it, decode the same requests in turns. Time is CPU time of the one thread that
computes, for the planner too: other load of the machine disturbs it least.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from sagellm.benchmarks.engine.shapes import shape_named, write_model
from sagellm.benchmarks.micro.cases import MicroBenchPlan, MicroBenchRow, Stopwatch
from sagellm.benchmarks.reporting import Table
from sagellm.core.config import Config
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_backend, build_engine
from sagellm.engines.engine import Engine

ACCEPTANCES = (0.2, 0.5, 0.8, 0.95)
LENGTHS = (0, 1, 2, 4, 8)
"""Proposed tokens of every request and step; the last is the most of the engine that chooses."""
ADAPTIVE, CHOSEN = "adaptive", "chosen"
SPEED, LENGTH = "tokens/s", "tokens/step"
NUM_LAYERS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 32, 64


class ThreadClock:
    """CPU time of the calling thread."""

    def now(self) -> float:
        return time.thread_time()


def by_acceptance(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Tokens per second, and how many tokens the planner lets a request verify."""
    shape = shape_named("S").changed(num_hidden_layers=min(NUM_LAYERS, plan.layers))
    with TemporaryDirectory(prefix="sagellm-bench-") as folder:
        write_model(shape, Path(folder))
        backend = build_backend(_config(folder, plan))
        try:
            for batch in plan.batches:
                for acceptance in ACCEPTANCES:
                    engines = _engines(backend, _config(folder, plan, acceptance))
                    yield from _compared(engines, batch, acceptance, plan.rounds)
        finally:
            backend.close()


def _config(folder: str, plan: MicroBenchPlan, acceptance: float = 0.0) -> Config:
    return Config.model_validate(
        {
            "model": {"name": folder, "dtype": "bfloat16", "max_model_len": 512},
            "kv": {"num_blocks": 16 * max(plan.batches), "prefix_caching": False},
            "scheduler": {"max_num_seqs": max(plan.batches)},
            "engine": {"threads": 1},
            "speculative": {"method": "synthetic", "method_options": {"acceptance": acceptance}},
        }
    )


def _engines(backend: InferenceBackend, config: Config) -> dict[str, Engine]:
    """By number of proposed tokens. They share the backend, and run one after the other."""

    def engine(**changed: object) -> Engine:
        speculative = config.speculative.model_copy(update=changed)
        return build_engine(
            config.model_copy(update={"speculative": speculative}), backend, clock=ThreadClock()
        )

    found = {"0": engine(method="none", method_options={})}
    found |= {str(length): engine(num_tokens=length, adaptive=False) for length in LENGTHS[1:]}
    return found | {ADAPTIVE: engine(num_tokens=LENGTHS[-1])}


def _compared(
    engines: Mapping[str, Engine], batch: int, acceptance: float, rounds: int
) -> Iterator[MicroBenchRow]:
    """The engines take turns. The first round is not counted; the planner learns in it."""
    speeds, proposed, case = defaultdict[str, list[float]](list), list[float](), f"acceptance {acceptance}"
    for turn in range(1 + rounds):
        names = list(engines)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            speed, length = _decode(engines[name], batch, turn)
            if turn:
                speeds[name].append(speed)
                proposed += [length] * (name == ADAPTIVE)
    for name in engines:
        yield MicroBenchRow("a", case, batch, name, SPEED, median(speeds[name]))
    yield MicroBenchRow("a", case, batch, CHOSEN, LENGTH, median(proposed))


def _decode(engine: Engine, batch: int, turn: int) -> tuple[float, float]:
    """Tokens per second behind the first, and proposed tokens by request and step."""
    for number in range(batch):
        name, first = f"{turn}.{number}", 1 + number
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        engine.add(Request(name, Tokens(range(first, first + PROMPT_TOKENS)), params))
    engine.step()
    num_tokens = num_rows = num_proposed = 0
    began_s = time.thread_time()
    while engine.has_work():
        num_tokens += sum(len(output.new_token_ids) for output in engine.step())
        if engine.last_plan is not None:
            num_rows += len(engine.last_plan.decode_rows)
            num_proposed += engine.last_plan.num_proposed_tokens
    return num_tokens / (time.thread_time() - began_s), num_proposed / max(1, num_rows)


def acceptance_table(rows: Sequence[MicroBenchRow]) -> Table:
    """A line for each batch and acceptance.

    A star marks the constant length that is nearest to the planner's.
    """
    values = {(row.size, row.case, row.variant): row.value for row in rows}
    lines: list[list[str]] = []
    for batch, case in dict.fromkeys((row.size, row.case) for row in rows):
        found = {name: values[batch, case, name] for name in (*map(str, LENGTHS), ADAPTIVE, CHOSEN)}
        chosen = min(LENGTHS, key=lambda length: abs(length - found[CHOSEN]))
        speeds = [f"{found[str(length)]:.1f}{' *' * (length == chosen)}" for length in LENGTHS]
        best = max(found[str(length)] for length in LENGTHS)
        ratios = [f"{found[ADAPTIVE] / other:.2f}" for other in (best, found["0"])]
        lines.append(
            [str(batch), case.split()[-1], *speeds, f"{found[ADAPTIVE]:.1f}", f"{found[CHOSEN]:.1f}", *ratios]
        )
    columns = (
        "batch",
        "acceptance",
        *(f"{length}" for length in LENGTHS),
        ADAPTIVE,
        CHOSEN,
        "of best",
        "of 0",
    )
    title = "tokens per second of thread CPU time, by proposed tokens; *: nearest to what the planner chose"
    return Table(title, columns, lines, num_names=2)
