"""Measures what KV in another position costs in accuracy, and what recomputing repairs.

    PYTHONPATH=tools python benchmarks/blend_error.py [--model FOLDER] [--count N]

A prompt is a conversation of the demo model's held-out part. Its first turn is computed exactly, like a
cached prefix, and so is its end. The KV between comes from elsewhere:

    alone   each turn as a prompt of its own, as CacheBlend and RAG systems have it
    behind  each turn behind a turn of another conversation
    moved   all turns together, behind another first turn: a history whose head has changed
    slices  turns and last question in slices of 32 tokens, each as a prompt of its own, but for the last
            16 tokens: slices cut through words, tables and sums

A share r of these tokens is recomputed in each layer from the second on, and the first layer for all; for
r = 0 none are, and `no rotation` leaves keys at their old position, too. The expected answer is fed token by
token and compared with exact KV: divergence (KL, nats per token), same most likely token, perplexity, and
whole answers that are right.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.blended import Blended, BlendModel, Choose, LayerKV, joined, part_of
from demo_data import Conversation, dialogue_set
from demo_text import TURN_END, TURN_START, message_text
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.model import DecoderModel
from sagellm.engines.native.tokenizer import Tokenizer

SHARES = (0.0, 0.05, 0.15, 0.3, 0.5, 1.0)
SOURCES = ("alone", "behind", "moved", "slices")
SLICE, EXACT_END = 32, 16
"""Tokens of a slice, and of the question that are computed exactly behind slices."""
KINDS = ("name recall", "follow-up look-up", "follow-up list", "follow-up sum", "look-up", "JSON")


class Prompt(NamedTuple):
    """Token ids; the first turn is the exact prefix, the answer the expected one."""

    turns: list[list[int]]
    question: list[int]
    answer: list[int]

    def parts(self, source: str) -> tuple[list[list[int]], list[int]]:
        """What comes from elsewhere, in parts, and the end that does not."""
        between = [token for turn in self.turns[1:] for token in turn]
        if source == "slices":
            between += self.question[:-EXACT_END]
            parts = [between[at : at + SLICE] for at in range(0, len(between), SLICE)]
            return parts, self.question[-EXACT_END:]
        return [between] if source == "moved" else self.turns[1:], self.question


@dataclass(slots=True)
class Errors:
    """Sums over answer tokens, against the same model with exact KV."""

    num_tokens: int = 0
    num_answers: int = 0
    divergence: float = 0.0
    num_same: int = 0
    loss: float = 0.0
    num_right: int = 0
    computed: list[float] = field(default_factory=list)

    def add(self, exact: torch.Tensor, logits: torch.Tensor, answer: Sequence[int], computed: float) -> None:
        """Logits [answer, vocab] of both; `computed`: a share of tokens x layers."""
        ours, theirs = logits.double().log_softmax(-1), exact.double().log_softmax(-1)
        expected = torch.tensor(answer)
        self.num_tokens += len(answer)
        self.num_answers += 1
        self.divergence += float((theirs.exp() * (theirs - ours)).sum())
        self.num_same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        self.loss -= float(ours.gather(1, expected[:, None]).sum())
        self.num_right += int((ours.argmax(-1) == expected).all())
        self.computed.append(computed)

    def row(self, *names: str) -> str:
        """A line of the table."""
        figures = (
            f"{100 * sum(self.computed) / len(self.computed):.0f}",
            f"{self.divergence / self.num_tokens:.2g}",
            f"{100 * self.num_same / self.num_tokens:.2f}",
            f"{math.exp(self.loss / self.num_tokens):.4f}",
            f"{100 * self.num_right / self.num_answers:.1f}",
        )
        return f"| {' | '.join((*names, *figures))} |"


def by_deviation(share: float) -> Choose:
    """Those whose KV in the second layer deviates most, in all further layers too."""
    return lambda layer, rows, deviation: _largest(deviation, share) if layer == 1 else _all(rows)


def at_random(share: float, seed: int = 0) -> Choose:
    """As many tokens as `by_deviation`, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    return lambda layer, rows, deviation: (
        _largest(torch.rand(len(rows), generator=generator), share) if layer == 1 else _all(rows)
    )


def at_starts(share: float, starts: Sequence[int]) -> Choose:
    """As many tokens as `by_deviation`, the first of each turn (EPIC: Hu et al. 2024, arXiv:2410.15332)."""
    bounds = torch.tensor(starts)

    def choose(layer: int, rows: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
        distance = rows - bounds[torch.bucketize(rows, bounds, right=True) - 1]
        return _largest(-distance.float(), share) if layer == 1 else _all(rows)

    return choose


def _largest(values: torch.Tensor, share: float) -> torch.Tensor:
    picked = torch.zeros(len(values), dtype=torch.bool)
    picked[values.topk(min(len(values), math.ceil(share * len(values) - 1e-9))).indices] = True
    return picked


def _all(rows: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(rows), dtype=torch.bool)


def prompts(tokenizer: Tokenizer, kinds: Sequence[str], count: int) -> Iterator[Prompt]:
    """Held-out conversations of at least three turns, `count` drawn of each kind."""
    for kind in kinds:
        for example in dialogue_set("test", kind, count):
            if len(example.turns) >= 3:
                yield _prompt(tokenizer, example)


def _prompt(tokenizer: Tokenizer, example: Conversation) -> Prompt:
    *turns, last = example.turns
    texts = [message_text("user", turn.user) + message_text("assistant", turn.answer) for turn in turns]
    if example.system is not None:
        texts[0] = message_text("system", example.system) + texts[0]
    question = message_text("user", last.user) + f"{TURN_START}assistant\n"
    encoded = [tokenizer.encode(text).tolist() for text in (*texts, question, last.answer + TURN_END)]
    return Prompt(encoded[:-2], encoded[-2], encoded[-1])


def cached_kv(
    model: BlendModel, prompt: Prompt, other: Prompt, source: str, *, rotated: bool = True
) -> list[LayerKV]:
    """The KV of all but the end. The first turn's is exact; other keys are rotated."""
    parts = [model.kv_of(prompt.turns[0])]
    position = len(prompt.turns[0])
    for part in prompt.parts(source)[0]:
        before = other.turns[0] if source in ("behind", "moved") else []
        kv = part_of(model.kv_of([*before, *part]), len(before))
        parts.append(model.moved(kv, position - len(before)) if rotated else kv)
        position += len(part)
    return joined(parts)


def blends_of(
    model: BlendModel, prompt: Prompt, other: Prompt, source: str, seed: int
) -> tuple[torch.Tensor, dict[tuple[str, float], Blended]]:
    """Logits [answer, vocab] with exact KV, and what each way and share gives."""
    first, (parts, end) = len(prompt.turns[0]), prompt.parts(source)
    tokens = [*prompt.turns[0], *(token for part in parts for token in part), *end, *prompt.answer[:-1]]
    starts = list(accumulate((first, *map(len, parts))))[:-1]
    cached = cached_kv(model, prompt, other, source)
    stale = cached_kv(model, prompt, other, source, rotated=False)
    found = {("no rotation", 0.0): model.logits(tokens, stale, first, None)}
    for share in SHARES:
        for name, choose in _ways(share, starts, seed).items():
            found[name, share] = model.logits(tokens, cached, first, choose)
    return found["all", 1.0].logits[len(end) - 1 :], found


def measure(model: BlendModel, examples: Sequence[Prompt], num_layers: int, source: str) -> None:
    """Prints a line for each share and each way to choose tokens."""
    sums: dict[tuple[str, float], Errors] = defaultdict(Errors)
    shuffled = random.Random(0).sample(range(len(examples)), len(examples))
    sizes = [sum(map(len, prompt.parts(source)[0])) for prompt in examples]
    for number, (prompt, size) in enumerate(zip(examples, sizes, strict=True)):
        exact, found = blends_of(model, prompt, examples[shuffled[number]], source, number)
        for key, blended in found.items():
            computed = sum(blended.num_computed) / (num_layers * size)
            sums[key].add(exact, blended.logits[-len(exact) :], prompt.answer, computed)
    for (name, share), errors in sorted(sums.items(), key=lambda item: (item[0][1], item[0][0])):
        print(errors.row(f"{source}, {sum(sizes) / len(sizes):.0f} tokens", name, f"{share:.2f}"), flush=True)


def _everything(layer: int, rows: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    return _all(rows)


def _ways(share: float, starts: Sequence[int], seed: int) -> dict[str, Choose | None]:
    if share == 0:
        return {"none": None}
    if share == 1:
        return {"all": _everything}
    return {
        "deviation": by_deviation(share),
        "random": at_random(share, seed),
        "starts": at_starts(share, starts),
    }


def load(folder: Path) -> tuple[BlendModel, NativeBackend, int]:
    """A model in float32 without kernels, its backend, and its number of layers."""
    backend = NativeBackend(folder, device="cpu", dtype="float32", num_blocks=256, max_num_seqs=1)
    assert isinstance(backend._model, DecoderModel)
    return BlendModel(backend._model), backend, backend.spec.num_layers


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of KV in another position.")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--count", type=int, default=150, help="conversations drawn of each kind")
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--sources", nargs="*", default=SOURCES, choices=SOURCES)
    options = parser.parse_args()
    model, backend, num_layers = load(options.model)
    examples = list(prompts(Tokenizer.from_folder(options.model), options.kinds, options.count))
    answers = sum(len(prompt.answer) for prompt in examples)
    print(f"{len(examples)} prompts, {answers} tokens of answers")
    print("| KV from | computed again | r | tokens x layers % | KL | same token % | perplexity | right % |")
    print("|---|---|---|---|---|---|---|---|")
    for source in options.sources:
        measure(model, examples, num_layers, source)
    backend.close()


if __name__ == "__main__":
    main()
