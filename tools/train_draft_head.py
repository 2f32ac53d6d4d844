"""Trains a draft head for the demo model, or another of our small models.

From a seed alone, on one CPU core: `python tools/train_draft_head.py --work-dir FOLDER` made the shipped
file. The head imitates the model at `--guesses` places in a row, on the conversations that the model was
trained on. A killed run resumes from the checkpoint in ``--work-dir``, and from there on leaves out other
hidden states than a whole one.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo_head import DemoHead, KeysValues, head_names
from demo_net import DemoNet, load_net
from demo_text import Row
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.head_files import HEAD_FILE, TRAINED_FOR, head_mark
from train_demo_model import (
    DEFAULT_OUT,
    Progress,
    Run,
    make_optimizers,
    optimized,
    resume,
    set_rates,
    stream,
    tensors,
    train,
)

WEIGHT_OF_NEXT = 0.8
"""A guess counts so much of the one before it."""
LOST = 0.01
"""Share of places at which the hidden state is not known, as behind a prefix that was cached."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_OUT, help="Hugging Face folder of the model")
    parser.add_argument("--out", type=Path, default=None, help=f"file to write; default: MODEL/{HEAD_FILE}")
    parser.add_argument("--work-dir", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--stop-at", type=int, default=None, help="leave after this step")
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--decay", type=float, default=0.6, help="share of the steps with a falling rate")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=2e-3, help="AdamW's rate for gains")
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="Muon's rate for matrices")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-minutes", type=float, default=1.0)
    parser.add_argument("--copying", type=int, nargs=2, default=[3, 5], help="pools of copying, from and to")
    parser.add_argument("--lists-from", type=int, default=5, help="first pool that leans to lists and tables")
    return parser.parse_args()


@dataclass
class Guesses:
    """Of each guess in a row, which learnt places [n] it gets right.

    `loss` is that of all.
    """

    loss: Tensor
    right: list[Tensor]

    @property
    def rates(self) -> list[float]:
        """Of each guess, how often it and those before it are right."""
        together = torch.stack(self.right).cumprod(0)
        return together.float().mean(1).tolist()


def guess(net: DemoNet, head: DemoHead, batch: list[Row], count: int, *, lost: float = 0.0) -> Guesses:
    """Let the head guess `count` tokens in a row from each place.

    The target is the model's own distribution at the guessed place.
    """
    inputs, _, learnt = tensors(batch)
    with torch.no_grad():
        hidden = net.hidden(inputs)
        scores = net.logits(hidden)
        before = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        before = before * (torch.rand(inputs.shape) >= lost).unsqueeze(-1)
    earlier: list[KeysValues] = []
    loss, right = torch.zeros(()), list[Tensor]()
    learnt = learnt.clone()
    learnt[:, -count:] = False  # what follows is beyond the text
    for number in range(count):
        output = head(net, inputs, before, earlier)
        places = learnt.roll(number, 1)
        own, wanted = net.logits(output[places]), scores[places]
        own_loss = F.kl_div(
            own.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True
        )
        loss = loss + WEIGHT_OF_NEXT**number * own_loss
        right.append(own.argmax(-1) == wanted.argmax(-1))
        before = F.pad(output, (0, 0, 1, 0))[:, :-1]
    return Guesses(loss, right)


def train_step(run: Run[DemoHead], net: DemoNet, batch: list[Row], count: int) -> float:
    """One optimiser step; returns the loss."""
    made = guess(net, run.net, batch, count, lost=LOST)
    return optimized(run, made.loss, batch)


def export(head: DemoHead, folder: Path, path: Path) -> None:
    """Write the head, whole or not at all. It is marked as that of the model in `folder`."""
    prefix = head_names(head.config)
    weights = {prefix + name: w.to(torch.bfloat16).contiguous() for name, w in head.state_dict().items()}
    new = path.with_suffix(".new")
    save_file(weights, new, metadata={"format": "pt", TRAINED_FOR: head_mark(folder, Checkpoint(folder))})
    new.chmod(0o644)
    new.replace(path)


def main() -> None:
    """Train and write the head."""
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    net = load_net(args.model).requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    head = DemoHead(net.config)
    head.start_from(net)
    run = Run(head, make_optimizers(head, args), Progress(), head.forward)
    set_rates(run, 1.0)
    resume(run, args.work_dir / "head.pt")
    if run.progress.step:
        torch.manual_seed(args.seed + run.progress.step)
    print(f"{sum(weight.numel() for weight in head.parameters())} parameters", flush=True)

    def step(batch: list[Row]) -> float:
        return train_step(run, net, batch, args.guesses)

    @torch.no_grad()
    def show(batch: list[Row]) -> None:
        if run.progress.step % 100 == 0:
            print([round(rate, 3) for rate in guess(net, head, batch, args.guesses).rates], flush=True)

    train(run, stream(tokenizer, args, run.progress), args, args.work_dir / "head.pt", step, show)
    export(head, args.model, args.out or args.model / HEAD_FILE)


if __name__ == "__main__":
    main()
