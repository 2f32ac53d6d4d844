"""Trains a target for which the demo model is the draft.

It has the same tokens, 24 times as many weights, and is trained on the same data.

    python tools/train_draft_target.py --work-dir W/256 --out W/256 \\
        --hidden 256 --inner 768 --heads 8 --kv-heads 4
    python tools/train_draft_target.py --start W/256 --work-dir W/512 --out W/target [--steps 0]

The demo model is grown (`grow_net.py`) and trained on, in stages, since a small network learns more for each
second of a CPU: `--start` is what a stage grows, `--hidden` and so on what it becomes. Matrices are computed
in bfloat16, weights are kept in float32. A killed run resumes from the checkpoint in ``--work-dir``. The
conversations are those of a part of the training stream that the demo model has not seen. With `--steps 0` a
stage only grows. `benchmarks/peers_gguf.py` writes a folder as GGUF.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_net import DemoNet, load_net
from grow_net import grown
from train_demo_model import (
    DEFAULT_OUT,
    Progress,
    Run,
    make_optimizers,
    make_parser,
    net_config,
    resume,
    set_rates,
    train_and_write,
)

FIRST_POOL = 1000
"""The demo model has seen fewer pools of conversations."""


def arguments() -> argparse.Namespace:
    """The command line: that of the demo model's training, with other defaults."""
    parser = make_parser()
    parser.description = __doc__
    parser.add_argument("--start", type=Path, default=DEFAULT_OUT, help="Hugging Face folder to grow")
    parser.add_argument("--first-pool", type=int, default=FIRST_POOL, help="of the training conversations")
    parser.set_defaults(
        hidden=512, inner=1536, layers=8, heads=16, kv_heads=8, matrix_rate=0.002, rate=3e-4, decay=1.0
    )
    return parser.parse_args()


def begin(args: argparse.Namespace) -> Run[DemoNet]:
    """The grown network, or the run that the work folder's checkpoint left off."""
    torch.manual_seed(args.seed)
    small = load_net(args.start)
    net = grown(small, net_config(args, small.config.vocab_size), args.seed).train()
    progress = Progress(pool=args.first_pool)
    run = Run(net, make_optimizers(net, args), progress, lambda tokens: hidden_in_bfloat16(net, tokens))
    set_rates(run, 1.0)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    resume(run, args.work_dir / "checkpoint.pt")
    return run


def hidden_in_bfloat16(net: DemoNet, tokens: Tensor) -> Tensor:
    """The network's last hidden states, its matrices multiplied in bfloat16; float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net.hidden(tokens).float()


def main() -> None:
    """Train one stage and write its folder."""
    args = arguments()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
    train_and_write(begin(args), tokenizer, args)


if __name__ == "__main__":
    main()
