"""`BackendVerifier`: a backend judges proposals for one request after the other, without an engine.

verifier = BackendVerifier(build_backend(config))
result = LoopDecoder(num_tokens=8).generate(PromptLookup(), verifier, request)
"""

from __future__ import annotations

from sagellm.core.blocks import cdiv
from sagellm.core.errors import CapacityError
from sagellm.core.plan import Chain, ExecutionPlan, Join, Prefill
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.core.protocols.speculative import Proposal, Verification
from sagellm.core.types import Request, Tokens


class BackendVerifier:
    """Implements `Verifier`. It has the backend and all its blocks to itself."""

    def __init__(self, backend: InferenceBackend) -> None:
        self._backend, self._capability = backend, backend.capability()
        self._num_groups = backend.get_kv_schema().num_groups
        self._request: Request | None = None
        self._length = 0
        """Of the request's tokens, those that the row has, and the one drawn behind them."""
        self._num_steps = 0

    def verify(self, request: Request, tokens: Tokens, proposal: Proposal) -> Verification:
        """As the contract says. Raises `CapacityError` for more tokens than the backend's blocks hold."""
        length, num_proposed = len(tokens), len(proposal.token_ids)
        block_size = self._capability.block_size
        num_blocks = self._capability.num_blocks // self._num_groups
        if cdiv(length + num_proposed, block_size) > num_blocks:
            raise CapacityError(
                f"{length + num_proposed} tokens need more than the {num_blocks} blocks of {block_size}: "
                "give the backend more (kv.num_blocks), or the request fewer tokens"
            )
        if request is not self._request or length != self._length:  # a request may be answered once more
            self._join(request, tokens, num_blocks)
        chains = (Chain(0, proposal.token_ids, proposal.parents),) if num_proposed else ()
        plan = ExecutionPlan(self._num_steps, decode_rows=(0,), decode_positions=(length - 1,), chains=chains)
        drawn = self._execute(plan)
        self._length = length + len(drawn)
        return Verification(drawn[:-1], drawn[-1])

    def _join(self, request: Request, tokens: Tokens, num_blocks: int) -> None:
        """Compute all tokens but the last in the row of the last request."""
        num_prompt_tokens, num_before = len(request.tokens), len(tokens) - 1
        join = Join(
            0, request.request_id, tokens.tobytes(), num_prompt_tokens, 0,
            tuple(range(num_blocks * self._num_groups)), request.params, request.eos_token_ids,
        )  # fmt: skip
        prefill = Prefill(0, request.request_id, 0, num_before, samples=False)
        left = () if self._request is None else (0,)
        prefills = (prefill,) if num_before else ()
        self._execute(ExecutionPlan(self._num_steps, joined=(join,), left=left, prefills=prefills))
        self._request = request

    def _execute(self, plan: ExecutionPlan) -> tuple[int, ...]:
        self._num_steps += 1
        return self._backend.execute(plan).token_ids
