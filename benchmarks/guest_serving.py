"""Times vLLM on a CPU: stock, in shadow mode, guided, with our store.

    VLLM_PYTHON benchmarks/guest_serving.py MODEL [--workload rounds|any|batch32]
        [--modes stock,shadow,on,store,store+on] [--host-gb 4] [--disk-gb 20]

`rounds`: sessions that take one turn each per round, in an order drawn anew for each round; `any`: each turn
is that of any session. Prompts extend the session's last one; all sessions together have three times the
tokens that the KV cache holds. `store` keeps KV in host memory and, with `--disk-gb`, in a temporary folder
of `--dir`; `store+on` is guided as well. `batch32`: 32 rows that decode, nothing is evicted. Each mode runs
in a process of its own, `--repeat` times in turns; the model is a folder with any shape, in float32 unless
`--dtype` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BLOCK = 32
SYSTEM, FIRST, MORE = 2, (4, 12), (1, 4)
"""Blocks of a prompt that all sessions share, of a first turn, and of each later one."""
NUM_OUTPUT = 8


def prompts(workload: str, sessions: int, turns: int, seed: int) -> tuple[list[list[int]], int]:
    """Token ids in the order of sending, and the blocks of the cache."""
    rng = random.Random(seed)

    def text(num_blocks: int) -> list[int]:
        return [rng.randrange(100, 30_000) for _ in range(BLOCK * num_blocks)]

    if workload == "batch32":
        return [text(4) for _ in range(32)], 2000
    shared = text(SYSTEM)
    paths = [shared + text(rng.randrange(*FIRST)) for _ in range(sessions)]
    if workload == "rounds":
        order = [name for _ in range(turns) for name in rng.sample(range(sessions), sessions)]
    else:
        order = rng.sample([*range(sessions)] * turns, sessions * turns)
    sent = []
    for name in order:
        paths[name] += text(rng.randrange(*MORE))
        sent.append(list(paths[name]))
    return sent, sum(map(len, paths)) // BLOCK // 3


def transfer(asked: dict[str, Any]) -> dict[str, Any]:
    """The `--kv-transfer-config` of a mode; empty for stock."""
    members = []
    for mode in asked["mode"].split("+"):
        if mode == "store":
            settings = {"host_gb": asked["host_gb"], "disk_gb": asked["disk_gb"], "dir": asked["dir"]}
            members.append({"kv_connector": "SageStoreConnector", "kv_connector_extra_config": settings})
        elif mode != "stock":
            settings = {"mode": mode, "report_s": 0}
            members.append({"kv_connector": "SageConnector", "kv_connector_extra_config": settings})
    members = [{"kv_role": "kv_both", "kv_load_failure_policy": "recompute"} | member for member in members]
    if len(members) < 2:
        return members[0] if members else {}
    extra = {"connectors": members}
    return members[0] | {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}


def child(asked: dict[str, Any]) -> None:
    """One run; prints a line of JSON."""
    from sagellm.engines.vllm import register

    register()
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.config import KVTransferConfig

    sent, num_blocks = prompts(asked["workload"], asked["sessions"], asked["turns"], asked["seed"])
    decodes = asked["workload"] == "batch32"
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=asked["model"], skip_tokenizer_init=True, enforce_eager=True,
            max_model_len=max(map(len, sent)) + 256,
            max_num_seqs=32 if decodes else asked["concurrency"], max_num_batched_tokens=2048,
            block_size=BLOCK, num_gpu_blocks_override=1 + num_blocks,
            dtype=asked["dtype"], disable_log_stats=True, async_scheduling=False,
            kv_transfer_config=KVTransferConfig(**config) if (config := transfer(asked)) else None,
        )
    )  # fmt: skip
    scheduler = engine.engine_core.engine_core.scheduler
    scheduling_s = 0.0

    def timed(function: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal scheduling_s
            began_s = time.thread_time()
            result = function(*arguments, **options)
            scheduling_s += time.thread_time() - began_s
            return result

        return run

    scheduler.schedule = timed(scheduler.schedule)
    scheduler.update_from_output = timed(scheduler.update_from_output)
    params = SamplingParams(temperature=0.0, max_tokens=192 if decodes else NUM_OUTPUT, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    cached, steps, began_s, began_cpu_s, number = 0, [], time.perf_counter(), time.process_time(), 0
    while number < len(sent) or engine.has_unfinished_requests():
        while number < len(sent) and engine.get_num_unfinished_requests() < asked["concurrency"]:
            engine.add_request(str(number), {"prompt_token_ids": sent[number]}, params)
            number += 1
        step_s = time.perf_counter()
        for result in engine.step():
            if result.finished:
                answers[result.request_id] = list(result.outputs[0].token_ids)
                cached += result.num_cached_tokens or 0
        steps.append(time.perf_counter() - step_s)
    total_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    print(
        "RESULT "
        + json.dumps(
            {
                "total_s": total_s,
                "cpu_s": cpu_s,
                "step_s": statistics.median(steps[8:-8] or steps),
                "scheduling_us": 1e6 * scheduling_s / len(steps),
                "prompt_tokens": sum(map(len, sent)),
                "cached_tokens": cached,
                "answers": [answers[str(i)] for i in range(len(sent))],
            }
        )
    )


def measured(asked: dict[str, Any]) -> dict[str, Any]:
    """A run with an empty folder for its disk tier."""
    if asked["disk_gb"] and "store" in asked["mode"]:
        with TemporaryDirectory(dir=asked["dir"]) as folder:
            return _measured(asked | {"dir": folder})
    return _measured(asked | {"dir": ""})


def _measured(asked: dict[str, Any]) -> dict[str, Any]:
    """A run in a process of its own."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(asked)],
        env=os.environ | settings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{asked['mode']}: no result\n{(done.stdout + done.stderr)[-3000:]}")
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--workload", choices=("rounds", "any", "batch32"), default="rounds")
    parser.add_argument("--modes", default="stock,on")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--host-gb", type=float, default=4.0)
    parser.add_argument("--disk-gb", type=float, default=0.0)
    parser.add_argument("--dir", type=Path, help="parent of the disk tier's folder; default: the system's")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    asked = vars(parser.parse_args())
    modes, repeat = asked.pop("modes").split(","), asked.pop("repeat")
    asked["model"] = str(asked["model"].resolve())
    asked["dir"] = asked["dir"] and str(asked["dir"])
    asked["concurrency"] = 32 if asked["workload"] == "batch32" else asked["concurrency"]
    rows: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    for _ in range(repeat):
        for mode in modes:
            rows[mode].append(measured(asked | {"mode": mode}))
    first = rows[modes[0]]
    for mode, found in rows.items():
        total_s, cpu_s, step_s, scheduling_us = (
            statistics.median(row[key] for row in found)
            for key in ("total_s", "cpu_s", "step_s", "scheduling_us")
        )
        ratio = total_s / statistics.median(row["total_s"] for row in first)
        cached = found[0]["cached_tokens"] / found[0]["prompt_tokens"]
        same = sum(map(list.__eq__, found[0]["answers"], first[0]["answers"]))
        print(
            f"{mode}: {total_s:.1f} s ({ratio:.3f} of {modes[0]}), {cpu_s:.1f} s of CPU,"
            f" {cached:.1%} of {found[0]['prompt_tokens']:,} prompt tokens reused,"
            f" step {1e3 * step_s:.2f} ms, scheduling {scheduling_us:.0f} us a step,"
            f" {same} of {len(found[0]['answers'])} answers as {modes[0]}'s",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    else:
        main()
