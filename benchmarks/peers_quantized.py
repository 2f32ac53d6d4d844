"""Measures llama.cpp's quantized models beside `sagellm bench engine --quant`. It measures decode at batch 1,
and the error of the logits.

    PEER_PYTHON benchmarks/peers_quantized.py --gguf S.gguf --model S --threads 1 --out rows.jsonl
    sagellm bench engine --model S --quant int8 --only decode-1 --threads 1 --compare rows.jsonl

Runs in an environment with llama-cpp-python and numpy, without sageLLM. The file is the bfloat16 one that the
peers' harness writes; llama.cpp's own quantizer makes the others from it, into a temporary folder. Prompts
are those of workload b1 and of `engine/run.py`. Rows have the harness's form; formats are measured in turns.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIRST_TOKEN = 300
DECODE_PROMPT, DECODE_OUTPUTS = 128, 64
NUM_PROMPTS, PROMPT_TOKENS = 64, 32
FORMATS = {"bf16": None, "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0"}


def tokens(seed: str, count: int, vocab_size: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(FIRST_TOKEN, vocab_size) for _ in range(count)]


class Model:
    """One file in llama.cpp, one sequence at a time."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp  # type: ignore[import-not-found]

        self._cpp = llama_cpp
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"{path} cannot be loaded: is it a GGUF file?")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = 256
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def forget(self) -> None:
        self._cpp.llama_memory_clear(self._cpp.llama_get_memory(self._context), True)

    def logits(self, token_ids: Sequence[int]) -> Any:
        """After these tokens, which follow those before: float32 [vocab]."""
        import numpy as np

        given = (self._cpp.llama_token * len(token_ids))(*token_ids)
        if self._cpp.llama_decode(self._context, self._cpp.llama_batch_get_one(given, len(token_ids))):
            raise SystemExit("llama_decode failed")
        return np.ctypeslib.as_array(self._cpp.llama_get_logits_ith(self._context, -1), (self.vocab_size,))

    def decode_rate(self, repeat: int) -> float:
        """Tokens per second after the first, greedy: workload b1."""
        self.forget()
        last = int(self.logits(tokens(f"b1/{repeat}", DECODE_PROMPT, self.vocab_size)).argmax())
        began_s = time.perf_counter()
        for _ in range(DECODE_OUTPUTS - 1):
            last = int(self.logits([last]).argmax())
        return (DECODE_OUTPUTS - 1) / (time.perf_counter() - began_s)

    def answers(self) -> Any:
        """The logits after each of the fixed prompts, float32 [prompts, vocab]."""
        import numpy as np

        rows = []
        for i in range(NUM_PROMPTS):
            self.forget()
            rows.append(self.logits(tokens(f"q/{i}", PROMPT_TOKENS, self.vocab_size)).copy())
        return np.stack(rows)


def quantized(path: Path, name: str, folder: Path) -> Path:
    import llama_cpp

    if FORMATS[name] is None:
        return path
    made, parameters = folder / f"{name}.gguf", llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, str(FORMATS[name]))
    if llama_cpp.llama_model_quantize(str(path).encode(), str(made).encode(), parameters):
        raise SystemExit(f"{path} cannot be quantized to {name}")
    return made


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import numpy as np

    rows: list[dict[str, Any]] = []

    def add(name: str, workload: str, repeat: int, **values: float) -> None:
        row = {"engine": f"llamacpp-{name}", "model": arguments.model, "threads": arguments.threads}
        rows.append({**row, "workload": workload, "rep": repeat, **values})
        print(json.dumps(rows[-1]), flush=True)

    with tempfile.TemporaryDirectory(prefix="quantized-") as folder:
        models = {
            name: Model(quantized(arguments.gguf, name, Path(folder)), arguments.threads) for name in FORMATS
        }
        expected = models["bf16"].answers()
        for name, model in models.items():
            distance = float(np.linalg.norm(model.answers() - expected) / np.linalg.norm(expected))
            add(name, "q", 0, rel_l2=distance)
        for repeat in range(arguments.repeats):
            for name, model in models.items():
                add(name, "b1", repeat, decode_tps=model.decode_rate(repeat))
    return rows


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--gguf", type=Path, required=True, help="the model in bfloat16")
    parser.add_argument("--model", required=True, help="its name in rows")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = measure(arguments)
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
