"""The parity table: each tiny model through the whole engine, token by token beside transformers.

    python -m tests.parity_table            print the table
    python -m tests.parity_table --write    write it into docs/models.md

A cell counts tokens of greedy generation in float32 that are those of `transformers.generate`. Generation of
a request is compared up to the first token at which the reference's two best logits are a tie.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build_kv import build_kv
from sagellm.engines.engine import Engine
from sagellm.engines.native.backend import NativeBackend
from sagellm.kvmgr.scheduler_ir import PassPipeline
from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from tests.builders import PreemptAtRandom
from tests.tiny_models import TINY_MODELS, VOCAB, save_tiny

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN = "<!-- parity table: python -m tests.parity_table --write -->\n\n"
END = "\n<!-- end of the parity table -->"
NEAR_TIE = 1e-5
LENGTHS, NEW_TOKENS, FOLLOWING = (5, 17, 24, 36), 8, (9, 8, 7)
"""Below the 48 positions at which transformers' dynamic RoPE starts to depend on how a prompt is fed."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


@dataclass
class Reference:
    """What transformers generates; each prompt once."""

    model: PreTrainedModel
    known: dict[tuple[int, ...], tuple[list[int], list[torch.Tensor]]] = field(default_factory=dict)

    def of(self, prompt: Sequence[int]) -> tuple[list[int], list[torch.Tensor]]:
        """The tokens behind a prompt, and the logits of each."""
        if tuple(prompt) not in self.known:
            given = torch.tensor([list(prompt)])
            answer = self.model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=NEW_TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            tokens = answer.sequences[0, len(prompt) :].tolist()
            self.known[tuple(prompt)] = tokens, [step[0] for step in answer.logits]
        return self.known[tuple(prompt)]

    def count(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int, int]:
        """How many of `tokens` are the reference's, and how many are compared."""
        expected, logits = self.of(prompt)
        for i, (mine, theirs) in enumerate(zip(tokens, expected, strict=False)):
            if mine != theirs:
                best, second = logits[i].topk(2).values.tolist()
                return i, i if best - second <= NEAR_TIE else len(tokens)
        return len(tokens), len(tokens)


@dataclass
class Subject:
    """One tiny model in both engines; `engine` makes an empty one."""

    backend: NativeBackend
    reference: Reference
    asked: dict[str, list[int]] = field(default_factory=dict)

    def engine(self, *passes: SchedulerPass) -> Engine:
        self.asked.clear()
        schema, clock = self.backend.get_kv_schema(), ManualClock()
        config = KVConfig(block_size=schema.block_size, checkpoint_interval=schema.block_size)
        num_blocks = 64 * schema.num_groups + 16 * schema.state_pages
        kv = build_kv(
            config, num_blocks, groups=schema.groups, state_pages=schema.state_pages, max_chunk=64,
            clock=clock,
        )  # fmt: skip
        pipeline = PassPipeline([PrefixCacheAwarePass(), *passes])
        return Engine(self.backend, kv, pipeline, max_batched_tokens=64, clock=clock)

    def ask(
        self, engine: Engine, prompt: list[int], count: int = NEW_TOKENS, group: str | None = None
    ) -> str:
        name = f"r{len(self.asked)}"
        self.asked[name] = prompt
        params = SamplingParams(temperature=0.0, max_tokens=count)
        engine.add(Request(name, Tokens(prompt), params, group=group))
        return name

    def run(self, engine: Engine) -> tuple[dict[str, list[int]], dict[str, int]]:
        """The tokens of all requests that were asked, and the cached tokens of each."""
        tokens: dict[str, list[int]] = {}
        cached: dict[str, int] = {}
        while engine.has_work():
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                cached[output.request_id] = max(
                    cached.get(output.request_id, 0), output.num_cached_tokens or 0
                )
        return tokens, cached

    def counts(self, tokens: Mapping[str, list[int]]) -> tuple[int, int]:
        pairs = [self.reference.count(self.asked[name], found) for name, found in tokens.items()]
        return sum(equal for equal, _ in pairs), sum(compared for _, compared in pairs)


Counts = tuple[int, int]


def _one_by_one(subject: Subject, count: int) -> Counts:
    engine, found = subject.engine(), dict[str, list[int]]()
    for prompt in prompts():
        subject.ask(engine, prompt, count)
        found |= subject.run(engine)[0]
    return subject.counts(found)


def _together(subject: Subject, *passes: SchedulerPass) -> Counts:
    engine = subject.engine(*passes)
    for prompt in prompts():
        subject.ask(engine, prompt)
    return subject.counts(subject.run(engine)[0])


def prefill(subject: Subject) -> Counts:
    """The first token behind prompts of several lengths."""
    return _one_by_one(subject, 1)


def decode(subject: Subject) -> Counts:
    """Tokens behind each prompt, alone."""
    return _one_by_one(subject, NEW_TOKENS)


def batch(subject: Subject) -> Counts:
    """All prompts at once."""
    return _together(subject)


def chunked(subject: Subject) -> Counts:
    """All prompts at once, seven tokens a step."""
    return _together(subject, ChunkedPrefillPass(7))


def prefix_hit(subject: Subject) -> Counts:
    """Second turns, behind what was generated in the first."""
    engine, found = subject.engine(), dict[str, list[int]]()
    for prompt in prompts():
        first = subject.ask(engine, prompt)
        found |= subject.run(engine)[0]
        second = subject.ask(engine, [*prompt, *found[first], *FOLLOWING])
        tokens, cached = subject.run(engine)
        assert cached[second] >= len(prompt), f"{cached[second]} tokens of a second turn were cached"
        found |= tokens
    return subject.counts(found)


def preempted(subject: Subject) -> Counts:
    """All prompts at once; requests are preempted six times, and resumed."""
    by_chance = PreemptAtRandom(3, 0.3, 6)
    counts = _together(subject, by_chance)
    assert not by_chance.times, f"{by_chance.times} of 6 preemptions did not come"
    return counts


def fork(subject: Subject) -> Counts:
    """Three continuations of one prompt, which the first computes."""
    engine = subject.engine()
    names = [subject.ask(engine, prompts()[1], group="fork") for _ in range(3)]
    tokens, cached = subject.run(engine)
    assert min(cached[name] for name in names[1:]) > 0, f"cached tokens of a fork: {cached}"
    return subject.counts(tokens)


CASES: dict[str, Callable[[Subject], Counts]] = {
    "prefill": prefill,
    "decode": decode,
    "batch": batch,
    "chunked": chunked,
    "prefix hit": prefix_hit,
    "preempted": preempted,
    "fork": fork,
}


def row(name: str) -> dict[str, Counts]:
    """Equal and compared tokens of one tiny model, by case."""
    with TemporaryDirectory() as folder:
        model = save_tiny(Path(folder), name)
        backend = NativeBackend(
            folder, device="cpu", compute_dtype="float32", block_size=4, num_blocks=128, max_num_seqs=5,
            threads=1,
        )  # fmt: skip
        subject = Subject(backend, Reference(model))
        counts = {case: count(subject) for case, count in CASES.items()}
        backend.close()
    return counts


def table(rows: Mapping[str, Mapping[str, Counts]]) -> str:
    """The table as Markdown."""
    lines = [f"| tiny model | {' | '.join(CASES)} |", "|---" * (len(CASES) + 1) + "|"]
    for name, counts in rows.items():
        cells = (
            f"{equal}" if equal == compared else f"**{equal} of {compared}**"
            for equal, compared in counts.values()
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown(document: str) -> str:
    """The table that a document has."""
    return document.partition(BEGIN)[2].partition(END)[0]


def main(arguments: Sequence[str]) -> int:
    """Print the table, or write it into the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write it into {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    made = table({name: row(name) for name in TINY_MODELS})
    if options.write:
        document = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(document.replace(BEGIN + shown(document), BEGIN + made), encoding="utf-8")
    else:
        print(made, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
