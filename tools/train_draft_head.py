"""Trains a draft head for the demo model, or another of our small models.

From a seed alone, on one CPU core: `python tools/train_draft_head.py --work-dir FOLDER` made the shipped
file. The head, of the kind `--kind`, imitates the model at `--guesses` places in a row, on the conversations
that the model was trained on. In the end the script says how many guesses are right, on the model's own
answers to questions that no training saw. A killed run resumes from the checkpoint in ``--work-dir``, and
from there on leaves out other hidden states than a whole one.
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

from demo_data import MAKERS, evaluation_set
from demo_head import HEADS, AnyHead, head_names, load_head
from demo_net import DemoNet, greedy, load_net
from demo_text import TURN_END, Row, prompt_text
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.head_files import HEAD_FILE, HEAD_KIND, TRAINED_FOR, head_mark
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

HELD_OUT = 25
"""Questions of each task that are asked in the end."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_OUT, help="Hugging Face folder of the model")
    parser.add_argument("--out", type=Path, default=None, help=f"file to write; default: MODEL/{HEAD_FILE}")
    parser.add_argument("--work-dir", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--begin-with", type=Path, help="a head with whose tensors this one begins")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--stop-at", type=int, default=None, help="leave after this step")
    parser.add_argument("--kind", choices=list(HEADS), default="eagle")
    parser.add_argument("--guesses", type=int, default=None, help="in a row; default: eagle 4, others 8")
    parser.add_argument("--decay", type=float, default=0.6, help="share of the steps with a falling rate")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=2e-3, help="AdamW's rate for gains")
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="Muon's rate for matrices")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-minutes", type=float, default=1.0)
    parser.add_argument("--copying", type=int, nargs=2, default=[3, 5], help="pools of copying, from and to")
    parser.add_argument("--lists-from", type=int, default=5, help="first pool that leans to lists and tables")
    args = parser.parse_args()
    args.guesses = args.guesses or (4 if args.kind == "eagle" else 8)
    return args


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


def guess(net: DemoNet, head: AnyHead, batch: list[Row], count: int, *, lost: float = 0.0) -> Guesses:
    """Let the head guess `count` tokens in a row from each place.

    The target is the model's own distribution at the guessed place.
    """
    inputs, _, own = tensors(batch)
    with torch.no_grad():
        hidden = net.hidden(inputs)
        scores = net.logits(hidden)
        before = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        before = before * (torch.rand(inputs.shape) >= lost).unsqueeze(-1)
    loss, right = torch.zeros(()), list[Tensor]()
    learnt = own.clone()
    learnt[:, -count:] = False  # what follows is beyond the text
    for number, output in enumerate(head.guesses(net, inputs, before, count)):
        places = learnt.roll(number, 1)
        found, wanted = net.logits(output[places]), scores[places]
        own_loss = F.kl_div(
            found.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True
        )
        loss = loss + WEIGHT_OF_NEXT**number * own_loss
        right.append((found.argmax(-1) == wanted.argmax(-1)) & own[places])
    return Guesses(loss, right)


def train_step(run: Run[AnyHead], net: DemoNet, batch: list[Row], count: int) -> float:
    """One optimiser step; returns the loss."""
    made = guess(net, run.net, batch, count, lost=LOST)
    return optimized(run, made.loss, batch)


@torch.no_grad()
def held_out(net: DemoNet, head: AnyHead, tokenizer: Tokenizer, count: int, guesses: int) -> list[float]:
    """How often guesses are right, and those before them.

    They are made behind each token of the model's own answers. `count`: questions of each task, of the part
    that chooses between heads.
    """
    asked = [prompt_text(made) for kind in MAKERS for made in evaluation_set("validation", kind, count)]
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(asked, add_special_tokens=False)]
    stop = int(tokenizer.token_to_id(TURN_END) or 0)
    answers = [[*ids, stop] for ids in greedy(net, prompts, stop, limit=160)]
    batch = [
        Row(prompt + answer + [0] * guesses, [False] * len(prompt) + [True] * len(answer) + [False] * guesses)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return guess(net, head, batch, guesses).rates


def export(head: AnyHead, folder: Path, path: Path) -> None:
    """Write the head, whole or not at all. It is marked as that of the model in `folder`."""
    prefix = head_names(head)
    weights = {prefix + name: w.to(torch.bfloat16).contiguous() for name, w in head.state_dict().items()}
    new = path.with_suffix(".new")
    mark = head_mark(folder, Checkpoint(folder))
    save_file(weights, new, metadata={"format": "pt", HEAD_KIND: head.kind, TRAINED_FOR: mark})
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
    head = HEADS[args.kind](net.config, args.guesses)
    head.start_from(net)
    if args.begin_with is not None:
        head.load_state_dict(load_head(args.begin_with, net.config).state_dict(), strict=False)
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
    rates = held_out(
        net, head, tokenizer, HELD_OUT, max(8, args.guesses) if args.kind == "eagle" else args.guesses
    )
    accepted = ", ".join(f"{rate:.3f}" for rate in rates)
    print(
        f"held-out questions: {1 + sum(rates):.2f} tokens a step; by place accepted: {accepted}", flush=True
    )


if __name__ == "__main__":
    main()
