"""Trains the demo model's tokenizer and weights. Writes them as a Hugging Face folder.

From seeds alone, on one CPU core: `python tools/train_demo_model.py --work-dir FOLDER` made the shipped files
(a second thread gains 1.4x on a quiet machine, and loses on one that others use). A killed run resumes from
the checkpoint in ``--work-dir``; the output folder receives whole files only (written under another name,
then renamed).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo_data import Mix, training_conversation
from demo_net import DemoNet, NetConfig
from demo_text import Row, encode, save_tokenizer, train_tokenizer

DEFAULT_OUT = Path(__file__).parent.parent / "src/sagellm/engines/native/demo_model"
POOL = 2048


@dataclass
class Progress:
    """The progress of a run: optimiser steps, tokens, batches of the pool, seconds."""

    step: int = 0
    tokens: int = 0
    pool: int = 0
    place: int = 0
    wall: float = 0.0
    cpu: float = 0.0


@dataclass
class Watch:
    """Adds the wall-clock and CPU seconds since the last lap to a run's progress."""

    wall: float = field(default_factory=time.monotonic)
    cpu: float = field(default_factory=time.process_time)

    def lap(self, progress: Progress) -> None:
        """Add what passed since the last lap."""
        wall, cpu = time.monotonic(), time.process_time()
        progress.wall += wall - self.wall
        progress.cpu += cpu - self.cpu
        self.wall, self.cpu = wall, cpu


Net = TypeVar("Net", bound=nn.Module)


@dataclass
class Run(Generic[Net]):
    """Everything that a checkpoint holds, and the compiled forward pass."""

    net: Net
    optimizers: list[torch.optim.Optimizer]
    progress: Progress
    forward: Callable[..., Tensor]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="Hugging Face folder to write")
    parser.add_argument("--work-dir", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--steps", type=int, default=4600)
    parser.add_argument("--stop-at", type=int, default=None, help="leave after this step, without decay")
    parser.add_argument("--decay", type=float, default=0.5, help="share of the steps with a falling rate")
    parser.add_argument(
        "--copying", type=int, nargs=2, default=[17, 22], help="pools of copying, from and to"
    )
    parser.add_argument(
        "--lists-from", type=int, default=27, help="first pool that leans to lists and tables"
    )
    parser.add_argument("--batch-tokens", type=int, default=2560)
    parser.add_argument("--rate", type=float, default=3e-3, help="AdamW's rate for embeddings and gains")
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="Muon's rate for matrices; 0: AdamW")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--inner", type=int, default=384)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-minutes", type=float, default=2.0)
    parser.add_argument(
        "--drop-at", type=int, nargs="*", default=[], help="steps at which to write the folder"
    )
    return parser


def batches_of_pool(tokenizer: Tokenizer, args: argparse.Namespace, pool: int) -> list[list[Row]]:
    """The batches of one pool of conversations."""
    mix: Mix = "lists" if pool >= args.lists_from else "plain"
    mix = "copying" if args.copying[0] <= pool < args.copying[1] else mix
    made = [training_conversation(args.seed, pool * POOL + index, mix) for index in range(POOL)]
    return grouped(encode(tokenizer, made), args.batch_tokens, f"order:{args.seed}:{pool}")


def grouped(rows: Iterable[Row], batch_tokens: int, seed: str) -> list[list[Row]]:
    """Batches of rows of like lengths, up to `batch_tokens` padded, in random order."""
    batches: list[list[Row]] = [[]]
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if batches[-1] and len(row.ids) * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    random.Random(seed).shuffle(batches)
    return batches


def tensors(batch: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [batch, time], targets and the mask of learnt targets. Rows are right-padded with id 0."""
    width = max(len(row.ids) for row in batch)
    ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in batch])
    learnt = torch.tensor([row.learnt + [False] * (width - len(row.ids)) for row in batch])
    return ids[:, :-1], ids[:, 1:], learnt[:, 1:]


def stream(tokenizer: Tokenizer, args: argparse.Namespace, progress: Progress) -> Iterator[list[Row]]:
    """Training batches from where the progress stands, without end."""
    while True:
        batches = batches_of_pool(tokenizer, args, progress.pool)
        while progress.place < len(batches):
            progress.place += 1
            yield batches[progress.place - 1]
        progress.pool, progress.place = progress.pool + 1, 0


def rate_factor(step: int, args: argparse.Namespace) -> float:
    """Warm-up over 50 steps, then constant, then linearly to nothing over the decay share."""
    left: float = (args.steps - step) / max(1.0, args.steps * args.decay)
    return max(0.0, min(1.0, (step + 1) / 50, left))


def make_optimizers(net: nn.Module, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the rest. If the matrix rate is 0, AdamW for all."""
    named = list(net.named_parameters())
    inner = [weight for name, weight in named if weight.dim() == 2 and "embed" not in name]
    rest = [weight for name, weight in named if weight.dim() != 2 or "embed" in name]
    betas = (0.9, 0.98)
    if not args.matrix_rate:
        groups: list[dict[str, Any]] = [{"params": inner, "weight_decay": 0.05}, {"params": rest}]
        return [torch.optim.AdamW(groups, lr=args.rate, betas=betas, weight_decay=0.0, fused=True)]
    muon = torch.optim.Muon(inner, lr=args.matrix_rate, momentum=0.95, weight_decay=0.05)
    return [muon, torch.optim.AdamW(rest, lr=args.rate, betas=betas, weight_decay=0.0, fused=True)]


def set_rates(run: Run[Any], factor: float) -> None:
    """Set every group's rate to its starting rate times the factor."""
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group.setdefault("full_lr", group["lr"])
            group["lr"] = group["full_lr"] * factor


def train_step(run: Run[DemoNet], batch: list[Row]) -> float:
    """One optimiser step; returns the mean loss over the assistant's tokens, in nats."""
    inputs, targets, learnt = tensors(batch)
    hidden = run.forward(inputs)[learnt]
    return optimized(run, F.cross_entropy(run.net.logits(hidden), targets[learnt]), batch)


def optimized(run: Run[Any], loss: Tensor, batch: list[Row]) -> float:
    """Make the step that lowers the loss of a batch; returns the loss."""
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(run.net.parameters(), 1.0)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    run.progress.step += 1
    run.progress.tokens += sum(len(row.ids) for row in batch)
    return loss.item()


def save_checkpoint(run: Run[Any], path: Path) -> None:
    """Write the whole state, then rename it into place."""
    state = {
        "net": run.net.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "progress": vars(run.progress),
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def resume(run: Run[Any], path: Path) -> None:
    """Take the state from a checkpoint, if there is one."""
    if not path.exists():
        return
    state = torch.load(path, weights_only=True)
    run.net.load_state_dict(state["net"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for name, value in state["progress"].items():
        setattr(run.progress, name, value)
    print(f"resumed at step {run.progress.step}", flush=True)


def model_config(config: NetConfig) -> dict[str, Any]:
    """The contents of ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **config.as_dict(),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write the value as JSON, whole or not at all."""
    path.with_suffix(".new").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    path.with_suffix(".new").replace(path)


def export(net: DemoNet, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the Hugging Face folder. Weights are stored as bfloat16 and meant to be computed in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in net.state_dict().items()}
    save_file(weights, folder / "model.safetensors.new", metadata={"format": "pt"})
    (folder / "model.safetensors.new").chmod(0o644)
    (folder / "model.safetensors.new").replace(folder / "model.safetensors")
    write_json(folder / "config.json", model_config(net.config))
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 256},
    )
    save_tokenizer(tokenizer, folder)


def load_or_train_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer of the work folder, trained at first need."""
    path = args.work_dir / "tokenizer.json"
    if not path.exists():
        args.work_dir.mkdir(parents=True, exist_ok=True)
        save_tokenizer(train_tokenizer(args.seed), args.work_dir)
    return Tokenizer.from_file(str(path))


def net_config(args: argparse.Namespace, vocab_size: int) -> NetConfig:
    """The shape that the command line names."""
    return NetConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
    )


def start(args: argparse.Namespace, tokenizer: Tokenizer) -> Run[DemoNet]:
    """A fresh run, or the one that the work folder's checkpoint left off."""
    torch.manual_seed(args.seed)
    net = DemoNet(net_config(args, tokenizer.get_vocab_size()))
    run = Run(net, make_optimizers(net, args), Progress(), torch.compile(net.hidden, dynamic=True))
    set_rates(run, 1.0)
    resume(run, args.work_dir / "checkpoint.pt")
    return run


def report(progress: Progress, args: argparse.Namespace, losses: list[float]) -> None:
    """Print one progress line and forget the losses that it averaged."""
    left = progress.wall / max(1, progress.step) * (args.steps - progress.step)
    mean = sum(losses) / len(losses)
    print(
        f"step {progress.step}/{args.steps} loss {mean:.4f} tokens {progress.tokens / 1e6:.2f}M "
        f"wall {progress.wall / 60:.1f} min cpu {progress.cpu / 60:.1f} min eta {left / 60:.1f} min",
        flush=True,
    )
    losses.clear()


def train(
    run: Run[Any], batches: Iterator[list[Row]], args: argparse.Namespace, checkpoint: Path,
    step: Callable[[list[Row]], float], behind: Callable[[list[Row]], None],
) -> None:  # fmt: skip
    """Train until the last step (or ``--stop-at``), writing checkpoints.

    `step` trains on a batch and returns its loss; `behind` is called behind each step.
    """
    progress, watch, losses = run.progress, Watch(), list[float]()
    saved, last = progress.wall, args.stop_at or args.steps
    while progress.step < last:
        set_rates(run, rate_factor(progress.step, args))
        batch = next(batches)
        losses.append(step(batch))
        watch.lap(progress)
        if progress.step % 20 == 0:
            report(progress, args, losses)
        behind(batch)
        if progress.wall - saved > 60 * args.save_minutes or progress.step == last:
            save_checkpoint(run, checkpoint)
            saved = progress.wall


def train_and_write(run: Run[DemoNet], tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Train a network and write its folder, also at the steps of ``--drop-at``."""
    print(f"{sum(weight.numel() for weight in run.net.parameters())} parameters", flush=True)
    progress = run.progress

    def drop(_: list[Row]) -> None:
        if progress.step in args.drop_at:
            export(run.net, tokenizer, args.out)

    batches, checkpoint = stream(tokenizer, args, progress), args.work_dir / "checkpoint.pt"
    train(run, batches, args, checkpoint, partial(train_step, run), drop)
    export(run.net, tokenizer, args.out)
    print(f"done: {progress.tokens} tokens, wall {progress.wall:.0f} s, cpu {progress.cpu:.0f} s", flush=True)


def main() -> None:
    """Train and write the folder."""
    args = make_parser().parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = load_or_train_tokenizer(args)
    train_and_write(start(args, tokenizer), tokenizer, args)


if __name__ == "__main__":
    main()
