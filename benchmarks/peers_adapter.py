"""Our engine for the peers' harness `bench_engines.py`: pass this file as `--adapter`.

    python bench_engines.py run --models DIR --model S --out rows.jsonl --py-adapter .venv/bin/python \\
        --adapter benchmarks/peers_adapter.py --engines sagellm,sagellm-nopc,hf --py-hf PYTHON

An engine name that ends in `-nopc` runs with the prefix cache off, one that ends in `-torch` without CPU
kernels.
"""

from __future__ import annotations

import itertools
import time
from argparse import Namespace as Arguments
from collections.abc import Sequence
from typing import Any

import sagellm
from sagellm.core.types import FinishReason, Request, RequestOutput, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config

MAX_MODEL_LEN = 17000
MAX_NUM_SEQS = 64


class Result:
    """One request: arrival times of its tokens, the tokens, and the number reused. Times are in seconds after
    the batch was sent.

    No dataclass: the harness loads this file without registering it as a module.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.cached: int | None = None


class Adapter:
    """The harness's `Engine`: our engine at token level, greedy, end of sequence ignored."""

    def __init__(self, arguments: Arguments) -> None:
        wanted: dict[str, Any] = {
            "model.name": arguments.model_dir,
            "model.max_model_len": MAX_MODEL_LEN,
            "kv.prefix_caching": not arguments.engine.endswith("-nopc"),
            "scheduler.max_num_seqs": MAX_NUM_SEQS,
            "engine.threads": arguments.threads,
            "engine.kernels": "off" if arguments.engine.endswith("-torch") else "auto",
        }
        config = load_config(cli=wanted, environ={}).config
        self._engine = build_engine(config)
        self._ids = itertools.count()
        capability = self._engine.capability()
        self.settings = {
            "version": sagellm.__version__,
            "block_size": capability.block_size,
            "num_blocks": capability.num_blocks,
            "dtype": capability.dtype,
            "max_batched_tokens": config.scheduler.max_batched_tokens,
            "prefix_caching": config.kv.prefix_caching,
            "kernels": config.engine.kernels,
        }

    def configure(self, n_seqs: int, max_len: int) -> None:
        """Nothing depends on the workload."""

    def reset_cache(self) -> None:
        self._engine.kv.clear_cache()

    def close(self) -> None:
        self._engine.close()

    def run_batch(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Result]:
        """Sends all `(prompt ids, number of output tokens)` at once. Returns one `Result` each, in order."""
        began_s = time.perf_counter()
        results: dict[str, Result] = {}
        for prompt, num_output_tokens in requests:
            request_id = f"r{next(self._ids)}"
            results[request_id] = Result()
            params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
            self._engine.add(Request(request_id, Tokens(prompt), params))
        while self._engine.has_work():
            outputs = self._engine.step()
            now_s = time.perf_counter() - began_s
            for output in outputs:
                _take(results[output.request_id], output, now_s)
        return list(results.values())


def _take(result: Result, output: RequestOutput, now_s: float) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise RuntimeError(output.error)
    result.tokens += output.new_token_ids
    result.times += [now_s] * len(output.new_token_ids)
    result.cached = output.num_cached_tokens
