"""Long prompts for minutes through an engine with tiers: throughput, failures, memory.

    python benchmarks/tier_endurance.py --minutes 10 --tokens 32768 [--disk-folder DIR_ON_A_DISK]
    python benchmarks/tier_endurance.py --minutes 10 --tokens 131072 --metadata

`--hot` prompts of `--tokens` tokens are asked in turns, in a new random order each time, two at a time;
each request adds `--tail` new tokens, so tiers fill up and evict. The device's pool holds a little more
than two such prompts, the host holds all hot ones and the ends of four cycles, the disk twice as much.
Windows begin once the host tier has evicted. `--metadata`: a backend whose KV are the tokens themselves
(`TokenMemoryBackend`): all books, host memory and threads, every answer is checked, and nothing else is
computed.

Printed: prompt tokens per second in windows of `--cycles` cycles over the hot prompts, and the largest
deviation from their mean; failed promotions, which are the blocks of hot prompts that were computed again,
over these and those that were loaded; growth of resident memory from the first window's end to the last
one's; and CPU time of the engine's thread in calls of the tiers, summed for each step.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sagellm.benchmarks.engine.shapes import shape_named, write_model
from sagellm.benchmarks.process import resident_bytes
from sagellm.benchmarks.reporting import environment
from sagellm.core.types import (
    CapabilityDescriptor,
    FinishReason,
    KVCacheSchema,
    Request,
    SamplingParams,
    Tokens,
)
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend

BLOCK, AT_ONCE, MB = 16, 2, 1 << 20
FILLED_BY = 4
"""Cycles whose ends the host tier holds beside the hot prompts."""


class NamedTokenMemory(TokenMemoryBackend):
    """Its KV has a fingerprint, without which tiers take nothing."""

    def get_kv_schema(self) -> KVCacheSchema:
        return replace(super().get_kv_schema(), model_fingerprint="tokens")

    def capability(self) -> CapabilityDescriptor:
        return replace(super().capability(), kv_schema=self.get_kv_schema())


@dataclass(frozen=True)
class Window:
    """Sums over some cycles. Blocks are of hot prompts; `rss_mb` is at its end."""

    num_tokens: int
    spent_s: float
    num_failed: int
    num_loaded: int
    rss_mb: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.spent_s


class TierCalls:
    """CPU time of this thread in calls of an engine's tiers. Summed for each step, in ns."""

    NAMES = ("offer", "request", "start_loads", "cancel", "poll")

    def __init__(self, engine: Engine) -> None:
        self.by_step: list[int] = []
        self._spent_ns, self._is_inside = 0, False
        for name in self.NAMES:
            setattr(engine.kv.tiers, name, self._timed(getattr(engine.kv.tiers, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if self._is_inside:
                return call(*args, **options)
            self._is_inside, began_ns = True, time.thread_time_ns()
            try:
                return call(*args, **options)
            finally:
                self._spent_ns += time.thread_time_ns() - began_ns
                self._is_inside = False

        return timed

    def step_ended(self) -> None:
        self.by_step.append(self._spent_ns)
        self._spent_ns = 0

    def figures(self) -> dict[str, float]:
        ordered = sorted(self.by_step)
        return {
            "steps": len(ordered),
            "tier_calls_p50_ms": ordered[len(ordered) // 2] / 1e6,
            "tier_calls_p99_ms": ordered[len(ordered) * 99 // 100] / 1e6,
            "tier_calls_max_ms": ordered[-1] / 1e6,
        }


class Workload:
    """Asks an engine for hot prompts with new ends, and keeps what it found."""

    def __init__(self, engine: Engine, num_hot: int, num_tokens: int, num_tail: int, num_answer: int) -> None:
        self.engine, self._num_tail, self.calls = engine, num_tail, TierCalls(engine)
        self._params = SamplingParams(max_tokens=num_answer, temperature=0.0, ignore_eos=True)
        self._rng, self._num_asked = random.Random(0), 0
        self._hot = [self._drawn(num_tokens) for _ in range(num_hot)]
        self._hot_blocks = num_tokens // BLOCK

    def cycle(self) -> tuple[int, int]:
        """Ask for each hot prompt once.

        Returns prompt tokens, and blocks of hot prompts that were computed.
        """
        waiting, num_open, num_tokens, num_failed = self._requests(), 0, 0, 0
        prompts: dict[str, list[int]] = {}
        while True:
            while num_open < AT_ONCE and (request := next(waiting, None)) is not None:
                self.engine.add(request)
                prompts[request.request_id] = list(request.tokens)
                num_open += 1
            if not num_open:
                return num_tokens, num_failed
            outputs = self.engine.step()
            self.calls.step_ended()
            for output in outputs:
                self._check(prompts[output.request_id], output.new_token_ids)
                if output.finish_reason is not None:
                    if output.finish_reason is not FinishReason.LENGTH:
                        raise RuntimeError(f"{output.request_id} ended: {output.error}")
                    num_open -= 1
                    num_tokens += output.num_prompt_tokens
                    num_failed += max(0, self._hot_blocks - output.num_cached_tokens // BLOCK)

    def _requests(self) -> Iterator[Request]:
        for hot in self._rng.sample(self._hot, len(self._hot)):
            self._num_asked += 1
            yield Request(f"r{self._num_asked}", Tokens(hot + self._drawn(self._num_tail)), self._params)

    def _check(self, text: list[int], token_ids: tuple[int, ...]) -> None:
        """Where the backend can say what the answer is, compare."""
        backend = self.engine.backend
        for token in token_ids:
            if isinstance(backend, TokenMemoryBackend) and backend.answer(Tokens(text)) != token:
                raise RuntimeError("another token than the prompt's own was drawn")
            text.append(token)

    def window(self, num_cycles: int) -> Window:
        before, began_s = self._num_loaded(), time.perf_counter()
        cycles = [self.cycle() for _ in range(num_cycles)]
        spent_s = time.perf_counter() - began_s
        gc.collect()
        num_tokens, num_failed = (sum(counts) for counts in zip(*cycles, strict=True))
        rss_mb = (resident_bytes() or 0) / MB
        return Window(num_tokens, spent_s, num_failed, self._num_loaded() - before, rss_mb)

    def _num_loaded(self) -> int:
        assert self.engine.kv.tiers is not None
        return sum(state.loaded for state in self.engine.kv.tiers.states())

    @property
    def is_warm(self) -> bool:
        """Whether the nearest tier has been filled once."""
        assert self.engine.kv.tiers is not None
        return self.engine.kv.tiers.states()[0].evicted > 0

    def _drawn(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(10, 30_000) for _ in range(num_tokens)]


def made_engine(asked: argparse.Namespace, model: dict[str, Any], block_bytes: int, kv_dir: Path) -> Engine:
    """Its pool and tiers in the sizes that the module's text says."""
    end = asked.tail + asked.answer + BLOCK
    longest = asked.tokens + end
    blocks = int(AT_ONCE * 1.1 * longest / BLOCK)
    host_gb = asked.hot * (asked.tokens + FILLED_BY * end) / BLOCK * block_bytes / 2**30
    given: dict[str, Any] = {
        "kv.num_blocks": blocks, "kv.block_size": BLOCK, "kv.host_gb": host_gb, "scheduler.max_num_seqs": 4,
    }  # fmt: skip
    if asked.disk_folder is not None:
        given |= {"kv.disk_gb": 2 * host_gb, "kv.dir": str(kv_dir)}
    if asked.metadata:
        config = load_config(cli={**given, "scheduler.max_batched_tokens": 32_768}, environ={}).config
        return build_engine(config, NamedTokenMemory(blocks, BLOCK, 4, longest, vocab_size=30_000))
    given["model.max_model_len"] = longest
    return build_engine(load_config(cli=given | model, environ={}).config)


def kv_block_bytes(model: dict[str, Any]) -> int:
    """Bytes of a KV block in the dtype that the engine chooses."""
    engine = build_engine(load_config(cli={**model, "kv.num_blocks": 64}, environ={}).config)
    size = engine.backend.get_kv_schema().bytes_per_block
    engine.close()
    return size


def endure(work: Workload, minutes: float, num_cycles: int) -> list[Window]:
    """Warm up, then measure for so many minutes, at least two windows."""
    began_s, num_warm_up = time.perf_counter(), 0
    while not work.is_warm:
        work.cycle()
        num_warm_up += 1
    work.calls.by_step.clear()
    print(f"warm-up: {num_warm_up} cycles, {time.perf_counter() - began_s:.0f} s", flush=True)
    windows, until_s = list[Window](), time.perf_counter() + 60 * minutes
    while len(windows) < 2 or time.perf_counter() < until_s:
        windows.append(work.window(num_cycles))
        last = windows[-1]
        print(
            f"  {last.tokens_per_s:8,.0f} tokens/s in {last.spent_s:.1f} s, {last.num_loaded:,} blocks loaded"
            f", {last.num_failed} failed, {last.rss_mb:,.0f} MB",
            flush=True,
        )
    return windows


def summary(windows: list[Window]) -> dict[str, float]:
    mean = sum(window.num_tokens for window in windows) / sum(window.spent_s for window in windows)
    failed, loaded = (
        sum(counts) for counts in zip(*((w.num_failed, w.num_loaded) for w in windows), strict=True)
    )
    return {
        "windows": len(windows),
        "tokens_per_s": mean,
        "largest_deviation": max(abs(window.tokens_per_s / mean - 1) for window in windows),
        "failed_promotions": failed / max(1, failed + loaded),
        "first_rss_mb": windows[0].rss_mb,
        "rss_growth_mb": windows[-1].rss_mb - windows[0].rss_mb,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--hot", type=int, default=4)
    parser.add_argument("--tail", type=int, default=256)
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=5, help="over the hot prompts, in a window")
    parser.add_argument("--shape", default="S")
    parser.add_argument("--dtype", default="auto", help="float32 where runs on several days are compared")
    parser.add_argument("--disk-folder", type=Path, help="for a disk tier below the host")
    parser.add_argument("--metadata", action="store_true", help="tokens as KV, no model")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=asked.disk_folder) as kv:
        model, block_bytes = {"model.name": folder, "model.dtype": asked.dtype}, 24 * BLOCK
        if not asked.metadata:
            positions = asked.tokens + asked.tail + asked.answer + 2 * BLOCK
            write_model(shape_named(asked.shape).changed(max_position_embeddings=positions), Path(folder))
            block_bytes = kv_block_bytes(model)
        engine = made_engine(asked, model, block_bytes, Path(kv, "kv"))
        work = Workload(engine, asked.hot, asked.tokens, asked.tail, asked.answer)
        windows = endure(work, asked.minutes, asked.cycles)
        engine.check()
        assert engine.kv.tiers is not None
        states = [state._asdict() for state in engine.kv.tiers.states()]
        engine.close()
    result = summary(windows) | work.calls.figures()
    print({name: round(value, 4) for name, value in result.items()})
    print(*states, sep="\n")
    if asked.out is not None:
        results = {
            "environment": asdict(environment()), "asked": vars(asked), "summary": result,
            "windows": [asdict(window) for window in windows], "tiers": states,
        }  # fmt: skip
        asked.out.write_text(json.dumps(results, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
