"""Conversations in vLLM's `LLM` on a CPU, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import json, os, random, signal, sys
from sagellm.engines.vllm import register
register()
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

def main():
    folder, config = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(
        folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=512, max_num_seqs=4,
        block_size=32, num_gpu_blocks_override=40, dtype="float32", disable_log_stats=True,
        kv_transfer_config=KVTransferConfig(**config) if config else None,
    )
    rng, params = random.Random(0), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    sessions = [[5 + i] * 64 for i in range(9)]
    tokens, cached = [], 0
    reloaded = [word.removeprefix("reload=") for word in sys.argv[3:] if word.startswith("reload=")]
    for turn in range(4):
        if turn == 2 and reloaded:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": reloaded[0]})
            assert llm.reset_prefix_cache()
        for first in range(0, 9, 3):
            group = sessions[first : first + 3]
            for prompt in group:
                prompt += [rng.randrange(10, 200) for _ in range(40)]
            answers = llm.generate([{"prompt_token_ids": prompt} for prompt in group], params, use_tqdm=False)
            for prompt, answer in zip(group, answers):
                tokens.append(list(answer.outputs[0].token_ids))
                cached += answer.num_cached_tokens
                prompt += tokens[-1]
    print("ANSWER " + json.dumps([tokens, cached]), flush=True)
    if "die" in sys.argv[3:]:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main()
"""


def generated(
    folder: Path, config: dict[str, Any] | None, *, dies: bool = False, reloaded: Path | None = None
) -> tuple[list[list[int]], int, str]:
    """The tokens of all answers, the reused tokens of prompts, and the log.

    `dies`: the process kills itself (SIGKILL) after the last answer. `reloaded`: a folder with other weights,
    which replace those of the model after two turns of four.
    """
    script = folder / "script.py"
    script.write_text(SCRIPT)
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    words = ["die"] * dies + ([f"reload={reloaded}"] if reloaded else [])
    done = subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps(config), *words],
        env=os.environ | settings, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == (-9 if dies else 0), log[-4000:]
    answer = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
    tokens, cached = json.loads(answer.removeprefix("ANSWER "))
    return tokens, cached, log
