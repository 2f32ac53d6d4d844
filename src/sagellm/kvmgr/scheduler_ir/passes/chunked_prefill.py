"""Divides the token budget of a step between decodes, running prompts and admissions.

Decodes come first, then the prompts of running requests in chunks, then waiting requests. Mixing prompt
chunks into decode steps is Sarathi-Serve's (Agrawal et al., 2024).
"""

from __future__ import annotations

from sagellm.core.plan import Chunk, Draft, RequestState
from sagellm.core.protocols.scheduler_ir import ALWAYS_STABLE, SchedulingView, Stability
from sagellm.kvmgr.scheduler_ir._queue import prefix_hit


class ChunkedPrefillPass:
    """Cuts chunks to the token budget and admits waiting requests in order.

    It admits while budget and rows last. `chunk_size` bounds the chunk of one request (None: only the budget
    does). A request of a group (`n > 1`) waits until the first of its group has computed their shared prompt.
    """

    name = "chunked_prefill"

    def __init__(self, chunk_size: int | None = None) -> None:
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        self.chunk_size = chunk_size

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        token_budget = draft.token_budget - draft.num_decodes
        if token_budget < 0:
            token_budget += self._hold_last_decodes(draft, -token_budget)
        if not draft.chunks and not draft.waiting:
            return
        running = list(draft.chunks.values())
        if len(running) > 1:
            running = [draft.chunks[s.request_id] for s in draft.running if s.request_id in draft.chunks]
        draft.chunks.clear()
        for chunk in sorted(running, key=lambda chunk: chunk.num_tokens > 1):
            chunk.num_tokens = self._cut(chunk.num_tokens, token_budget)
            if chunk.num_tokens < 1:  # skipped: without a chunk it computes nothing in this step
                draft.record(self.name, chunk.state, "hold", "the token budget of the step is spent")
                continue
            draft.chunks[chunk.state.request_id] = chunk
            token_budget -= chunk.num_tokens
        rows = view.num_free_rows + len(draft.preempted)
        computing = {s.request.group for s in draft.running if s.num_computed < s.num_prompt_tokens}
        for state in draft.waiting:
            if token_budget < 1 or rows < 1:
                break
            group = state.request.group
            if group is not None and group in computing:
                draft.record(
                    self.name, state, "wait", "another request of its group is computing the shared prompt"
                )
                continue
            hit = prefix_hit(draft, view, state)
            num_uncached = len(state.tokens) - hit.num_tokens
            num_tokens = self._cut(num_uncached, token_budget)
            draft.chunks[state.request_id] = Chunk(state, hit.num_tokens, num_tokens, hit)
            draft.record(self.name, state, "admit", f"{num_tokens} tokens from {hit.num_tokens} on")
            if num_uncached > view.kv.block_size:
                computing.add(group)
            token_budget -= num_tokens
            rows -= 1

    def stable_until(self, draft: Draft, view: SchedulingView) -> Stability | None:
        """Stable. Leaves in `draft.waiting` the requests that it would admit. None if one of them has a
        prefix hit: pinning the hit in every step changes the index."""
        token_budget, rows = draft.token_budget - draft.num_decodes, view.num_free_rows
        if token_budget < 0:
            return None
        for chunk in draft.chunks.values():  # the only chunk; it uses the whole budget
            if (
                not 0 < token_budget < chunk.num_tokens
                or self._cut(chunk.num_tokens, token_budget) < token_budget
            ):
                return None
            chunk.num_tokens = token_budget
            draft.waiting.clear()
            return ALWAYS_STABLE
        tried: list[RequestState] = []
        for state in draft.waiting:
            if token_budget < 1 or len(tried) == rows:
                break
            if state.request.group is not None or prefix_hit(draft, view, state).num_blocks:
                return None
            tried.append(state)
            token_budget -= self._cut(len(state.tokens), token_budget)
        draft.waiting[:] = tried
        return ALWAYS_STABLE

    def _hold_last_decodes(self, draft: Draft, excess: int) -> int:
        """Hold the last `excess` decodes, which exceed the token budget. Returns how many."""
        decodes = [state for state in draft.running if state.decoding and draft.computes(state)]
        last = decodes[::-1][:excess]
        for state in last:
            draft.hold(state)
            draft.record(self.name, state, "hold", "the token budget of the step is spent")
        return len(last)

    def _cut(self, num_tokens: int, token_budget: int) -> int:
        return min(num_tokens, token_budget, self.chunk_size or num_tokens)


PLUGIN = ChunkedPrefillPass
