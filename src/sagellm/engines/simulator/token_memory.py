"""`TokenMemoryBackend`: a fast exact fake of a backend, for tests.

Its KV is the tokens themselves: computing a token writes (token, position) into its block, and drawing reads
the whole sequence back through the block table. A block that has two owners, was evicted while in use, or was
matched for the wrong prefix changes the answer, or is found as a missing position.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from sagellm.accel.cot.reasoning import ReasoningTracker
from sagellm.core.blocks import NO_PAGE
from sagellm.core.errors import BookkeepingError
from sagellm.core.features import DROPPED_BLOCKS, REASONING_BUDGETS
from sagellm.core.plan import BlockCopy, Chain, ExecutionPlan, Join, KeptState, StepResult
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.token_trees import ROOT, depths_of
from sagellm.core.types import (
    CapabilityDescriptor,
    KVCacheSchema,
    KVGroup,
    TokenLogprob,
    Tokens,
    Window,
    first_seen,
)

_Slot = tuple[int, int, int] | None
"""Token, position and KV group; of a kept state a hash of its tokens, their number, and a negative part."""


_PER_SLOT, _EMPTY = 3, (-1, -1, -1)


class SlotMemory:
    """Three int64 for each slot of a `TokenMemoryBackend`, in one array; -1 for nothing.

    A list of tuples would do, but reading a sequence would take a fifth longer after some hundreds of loads:
    the more blocks come and go, the less their objects lie in the order of the slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.numbers = array("q", _EMPTY) * num_slots

    def __getitem__(self, slot: int) -> _Slot:
        token, position, group = self.numbers[_PER_SLOT * slot : _PER_SLOT * (slot + 1)]
        return None if position < 0 else (token, position, group)

    def __setitem__(self, slot: int, entry: _Slot) -> None:
        first = _PER_SLOT * slot
        self.numbers[first : first + _PER_SLOT] = array("q", entry or _EMPTY)

    def place(self, first: int, num_slots: int) -> slice:
        """Where the numbers of some slots stand."""
        return slice(_PER_SLOT * first, _PER_SLOT * (first + num_slots))


@dataclass(slots=True)
class _Row:
    tokens: Tokens
    blocks: list[int]
    wants_logprobs: bool
    num_in_state: int
    reasoning: ReasoningTracker | None = None
    may_drop: bool = False


class TokenBytes:
    """Implements `BlockBytes`: three int64 for each token, -1 for none."""

    numa_node: int | None = None

    def __init__(self, memory: SlotMemory, block_size: int) -> None:
        self._memory, self._size = memory, block_size
        self.bytes_per_block = block_size * _PER_SLOT * memory.numbers.itemsize

    def lock_pages(self, buffer: memoryview) -> None:
        pass

    def follow_steps(self) -> None:
        """A step is computed when `execute` returns."""

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        target[:] = b"".join([self._memory.numbers[self._place(block)] for block in block_ids])

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        numbers = array("q", bytes(data))
        for index, block in enumerate(block_ids):
            self._memory.numbers[self._place(block)] = numbers[self._place(index)]

    def _place(self, block: int) -> slice:
        return self._memory.place(block * self._size, self._size)


class TokenMemoryBackend:
    """Draws `answer(tokens)`, a hash of all tokens so far.

    The answer is the same in any batch, chunking and block placement, and with any proposed tokens. The
    log-probability of a token is minus its position. Budgets of reasoning are kept. Without windows, blocks
    of a request with `max_reasoning_kv_tokens` may be dropped: then the tokens in them are not in the hash.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_model_len: int = 128,
        vocab_size: int = 97,
        sliding_window: int | None = None,
        windows: Sequence[Window | None] = (None,),
        state_pages: int = 0,
    ) -> None:
        """`windows`: one KV group of one layer for each, if there are several.

        With `state_pages` a row has a recurrent state too; a checkpoint of it takes so many blocks.
        """
        groups = tuple(KVGroup((i,), window) for i, window in enumerate(windows))
        schema = KVCacheSchema(
            len(groups), 1, 1, "int8", block_size, "tokens", "tokens", groups if len(groups) > 1 else (),
            state_bytes=2 * block_size * state_pages,
        )  # fmt: skip
        self._windows: list[Window | None] = [sliding_window, *windows[1:]]
        self._capability = CapabilityDescriptor(
            "none", "int8", vocab_size, max_model_len, num_blocks, block_size, max_num_seqs, schema,
            features=frozenset({REASONING_BUDGETS}), sliding_window=sliding_window,
        )  # fmt: skip
        if sliding_window is None and not schema.groups and not state_pages:
            features = self._capability.features | {DROPPED_BLOCKS}
            self._capability = replace(self._capability, features=features)
        self._memory = SlotMemory(num_blocks * block_size)
        self._rows: dict[int, _Row] = {}

    def capability(self) -> CapabilityDescriptor:
        return self._capability

    def get_kv_schema(self) -> KVCacheSchema:
        assert self._capability.kv_schema is not None
        return self._capability.kv_schema

    def kv_bytes(self) -> TokenBytes:
        """Its memory as bytes, for tiers."""
        return TokenBytes(self._memory, self._capability.block_size)

    def answer(self, tokens: Tokens) -> int:
        """The token that follows `tokens`: a hash of those in the window."""
        digest = blake2b(tokens.slice(self._first(len(tokens))).tobytes(), digest_size=4).digest()
        return int.from_bytes(digest, "little") % self._capability.vocab_size

    def execute(self, plan: ExecutionPlan) -> StepResult:
        for row in plan.left:
            self._rows.pop(row, None)
        for join in plan.joined:
            wants_logprobs = join.params.logprobs is not None
            tokens, block_ids = Tokens.frombytes(join.tokens), list(join.block_ids)
            prompt, outputs = tokens.slice(0, join.num_prompt_tokens), tokens.slice(join.num_prompt_tokens)
            reasoning = ReasoningTracker.of(join.params, prompt, outputs, join.eos_token_ids)
            may_drop = join.params.max_reasoning_kv_tokens is not None
            self._rows[join.row] = _Row(
                tokens, block_ids, wants_logprobs, join.num_computed, reasoning, may_drop
            )
            if self.get_kv_schema().state_bytes and join.num_computed:
                self._restore(tokens, join)
        for delta in plan.table_deltas:
            self._rows[delta.row].blocks[delta.first :] = delta.block_ids
        for copy in plan.copies:
            self._copy(copy)
        chains = {chain.row: chain for chain in plan.chains}
        if not chains.keys() <= set(plan.decode_rows):
            raise BookkeepingError(f"rows {sorted(chains)} have chains, rows {plan.decode_rows} decode")
        self._compute_all(plan, chains)
        drawn = {row: self._draw_chain(row, chains.get(row, Chain(row, ()))) for row in plan.sample_rows}
        logprobs = {}
        for number, own in drawn.items():
            tokens = self._rows[number].tokens
            if self._rows[number].wants_logprobs:
                places = enumerate(own, len(tokens))
                logprobs[number] = tuple(TokenLogprob(token_id, -float(place)) for place, token_id in places)
            tokens.extend(own)
        token_ids = tuple(token_id for own in drawn.values() for token_id in own)
        num_accepted = tuple(len(drawn[number]) - 1 for number in chains)
        return StepResult(plan.step, token_ids, logprobs, num_accepted=num_accepted)

    def _state_slots(self, tokens: Tokens, num_tokens: int, pages: Sequence[int]) -> dict[int, _Slot]:
        """What the slots of a checkpoint hold."""
        digest = hash(tokens.slice(0, num_tokens).tobytes())
        size = self._capability.block_size
        return {
            page * size + offset: (digest, num_tokens, -1 - part)
            for part, page in enumerate(pages)
            for offset in range(size)
        }

    def _keep(self, kept: KeptState) -> None:
        if len(kept.pages) != self.get_kv_schema().state_pages:
            raise BookkeepingError(f"{len(kept.pages)} blocks are no checkpoint")
        for slot, entry in self._state_slots(
            self._rows[kept.row].tokens, kept.num_tokens, kept.pages
        ).items():
            self._memory[slot] = entry

    def _restore(self, tokens: Tokens, join: Join) -> None:
        if len(join.state_pages) != self.get_kv_schema().state_pages:
            raise BookkeepingError(f"{join.request_id} joins at {join.num_computed} without a state")
        for slot, entry in self._state_slots(tokens, join.num_computed, join.state_pages).items():
            if self._memory[slot] != entry:
                raise BookkeepingError(
                    f"{join.request_id}: slot {slot} has not the state: {self._memory[slot]}"
                )

    def _compute_all(self, plan: ExecutionPlan, chains: Mapping[int, Chain]) -> None:
        """Compute what the plan says, and keep states on the way."""
        for kept in plan.kept_states:
            if kept.num_tokens == self._rows[kept.row].num_in_state:
                self._keep(kept)
        for row, position in zip(plan.decode_rows, plan.decode_positions, strict=True):
            self._compute(row, position, position + 1)
            if row in chains:
                self._compute_proposed(chains[row], position + 1)
        for op in plan.prefills:
            before = self._rows[op.row].num_in_state
            self._compute(op.row, op.start, op.start + op.num_tokens)
            for kept in plan.kept_states:
                if kept.row == op.row and before < kept.num_tokens <= op.start + op.num_tokens:
                    self._keep(kept)

    def close(self) -> None:
        self._rows.clear()

    def _first(self, num_tokens: int) -> int:
        """The first position that the token after `num_tokens` attends to."""
        window = self._capability.sliding_window
        return 0 if window is None else max(0, num_tokens - window)

    def _held(self, row: _Row, first: int, stop: int) -> list[int]:
        """Positions from `first` on whose blocks have not been dropped."""
        if not row.may_drop or DROPPED_BLOCKS not in self._capability.features:
            return list(range(first, stop))
        size = self._capability.block_size
        return [position for position in range(first, stop) if row.blocks[position // size] != NO_PAGE]

    def _slot(self, row: _Row, position: int, group: int = 0) -> int:
        size = self._capability.block_size
        block = row.blocks[position // size * len(self._windows) + group]
        if block < 0:
            raise BookkeepingError(f"position {position} has no block in group {group}")
        return block * size + position % size

    def _copy(self, copy: BlockCopy) -> None:
        size = self._capability.block_size
        source, target = (self._memory.place(block * size, size) for block in (copy.source, copy.target))
        self._memory.numbers[target] = self._memory.numbers[source]

    def _compute(self, row_id: int, start: int, end: int) -> None:
        row = self._rows[row_id]
        if end > len(row.tokens):
            raise BookkeepingError(f"row {row_id}: computes up to {end}, it has {len(row.tokens)} tokens")
        if self.get_kv_schema().state_bytes and row.num_in_state != start:
            raise BookkeepingError(
                f"row {row_id}: the state is that of {row.num_in_state} tokens, not {start}"
            )
        row.num_in_state = end
        for group, window in enumerate(self._windows):
            for position in range(start, end):
                self._memory[self._slot(row, position, group)] = (row.tokens[position], position, group)
            for position in self._held(row, first_seen(window, start), end):
                self._read(row_id, position, group)

    def _compute_proposed(self, chain: Chain, start: int) -> None:
        """Write proposed tokens from slot `start` on, each with the position of its depth."""
        row, parents = self._rows[chain.row], chain.parents or range(-1, len(chain.token_ids) - 1)
        for node, (token_id, depth) in enumerate(zip(chain.token_ids, depths_of(parents), strict=True)):
            for group in range(len(self._windows)):
                self._memory[self._slot(row, start + node, group)] = (token_id, start + depth, group)

    def _accept(self, row_id: int, token_id: int, place: int) -> None:
        """Append an accepted token, whose KV comes from slot `place` to its position."""
        row = self._rows[row_id]
        position = len(row.tokens)
        row.tokens.append(token_id)
        for group, window in enumerate(self._windows):
            if place != position:
                self._move(self._slot(row, place, group), self._slot(row, position, group))
            for seen in self._held(row, first_seen(window, position), position + 1):
                self._read(row_id, seen, group)

    def _move(self, source: int, target: int) -> None:
        self._memory[target] = self._memory[source]

    def _read(self, row_id: int, position: int, group: int) -> int:
        row = self._rows[row_id]
        slot = self._slot(row, position, group)
        numbers, first = self._memory.numbers, _PER_SLOT * slot
        token = numbers[first]
        if numbers[first + 1] != position or numbers[first + 2] != group:
            raise BookkeepingError(
                f"row {row_id}: the KV of position {position} is not in its block: {self._memory[slot]}"
            )
        if group and token != row.tokens[position]:
            raise BookkeepingError(
                f"row {row_id}: group {group} has another token at {position}: {self._memory[slot]}"
            )
        return token

    def _draw_chain(self, row_id: int, chain: Chain) -> list[int]:
        """The tokens drawn for a row, up to the first that is not proposed."""
        row, drawn, node = self._rows[row_id], list[int](), ROOT
        reasoning, start = None if row.reasoning is None else replace(row.reasoning), len(row.tokens)
        parents = chain.parents or range(-1, len(chain.token_ids) - 1)
        child = {pair: i for i, pair in enumerate(zip(parents, chain.token_ids, strict=True))}
        while True:
            drawn.append(self._draw(row_id, start + len(drawn)))
            if reasoning is not None:
                drawn[-1] = drawn[-1] if reasoning.forced_id is None else reasoning.forced_id
                reasoning.push(drawn[-1])
            if (node, drawn[-1]) not in child:
                break
            node = child[node, drawn[-1]]
            self._accept(row_id, drawn[-1], start + node)
        row.reasoning = reasoning
        for _ in drawn[1:]:
            row.tokens.pop()
        return drawn

    def _draw(self, row_id: int, num_tokens: int) -> int:
        seen = Tokens()
        for position in self._held(self._rows[row_id], self._first(num_tokens), num_tokens):
            seen.append(self._read(row_id, position, 0))
        return self.answer(seen)
