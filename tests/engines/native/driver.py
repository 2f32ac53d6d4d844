"""Drives a backend with hand-made plans: any chunk sizes, scattered blocks, preemption. An engine in 100
lines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from sagellm.core.blocks import cdiv
from sagellm.core.plan import BlockTableDelta, Chain, ExecutionPlan, Join, Prefill, StepResult
from sagellm.core.protocols.speculative import Proposal
from sagellm.core.types import SamplingParams, TokenLogprob, Tokens
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.feed_forward import Mlp
from sagellm.engines.native.model import Attention, DecoderLayer, DecoderModel
from sagellm.engines.native.sampler import ScoredPrompt

GREEDY = SamplingParams(temperature=0.0)


def attention_of(layer: DecoderLayer) -> Attention:
    """The attention of a layer that is not recurrent."""
    assert isinstance(layer.mixer, Attention)
    return layer.mixer


def mlp_of(layer: DecoderLayer) -> Mlp:
    """The MLP of a layer without experts."""
    assert layer.feed_forward is not None
    assert isinstance(layer.feed_forward.mlp, Mlp)
    return layer.feed_forward.mlp


class RecordingBackend(NativeBackend):
    """Keeps the raw logits of the last step, and can be told to fail in the middle of one."""

    last_logits: torch.Tensor
    fail_with: Exception | None = None

    def _logits(self, plan: ExecutionPlan) -> torch.Tensor:
        logits = super()._logits(plan)
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        self.last_logits = logits.clone()
        return logits

    def _logits_and_scores(
        self, plan: ExecutionPlan, scored: Sequence[ScoredPrompt]
    ) -> tuple[torch.Tensor, dict[int, tuple[TokenLogprob, ...]]]:
        logits, found = super()._logits_and_scores(plan, scored)
        self.last_logits = logits.clone()
        return logits, found


def native_model(backend: NativeBackend) -> DecoderModel:
    """The model of a backend that has no bridged one."""
    assert isinstance(backend._model, DecoderModel)
    return backend._model


@dataclass
class Running:
    """One request of the driver; `logits` and `logprobs` have an entry per output token."""

    name: str
    tokens: list[int]
    num_prompt: int
    max_new: int
    params: SamplingParams
    eos: frozenset[int]
    row: int = -1
    computed: int = 0
    table: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def done(self) -> bool:
        return len(self.outputs) >= self.max_new


class Driver:
    """Every running sequence takes part in every step; a prefill takes a chunk of a random one of
    `chunk_sizes`.
    """

    def __init__(
        self,
        backend: RecordingBackend,
        chunk_sizes: Sequence[int] = (10_000,),
        *,
        seed: int = 0,
        scattered: bool = True,
        propose: Callable[[Running], Sequence[int] | Proposal] = lambda _: (),
    ) -> None:
        """`propose` gives the tokens of a chain, or a tree, for a sequence in decode."""
        self.propose = propose
        capability = backend.capability()
        self.backend = backend
        self.chunk_sizes = list(chunk_sizes)
        self.random = random.Random(seed)
        self.free_blocks = list(range(capability.num_blocks))
        if scattered:
            self.random.shuffle(self.free_blocks)
        self.free_rows = list(range(capability.max_num_seqs))
        self.block_size = capability.block_size
        self.num_groups = backend.get_kv_schema().num_groups
        self.running: list[Running] = []
        self.left: list[int] = []
        self.joining: list[Running] = []
        self.steps = 0

    def add(
        self, prompt: Sequence[int], max_new: int = 16, params: SamplingParams = GREEDY, *,
        name: str | None = None, eos: frozenset[int] = frozenset(),
    ) -> Running:  # fmt: skip
        name = name or f"r{self.steps}-{len(self.running) + len(self.joining)}"
        sequence = Running(name, list(prompt), len(prompt), max_new, params, eos)
        self.joining.append(sequence)
        return sequence

    def run(self) -> None:
        while self.running or self.joining:
            self.step()

    def step(self) -> StepResult:
        plan, chunks = self._plan()
        result = self.backend.execute(plan)
        self.left = []
        self._commit(plan, chunks, result)
        return result

    def _plan(self) -> tuple[ExecutionPlan, list[tuple[Running, int]]]:
        joined: list[Join] = []
        grown: list[BlockTableDelta] = []
        prefills: list[Prefill] = []
        decodes: list[Running] = []
        chains: list[Chain] = []
        chunks: list[tuple[Running, int]] = []
        for sequence in self.joining:
            sequence.row = self.free_rows.pop(self.random.randrange(len(self.free_rows)))
        fresh, self.running, self.joining = self.joining, self.running + self.joining, []
        for sequence in self.running:
            left = len(sequence.tokens) - sequence.computed
            size = min(left, self.random.choice(self.chunk_sizes))
            first = len(sequence.table)
            given = self.propose(sequence) if left == 1 and sequence.outputs else ()
            tree = given if isinstance(given, Proposal) else Proposal(tuple(given))
            proposed = () if any(sequence is other for other in fresh) else tree.token_ids
            if proposed:
                chains.append(Chain(sequence.row, proposed, tree.parents))
            wanted = cdiv(sequence.computed + size + len(proposed), self.block_size) * self.num_groups
            sequence.table += self._blocks(max(0, wanted - first))
            if any(sequence is other for other in fresh):
                joined.append(self._join(sequence))
            elif len(sequence.table) > first:
                grown.append(BlockTableDelta(sequence.row, first, tuple(sequence.table[first:])))
            chunks.append((sequence, size))
            if left == 1 and sequence.outputs:
                decodes.append(sequence)
            else:
                prefills.append(Prefill(sequence.row, sequence.name, sequence.computed, size, size == left))
        plan = ExecutionPlan(
            self.steps, tuple(joined), tuple(self.left), tuple(grown), tuple(s.row for s in decodes),
            tuple(len(s.tokens) - 1 for s in decodes), tuple(prefills), chains=tuple(chains),
        )  # fmt: skip
        return plan, chunks

    def _blocks(self, count: int) -> list[int]:
        return [self.free_blocks.pop() for _ in range(count)]

    @staticmethod
    def _join(sequence: Running) -> Join:
        return Join(
            sequence.row, sequence.name, Tokens(sequence.tokens).tobytes(), sequence.num_prompt,
            sequence.computed, tuple(sequence.table), sequence.params, sequence.eos,
        )  # fmt: skip

    def _commit(self, plan: ExecutionPlan, chunks: list[tuple[Running, int]], result: StepResult) -> None:
        for sequence, size in chunks:
            sequence.computed += size
        by_row = {sequence.row: sequence for sequence in self.running}
        chains = {chain.row: chain for chain in plan.chains}
        accepted = {c.row: num for c, num in zip(plan.chains, result.num_accepted, strict=True)}
        drawn, first = iter(result.token_ids), 0
        for row in plan.sample_rows:
            sequence, count, chain = by_row[row], 1 + accepted.get(row, 0), chains.get(row, Chain(row, ()))
            own = tuple(islice(drawn, count))
            places = [0, *(1 + chain.paths().index(own[:depth]) for depth in range(1, count))]
            sequence.tokens += own
            sequence.computed += count - 1
            sequence.logits += [self.backend.last_logits[first + place] for place in places]
            sequence.logprobs += result.logprobs.get(row, ())
            first += 1 + len(chain.token_ids)
        assert next(drawn, None) is None
        assert first == len(self.backend.last_logits)
        for sequence in [s for s in self.running if s.done]:
            self._leave(sequence)
        self.steps += 1

    def preempt(self, sequence: Running) -> None:
        """Take a running sequence out; it comes back with the next step and computes everything again."""
        self._leave(sequence)
        sequence.computed = 0
        self.joining.append(sequence)

    def _leave(self, sequence: Running) -> None:
        self.running = [other for other in self.running if other is not sequence]
        self.left.append(sequence.row)
        self.free_rows.append(sequence.row)
        self.free_blocks += sequence.table
        self.random.shuffle(self.free_blocks)
        sequence.table = []
