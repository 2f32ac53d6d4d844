"""Time per token of one engine, here and behind a front.

    python benchmarks/fleet_tpot.py --rows 32 --rounds 7 [--shape S] [--out FILE]

The same engine configuration computes the same requests: within this process, and in an instance that a
`FleetEngine` reaches over ZeroMQ. Both take turns, so other load of the machine affects both. TPOT is the
time from the first to the last token of all rows, divided by the steps between. At the front requests arrive
one after the other, so batches differ, and in bfloat16 a near tie may fall the other way: `equal` is the
share of equal answers.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sagellm.benchmarks.engine.shapes import shape_named, write_model
from sagellm.benchmarks.reporting import environment
from sagellm.control_plane.fleet.client import Instances
from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.router import make_router
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.clock import MonotonicClock
from sagellm.core.config import Config
from sagellm.core.processes import ProcessGroup, Role
from sagellm.core.protocols.engine import EngineCore
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine

ENTRY = "sagellm.serving.fleet.instance_process:run"
PROMPT, START_S = 32, 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """`tpot_ms`: mean between the first and the last token. `tokens`: by request."""

    tpot_ms: float
    tokens: dict[str, list[int]]


def serve(engine: EngineCore, rows: int, num_tokens: int, seed: int) -> Round:
    """Compute `rows` requests together. The first token of all marks the begin."""
    rng, tokens = random.Random(seed), {}
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for row in range(rows):
        prompt = Tokens(rng.choices(range(5, 500), k=PROMPT))
        engine.add(Request(f"{seed}-{row}", prompt, params))
        tokens[f"{seed}-{row}"] = list[int]()
    began_s: float | None = None
    while any(len(own) < num_tokens for own in tokens.values()):
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.new_token_ids
        if began_s is None and all(tokens.values()):
            began_s, num_begun = time.perf_counter(), min(map(len, tokens.values()))
    assert began_s is not None
    return Round(1000 * (time.perf_counter() - began_s) / (num_tokens - num_begun), tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="S")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").mkdir()
        write_model(shape_named(asked.shape), Path(folder) / "model")
        config = Config.model_validate(
            {
                "model": {"name": f"{folder}/model", "device": "cpu", "max_model_len": 1024},
                "kv": {"num_blocks": asked.rows * (PROMPT + asked.tokens) // 16 + 64, "prefix_caching": True},
                "scheduler": {"max_num_seqs": asked.rows},
                "engine": {"threads": asked.threads},
            }
        )
        figures = measure(config, Path(folder), asked)
    print(json.dumps(figures["summary"], indent=2))
    if asked.out:
        asked.out.write_text(json.dumps(figures, indent=1))


def measure(config: Config, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    key, clock, endpoint = FleetKey.new(), MonotonicClock(), f"ipc://{folder}/socket"
    options = {
        "name": "a",
        "kind": "general",
        "endpoint": endpoint,
        "key": key.text,
        "config": config.model_dump(mode="json"),
    }
    processes = ProcessGroup.start([Role("a", ENTRY, options)])
    instances = Instances(key, clock, lease_s=600.0)  # this thread computes between its turns
    front = FleetEngine(
        instances, make_router("cost", clock), PrefixIndex(clock), lambda *_: None, clock=clock
    )
    front.know(instances.add("a", endpoint))
    alone = build_engine(config)
    try:
        front.wait_until_ready(START_S)
        num_equal = 0
        spent: dict[str, list[float]] = {"one process": [], "behind a front": []}
        for number in range(asked.rounds + 1):  # the first is dropped
            ways: list[tuple[str, EngineCore]] = [("one process", alone), ("behind a front", front)]
            rounds = {
                way: serve(engine, asked.rows, asked.tokens, number)
                for way, engine in (ways if number % 2 else ways[::-1])
            }
            ours, theirs = rounds["one process"].tokens, rounds["behind a front"].tokens
            num_equal += sum(ours[name] == theirs[name] for name in ours)
            for way, made in rounds.items():
                if number:
                    spent[way].append(made.tpot_ms)
    finally:
        front.close()
        processes.close()
        alone.close()
    ratios = [front_ms / alone_ms for alone_ms, front_ms in zip(*spent.values(), strict=True)]
    summary = {way: median(each) for way, each in spent.items()} | {"ratio": median(ratios)}
    summary["equal"] = num_equal / ((asked.rounds + 1) * asked.rows)
    return {"environment": asdict(environment()), "rows": asked.rows, "summary": summary, "rounds_ms": spent}


if __name__ == "__main__":
    main()
