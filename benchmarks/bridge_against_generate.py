"""Measures the transformers bridge beside `transformers.generate`, on a random model of size S.

    OMP_NUM_THREADS=2 python benchmarks/bridge_against_generate.py --model-type helium --batches 1 8 32

Both run in this process, in turns, with the same prompts and number of tokens. A figure is the median of
tokens per second, prompts included; the library runs in all `--dtypes`, and its fastest one counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config

S = {
    "vocab_size": 32_000, "hidden_size": 1024, "num_hidden_layers": 12, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 32_768,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip


def ours(folder: Path, threads: int) -> Callable[[list[list[int]], int], None]:
    """Generates greedily through the bridge."""
    settings = {
        "model.name": str(folder), "model.implementation": "transformers", "model.max_model_len": 1024,
        "kv.prefix_caching": False, "engine.threads": threads,
    }  # fmt: skip
    engine = build_engine(load_config(cli=settings, environ={}).config)

    def generate(prompts: list[list[int]], count: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add(Request(str(i), Tokens(prompt), params))
        tokens = 0
        while engine.has_work():
            tokens += sum(len(output.new_token_ids) for output in engine.step())
        assert tokens == len(prompts) * count

    return generate


def theirs(folder: Path, kind: Any, dtype: torch.dtype) -> Callable[[list[list[int]], int], None]:
    """Generates greedily by `generate` of the library."""
    model = kind.from_pretrained(folder, dtype=dtype).eval()

    def generate(prompts: list[list[int]], count: int) -> None:
        ids = torch.tensor(prompts)
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
            do_sample=False,
        )  # fmt: skip
        assert made.shape[1] == ids.shape[1] + count

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-type", default="helium")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="those of the library")
    given = parser.parse_args()
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[given.model_type]
    kind = getattr(transformers, names if isinstance(names, str) else names[0])
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        kind(CONFIG_MAPPING[given.model_type](**S)).bfloat16().save_pretrained(folder)
        sides = {
            **{f"generate {name}": theirs(Path(folder), kind, getattr(torch, name)) for name in given.dtypes},
            "bridge": ours(Path(folder), given.threads),
        }
        kernel_threads = torch.get_num_threads()
        for batch in given.batches:
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(given.rounds + 1):
                prompts = torch.randint(3, 32_000, (batch, given.prompt)).tolist()
                for name, generate in sides.items():
                    torch.set_num_threads(kernel_threads if name == "bridge" else given.threads)
                    began_s = time.perf_counter()
                    generate(prompts, given.tokens)
                    if turn:  # the first one warms up
                        rates[name].append(batch * given.tokens / (time.perf_counter() - began_s))
            rate = {name: median(values) for name, values in rates.items()}
            best = max(value for name, value in rate.items() if name != "bridge")
            shown = ", ".join(f"{name} {value:.1f}" for name, value in rate.items())
            print(f"batch {batch}: {shown} tokens/s; bridge {rate['bridge'] / best:.2f}x", flush=True)


if __name__ == "__main__":
    main()
