"""vLLM's default scheduling, as a baseline.

One loop over the running requests, then one over the waiting ones. Written from the observed behaviour of
vLLM 0.33's `Scheduler` (first come, first served), and compared with it step by step in `tests/peers`. The
ideas are continuous batching with preemption by recompute (Kwon et al., 2023) and chunked prefill in one
token budget (Agrawal et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sagellm.core.plan import Chunk, Draft, RequestState
from sagellm.core.protocols.scheduler_ir import ALWAYS_STABLE, BlockBudget, SchedulingView, Stability


class VllmLikePass:
    """Schedules in order of arrival. Keeps the budgets itself, and so closes the schedule.

    Running requests come first, in batch order, decode or prompt alike. One that finds no block preempts the
    last of the batch, itself if it is the last. A step that preempts admits none. A waiting request is
    admitted with what the token budget leaves if its whole remaining prompt fits, though it takes blocks for
    its chunk only. No request overtakes another.

    `long_prefill_tokens` bounds a chunk while there are other requests (0: nothing does). An admission leaves
    `watermark` blocks free while others run.
    """

    name = "vllm_like"
    closes = True

    def __init__(self, long_prefill_tokens: int = 0, watermark: int = 0) -> None:
        if long_prefill_tokens < 0:
            raise ValueError(f"long_prefill_tokens must be at least 0, got {long_prefill_tokens}")
        if watermark < 0:
            raise ValueError(f"watermark must be at least 0, got {watermark}")
        self.long_prefill_tokens = long_prefill_tokens
        self.watermark = watermark

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        draft.chunks = {name: chunk for name, chunk in draft.chunks.items() if not chunk.admits}
        max_chunk = self.long_prefill_tokens
        if not max_chunk or len(draft.running) + len(draft.waiting) < 2:  # it may use the whole budget
            max_chunk = draft.token_budget
        step = _Step(draft, view, max_chunk)
        if not step.fit_all_running():
            step.fit_running()
        if draft.waiting and not draft.preempted:
            step.admit_waiting(self.watermark)

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        """Stable while rows, tokens or blocks keep the first waiting request from running. While all running
        requests decode, its price cannot fall and the available blocks cannot rise."""
        tokens = draft.token_budget - draft.num_decodes
        if tokens < 0:
            return None
        for chunk in draft.chunks.values():  # the only one; if last, it uses the whole budget
            last = chunk.state is draft.running[-1]
            if not last or self.long_prefill_tokens or not 0 < tokens < chunk.num_tokens:
                return None
            chunk.num_tokens = tokens
            return ALWAYS_STABLE
        if not draft.waiting or not tokens or view.num_free_rows < 1:
            return ALWAYS_STABLE
        head = draft.waiting[0]
        if head.request.group is not None or not draft.running:
            return None
        hit = view.kv.match(head)
        needed = view.kv.blocks_to_admit(hit, len(head.tokens) - hit.num_tokens) + self.watermark
        return ALWAYS_STABLE if needed > view.kv.block_budget().left(head) else None


@dataclass(slots=True)
class _Step:
    """The decisions of one step. The budgets are what is left of them."""

    draft: Draft
    view: SchedulingView
    max_chunk: int
    token_budget: int = field(init=False)
    block_budget: BlockBudget = field(init=False)

    def __post_init__(self) -> None:
        self.token_budget = self.draft.token_budget
        self.block_budget = self.view.kv.block_budget()
        for state in self.draft.preempted:  # by an earlier pass
            self.block_budget.gain(state, self.view.kv.blocks_freed_by_preempting(state))

    # -- running requests

    def fit_all_running(self) -> bool:
        """Grant all running requests their tokens, or change nothing and return False. The fast path: its
        cost grows with the chunks, not with the requests."""
        draft, price = self.draft, self.view.kv.blocks_to_append
        chunks = list(draft.chunks.values())
        wanted = [min(chunk.num_tokens, self.max_chunk) for chunk in chunks]
        left = self.token_budget - draft.num_decodes - sum(wanted)
        if left < 0:  # shorten the last chunk
            last = chunks[-1] if chunks else None
            if last is None or last.state is not draft.running[-1] or wanted[-1] + left < 1:
                return False
            wanted[-1] += left
            left = 0
        blocks = len(draft.needing_block())
        blocks += sum(price(chunk.state, n) for chunk, n in zip(chunks, wanted, strict=True))
        if not self.block_budget.spend_together(blocks):
            return False
        for chunk, num_tokens in zip(chunks, wanted, strict=True):
            chunk.num_tokens = num_tokens
        self.token_budget = left
        return True

    def fit_running(self) -> None:
        """Grant tokens in batch order until tokens or victims run out; hold the rest."""
        draft = self.draft
        gone = {state.request_id for state in draft.preempted}
        batch = [state for state in draft.running if state.request_id not in gone]
        price = dict.fromkeys((state.request_id for state in draft.needing_block()), 1)
        done = 0
        while done < len(batch) and self.token_budget:
            state = batch[done]
            if draft.computes(state) and not self._grant(state, batch, price.get(state.request_id, 0)):
                break
            done += 1
        for state in batch[done:]:
            if draft.computes(state):
                draft.hold(state)
                draft.record(NAME, state, "hold", "the token budget of the step is spent")

    def _grant(self, state: RequestState, batch: list[RequestState], price: int) -> bool:
        """Grant one request tokens and blocks, preempting the last of the batch. False if the request was the
        last itself, and so was preempted."""
        chunk = self.draft.chunks.get(state.request_id)
        take = 1
        if chunk is not None:
            take = min(chunk.num_tokens, self.max_chunk, self.token_budget)
            price = self.view.kv.blocks_to_append(state, take)
        while not self.block_budget.spend(state, price):
            victim = batch.pop()
            self.draft.preempt(victim)
            self.block_budget.gain(victim, self.view.kv.blocks_freed_by_preempting(victim))
            if victim is state:
                reason = "it needs another block, and no request runs behind it"
                self.draft.record(NAME, victim, "preempt", reason)
                return False
            reason = f"{state.request_id} comes first and needs its blocks"
            self.draft.record(NAME, victim, "preempt", reason)
        if chunk is not None:
            chunk.num_tokens = take
        self.token_budget -= take
        return True

    # -- waiting requests

    def admit_waiting(self, watermark: int) -> None:
        """Admit in order until tokens, rows or blocks run out."""
        draft, kv = self.draft, self.view.kv
        rows, num_running, binds = self.view.num_free_rows, len(draft.running), True
        for state in list(draft.waiting):
            if self.token_budget < 1 or rows < 1:
                return
            binds = binds and self.view.bind_early(draft)  # what failed once fails with more requests, too
            if binds:
                self.block_budget = kv.block_budget()  # binding may have evicted the prefix of this request
            hit = kv.match(state)
            rest = len(state.tokens) - hit.num_tokens
            price = kv.blocks_to_admit(hit, rest)
            needed = price + (watermark if num_running else 0)
            if needed <= self.block_budget.left(state):
                take = min(rest, self.max_chunk, self.token_budget)
                self.block_budget.spend(state, price if take == rest else kv.blocks_to_admit(hit, take))
                draft.chunks[state.request_id] = Chunk(state, hit.num_tokens, take, hit)
                draft.record(NAME, state, "admit", f"{take} tokens from {hit.num_tokens} on")
                self.token_budget -= take
                rows, num_running = rows - 1, num_running + 1
                continue
            reason = f"its prompt needs {needed} blocks, {self.block_budget.left(state)} are available"
            if num_running:
                draft.record(NAME, state, "wait", reason)
                return
            draft.reject(state, f"out of KV memory: {reason}")  # no request runs that could release blocks
            draft.record(NAME, state, "reject", reason)


NAME = VllmLikePass.name
PLUGIN = VllmLikePass
