"""vLLM's `LLM` on a CPU, with a random model: the plug-in changes no token, and vLLM finds it by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from sagellm.benchmarks.engine.shapes import shape_named, write_model

pytestmark = [
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="needs vLLM's CPU build"),
]
SCRIPT = """
import json, random, sys
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
    for turn in range(4):
        for first in range(0, 9, 3):
            group = sessions[first : first + 3]
            for prompt in group:
                prompt += [rng.randrange(10, 200) for _ in range(40)]
            answers = llm.generate([{"prompt_token_ids": prompt} for prompt in group], params, use_tqdm=False)
            for prompt, answer in zip(group, answers):
                tokens.append(list(answer.outputs[0].token_ids))
                cached += answer.num_cached_tokens
                prompt += tokens[-1]
    print("ANSWER " + json.dumps([tokens, cached]))

if __name__ == "__main__":
    main()
"""


def generated(folder: Path, config: dict[str, Any] | None) -> tuple[list[list[int]], int, str]:
    """The tokens of all answers, the reused tokens of prompts, and the log."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    done = subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps(config)],
        env=os.environ | settings, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    answer = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
    tokens, cached = json.loads(answer.removeprefix("ANSWER "))
    return tokens, cached, log


def test_the_tokens_are_the_same_off_in_shadow_and_on(tmp_path: Path) -> None:
    write_model(shape_named("tiny"), tmp_path)
    own = {"kv_connector": "SageConnector", "kv_role": "kv_both"}
    modes = {
        mode: own | {"kv_connector_extra_config": {"mode": mode, "report_s": 1e-3}}
        for mode in ("shadow", "on")
    }
    stock, num_stock, _ = generated(tmp_path, None)
    shadow, num_shadow, log = generated(tmp_path, modes["shadow"])
    guided, num_guided, guided_log = generated(tmp_path, modes["on"])
    assert stock == shadow == guided
    assert len(stock) == 36
    assert num_stock == num_shadow > 0
    assert num_guided > 0
    assert "order of eviction: vLLM's own" in log
    assert "order of eviction: adaptive" in guided_log
