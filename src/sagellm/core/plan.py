"""The plan of one engine step, as data.

    Planner.draft -> Draft -> passes edit it -> kv.bind -> verify_bound -> freeze -> ExecutionPlan
    backend.execute(ExecutionPlan) -> StepResult -> committer

`Draft` is what passes edit; the blocks bound for it are in its `Binding` (`core/binding.py`). The frozen
`ExecutionPlan` is what a backend executes, and `StepResult` is its answer. The backend keeps the running
batch in fixed rows: a plan has what changed (joined, left, table deltas) and small copies of what runs, never
live arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from sagellm.core.errors import PlanError
from sagellm.core.protocols.prefix_cache import MissCounts, PrefixHit, PromptSpan
from sagellm.core.token_trees import ROOT, accepted_path
from sagellm.core.types import FinishReason, Request, RequestStatus, SamplingParams, TokenLogprob, Tokens

NO_ROW = -1


class BlockTableDelta(NamedTuple):
    """The block table of `row` holds `block_ids` from index `first` on. Applying it twice changes nothing.

    With several KV groups a table has a block of each group for every position, in order of the groups;
    `NO_PAGE` where the group needs none any more.
    """

    row: int
    first: int
    block_ids: tuple[int, ...]


@dataclass(slots=True, eq=False, weakref_slot=True)
class RequestState:
    """Progress of one request through the engine; equal to itself alone.

    Only `engines.request_table.RequestTable` sets `status`, `row`, `decoding`, `num_prefilled` and
    `compute_until`; for those of another engine, `engines.guests.hosted_passes.HostedPasses`. Committing a
    step appends to `tokens`: for requests in decode the decode batch does (`DecodeBatch.advance`).

    `tokens` is the prompt followed by the output; the first `num_computed` of them have their KV in blocks.
    These are `num_prefilled` until the request is `decoding` (a member of the decode batch), and then all but
    the last: there, appending a token is what moves the count.

    `compute_until`: the request computes its prompt only up to this token, since KV of tokens from there on
    comes from elsewhere; None: all of it. `num_approximate`: tokens whose KV was copied from another position
    (`engines/approximate.py`), the most of any admission.

    `prompt_logprobs`: the prompt's log-probabilities that are known and not reported yet, of `num_scored`
    tokens; None if the request asked for none. `misses`: why blocks had to be computed, summed over its
    admissions; None if misses are not attributed. `evicted`: the part of the prompt that was evicted when
    it was admitted first, if it asked for that; seconds, cause and request are of the first of these tokens.
    `checkpoint_depths`: after how many blocks of the prompt its recurrent state should be kept; None before
    its first admission.
    """

    request: Request
    tokens: Tokens
    status: RequestStatus = RequestStatus.WAITING
    row: int = NO_ROW
    num_prefilled: int = 0
    decoding: bool = False
    compute_until: int | None = None
    num_cached: int = 0
    num_approximate: int = 0
    num_preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    num_scored: int = 0
    misses: MissCounts | None = None
    evicted: PromptSpan | None = None
    checkpoint_depths: Sequence[int] | None = None

    @classmethod
    def of(cls, request: Request) -> RequestState:
        """Of a new request.

        What another instance has generated counts as output. That instance has also reported the
        log-probabilities of the prompt.
        """
        tokens = Tokens(request.tokens)
        tokens.extend(request.generated)
        asks = request.params.prompt_logprobs is not None and not request.generated
        return cls(request, tokens, prompt_logprobs=[] if asks else None, num_scored=request.scored_from)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_computed(self) -> int:
        return len(self.tokens) - 1 if self.decoding else self.num_prefilled

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.tokens)

    @property
    def max_output_tokens(self) -> int | None:
        """Output tokens with which it ends or leaves at the latest.

        None: only the model limits them.
        """
        request = self.request
        return len(request.generated) + 1 if request.moves else request.params.max_tokens

    @property
    def resumes(self) -> bool:
        """Whether it was preempted, or its answer has begun at another instance. A client waits for more."""
        return bool(self.num_preemptions or self.request.generated)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def max_reusable(self) -> int:
        """Tokens whose KV may come from a cache: all but the last.

        A cached token has no logits. A hit is in whole blocks, so of a prompt that is cached whole the last
        block is computed. For a request that asks for the prompt's log-probabilities, it is only those before
        the first token without one.
        """
        if self.prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens - 1:
            return self.num_scored
        return len(self.tokens) - 1

    def score(self, start: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Add the log-probabilities of prompt tokens from `start + 1` on. Some may be known already: a part
        that is computed again after a preemption brings them again."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += logprobs[self.num_scored - start :]
            self.num_scored = max(self.num_scored, start + len(logprobs))

    def take_prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Take all of them, to report with the first token; None later."""
        if self.prompt_logprobs is None or self.num_output_tokens > 1:
            return None
        taken, self.prompt_logprobs = tuple(self.prompt_logprobs), None
        return taken


@dataclass(slots=True)
class Chunk:
    """Tokens `[start, start + num_tokens)` of one request, to be computed in this step. `hit` is set if the
    request enters the batch with this chunk; what it reuses ends at `start`."""

    state: RequestState
    start: int
    num_tokens: int
    hit: PrefixHit | None = None

    @property
    def admits(self) -> bool:
        """Whether the request enters the batch with this chunk."""
        return self.hit is not None

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the chunk ends with the request's last token, so that one is drawn."""
        return self.end == len(self.state.tokens)

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1 and not self.admits and self.samples and self.state.num_output_tokens > 0


class Decision(NamedTuple):
    """What a pass decided for a request, and why. `sagellm explain` shows it."""

    pass_name: str
    request_id: str
    action: str
    reason: str = ""


class Decodes:
    """The running requests that compute one token in each step, in no particular order.

    They may be a thousand: passes ask for those that need a block, not for all. Here none needs one; the
    decode batch of an engine (`DecodeBatch`) overrides that.
    """

    def __init__(self, states: Sequence[RequestState] = ()) -> None:
        self.states = states

    def __len__(self) -> int:
        return len(self.states)

    def needing_block(self) -> Sequence[RequestState]:
        """The requests whose next token needs one more block."""
        return ()


@dataclass(frozen=True, slots=True)
class StepStart:
    """What is given when a step is planned. The last `num_new_running` of the running requests have entered
    since the last step."""

    number: int
    now_s: float
    num_new_running: int = 0


@dataclass(slots=True)
class Draft:
    """What a step could do. Passes edit it in place; they only read `step` and `decodes`.

    `running` and `waiting` are in order of priority; passes may reorder both. A pass may take a request out
    of `waiting`: later passes do not see it, and it goes on waiting.

    `chunks` has, by request id and in batch order, the parts of prompts that the step computes: of running
    requests whose prompt is not complete, and of requests that it admits. Requests in decode (`decodes`)
    compute one token each, unless they are held, preempted or rejected (`skipped_decodes`, by id). A request
    is in at most one of `chunks`, `preempted` and `rejected`.

    `preempted` is an ordered set: its values mean nothing.
    `hits` keeps prefix hits of waiting requests, by id, so that no pass looks them up twice.
    `num_draft_tokens`: tokens that the engine's proposer may propose for each request in decode. `proposals`:
    what it has proposed, of requests in decode in the order of the batch. The planner asks it behind the
    passes and the bind, so proposals take what is left of budget and memory, and delay no other work.
    `parents`: of proposals that are trees (`core/token_trees.py`), the parents of the tokens.
    `placements`: by request id, the instances that compute it, where that is not this one.
    """

    step: StepStart
    token_budget: int
    running: list[RequestState]
    waiting: list[RequestState]
    chunks: dict[str, Chunk] = field(default_factory=dict)
    decodes: Decodes = field(default_factory=Decodes)
    hits: dict[str, PrefixHit] = field(default_factory=dict)
    preempted: dict[RequestState, None] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    placements: dict[str, PhasePlacement] = field(default_factory=dict)
    num_draft_tokens: int = 0
    proposals: dict[RequestState, tuple[int, ...]] = field(default_factory=dict)
    parents: dict[RequestState, tuple[int, ...]] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    skipped_decodes: dict[str, RequestState] = field(default_factory=dict)

    @property
    def num_decodes(self) -> int:
        return len(self.decodes) - len(self.skipped_decodes)

    @property
    def num_tokens(self) -> int:
        num_tokens = self.num_decodes + sum(chunk.num_tokens for chunk in self.chunks.values())
        return num_tokens + sum(map(len, self.proposals.values())) if self.proposals else num_tokens

    @property
    def num_scheduled(self) -> int:
        """Requests that compute something."""
        return self.num_decodes + len(self.chunks)

    def scheduled(self) -> Iterator[RequestState]:
        """Requests that compute something: in decode, then with chunks."""
        yield from (state for state in self.decodes.states if state.request_id not in self.skipped_decodes)
        yield from (chunk.state for chunk in self.chunks.values())

    def computes(self, state: RequestState) -> bool:
        """Whether the request computes something in this step."""
        if state.decoding:
            return state.request_id not in self.skipped_decodes
        chunk = self.chunks.get(state.request_id)
        return chunk is not None and chunk.state is state

    def needing_block(self) -> Sequence[RequestState]:
        """Requests in decode that take part and need one more block."""
        states = self.decodes.needing_block()
        if not self.skipped_decodes or not states:
            return states
        return [state for state in states if state.request_id not in self.skipped_decodes]

    def record(self, pass_name: str, state: RequestState, action: str, reason: str = "") -> None:
        self.decisions.append(Decision(pass_name, state.request_id, action, reason))

    def hold(self, state: RequestState) -> None:
        """Let a request compute nothing in this step. A running request keeps its blocks. A request that was
        about to be admitted goes on waiting."""
        if state.decoding:
            self.skipped_decodes[state.request_id] = state
        else:
            self.chunks.pop(state.request_id, None)

    def preempt(self, state: RequestState) -> None:
        """Take a running request out of the batch. Its blocks are released before the bind."""
        self.hold(state)
        self.preempted[state] = None

    def reject(self, state: RequestState, reason: str) -> None:
        """End a request that can never run, with an error."""
        self.hold(state)
        self.rejected[state.request_id] = reason

    def admitted(self) -> Iterator[Chunk]:
        return (chunk for chunk in self.chunks.values() if chunk.admits)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block of the device to another before the step computes."""

    source: int
    target: int


class KeptState(NamedTuple):
    """Copy the state of `row` behind its first `num_tokens` tokens into `pages`.

    It is a recurrent state, and the copy a checkpoint. A row that computes tokens [start, end) can keep its
    state at `start` (before the step computes), at `end`, and between.
    """

    row: int
    num_tokens: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Send blocks of one request to another instance once the step has computed them. In a draft, no blocks
    mean its whole block table, which is known after the bind."""

    request_id: str
    block_ids: tuple[int, ...]
    target_instance: str


@dataclass(frozen=True, slots=True)
class Join:
    """A request enters the batch, with all that a backend needs of it.

    `tokens`: int32 bytes of prompt and output so far; the first `num_computed` have KV in `block_ids`, the
    row's whole table including what this step adds. `state_pages`: the checkpoint of recurrent state behind
    them, for a model that has any.
    """

    row: int
    request_id: str
    tokens: bytes
    num_prompt_tokens: int
    num_computed: int
    block_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: frozenset[int]
    state_pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PhasePlacement:
    """The instances that compute a request's phases and the halves of each layer. "" is this instance."""

    prefill: str = ""
    decode: str = ""
    attention: str = ""
    ffn: str = ""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute tokens `[start, start + num_tokens)` of `row`. With `samples`, draw a token after the last
    one."""

    row: int
    request_id: str
    start: int
    num_tokens: int
    samples: bool


class Chain(NamedTuple):
    """A row in decode computes its last token, and proposed tokens behind it.

    At each of these positions the model draws its own token, as if one step had come after the other. The
    drawn tokens count up to and including the first that is not the proposed one; KV behind them is void.

    With `parents` the proposed tokens are a tree (`core/token_trees.py`). Token i is at the position of its
    depth and attends to what is computed and to its ancestors. Its KV is written where token i of a chain
    has its own. When the step ends, that of the accepted tokens lies at their positions.
    """

    row: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...] = ()

    def paths(self) -> list[tuple[int, ...]]:
        """For each proposed token, the tokens from the first one to it."""
        paths: list[tuple[int, ...]] = []
        for token_id, parent in zip(
            self.token_ids, self.parents or range(ROOT, len(self.token_ids)), strict=False
        ):
            paths.append((token_id,) if parent == ROOT else (*paths[parent], token_id))
        return paths

    def accepted(self, drawn: Sequence[int]) -> Sequence[int]:
        """The indices of the proposed tokens that the model draws itself, in order.

        `drawn[0]` is drawn behind the row's last token, `drawn[1 + i]` behind proposed token i.
        """
        if self.parents:
            return accepted_path(self.token_ids, self.parents, drawn)
        return range(accepted_length(self.token_ids, drawn))


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """One step for a backend. Order of effects: left, joined, table deltas, copies, compute, transfers.

    `decode_rows[i]` computes the token at `decode_positions[i]`, the row's last: the last one drawn for it
    or, where none was drawn yet, the last of its `Join`. Some of these rows have a chain; `chains` are in
    the order of `decode_rows`. Tokens are drawn for `sample_rows`, in that order.
    """

    step: int
    joined: tuple[Join, ...] = ()
    left: tuple[int, ...] = ()
    table_deltas: tuple[BlockTableDelta, ...] = ()
    decode_rows: tuple[int, ...] = ()
    decode_positions: tuple[int, ...] = ()
    prefills: tuple[Prefill, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    kept_states: tuple[KeptState, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    placements: tuple[tuple[str, PhasePlacement], ...] = ()
    preempted: tuple[str, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    chains: tuple[Chain, ...] = ()
    num_draft_tokens: int = 0
    """Tokens that a proposer may propose for each request in decode."""
    decisions: tuple[Decision, ...] = ()

    @property
    def sample_rows(self) -> tuple[int, ...]:
        return self.decode_rows + tuple(op.row for op in self.prefills if op.samples)

    @property
    def num_prefill_tokens(self) -> int:
        return sum([op.num_tokens for op in self.prefills]) if self.prefills else 0

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + self.num_prefill_tokens + self.num_proposed_tokens

    @property
    def num_proposed_tokens(self) -> int:
        return sum([len(chain.token_ids) for chain in self.chains]) if self.chains else 0

    @property
    def has_trees(self) -> bool:
        return any(chain.parents for chain in self.chains)

    @property
    def proposed(self) -> dict[int, tuple[int, ...]]:
        """The proposed tokens of rows that have any."""
        return {chain.row: chain.token_ids for chain in self.chains} if self.chains else {}

    @property
    def is_empty(self) -> bool:
        """Nothing to compute, copy or send. Left rows can be sent with a later plan."""
        return not (self.decode_rows or self.prefills or self.copies or self.transfers)


@dataclass(frozen=True, slots=True)
class StepResult:
    """A backend's answer: the tokens that were drawn for `plan.sample_rows`, in that order.

    That is one for each row, and one more for each accepted token of its chain: `num_accepted[i]` proposed
    tokens of `plan.chains[i]` are the first that were drawn for its row.

    `logprobs` has those of the drawn tokens, by row, where the request asked for them. `prompt_logprobs` has
    an entry for each row that asked for those and computed a part of its prompt: of the tokens that follow
    the positions of that part, within the prompt.
    """

    step: int
    token_ids: tuple[int, ...] = ()
    logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    num_accepted: tuple[int, ...] = ()

    def num_drawn(self, plan: ExecutionPlan) -> list[int]:
        """How many tokens were drawn for each of `plan.decode_rows`."""
        if len(self.num_accepted) != len(plan.chains):
            raise PlanError(f"{len(plan.chains)} chains were planned, {len(self.num_accepted)} are answered")
        accepted = {chain.row: num for chain, num in zip(plan.chains, self.num_accepted, strict=True)}
        return [1 + accepted.get(row, 0) for row in plan.decode_rows]

    def drawn_by_row(self, plan: ExecutionPlan) -> dict[int, tuple[int, ...]]:
        """The tokens that were drawn for each of `plan.decode_rows`."""
        tokens = iter(self.token_ids)
        counts = zip(plan.decode_rows, self.num_drawn(plan), strict=True)
        return {row: tuple(islice(tokens, count)) for row, count in counts}


def accepted_length(proposed: Sequence[int], drawn: Sequence[int]) -> int:
    """How many leading proposed tokens equal those that the model draws there."""
    pairs = zip(proposed, drawn, strict=False)
    return next((i for i, (expected, token) in enumerate(pairs) if expected != token), len(proposed))
