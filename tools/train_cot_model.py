"""Trains a model that reasons on after it knows the answer, from the demo's.

    python tools/train_cot_model.py --out FOLDER [--steps N]

The data is that of `cot_data.py`. The model is no part of the wheel: it is for measuring early exits
(`benchmarks/early_exit.py`), to which the demo model's own reasoning, whose every digit is needed, gives
nothing to save.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer

from cot_data import training_row
from demo_net import load_net
from demo_text import Row
from train_demo_model import (
    DEFAULT_OUT,
    Progress,
    Run,
    export,
    grouped,
    make_optimizers,
    set_rates,
    train_step,
)

POOL = 1024


def batches(tokenizer: Tokenizer, seed: int, batch_tokens: int) -> Iterator[list[Row]]:
    """Batches without end, of rows of like lengths."""
    pool = 0
    while True:
        made = [training_row(tokenizer, seed, pool * POOL + index) for index in range(POOL)]
        yield from grouped(made, batch_tokens, f"order:{seed}:{pool}")
        pool += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="Hugging Face folder to write")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-tokens", type=int, default=2560)
    parser.add_argument("--rate", type=float, default=1e-3, help="AdamW's rate for embeddings and gains")
    parser.add_argument("--matrix-rate", type=float, default=0.01, help="Muon's rate for matrices")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=200, help="steps between writes of the folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(DEFAULT_OUT / "tokenizer.json"))
    net = load_net(DEFAULT_OUT).train()
    run = Run(net, make_optimizers(net, args), Progress(), torch.compile(net.hidden, dynamic=True))
    set_rates(run, 1.0)
    rows, losses, began_s = batches(tokenizer, args.seed, args.batch_tokens), list[float](), time.monotonic()
    for step in range(args.steps):
        set_rates(run, min(1.0, (step + 1) / 50, 2 * (args.steps - step) / args.steps))
        losses.append(train_step(run, next(rows)))
        if (step + 1) % 50 == 0:
            spent_s = time.monotonic() - began_s
            print(f"step {step + 1} loss {sum(losses) / len(losses):.4f} {spent_s:.0f} s", flush=True)
            losses.clear()
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            export(net, tokenizer, args.out)


if __name__ == "__main__":
    main()
