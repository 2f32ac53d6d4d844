"""`LoopDecoder`: propose and verify in turns, for one request and without an engine.

For studies of a proposer alone, with any model behind a `Verifier` (`engines/backend_verifier.py`).
"""

from __future__ import annotations

from sagellm.core.protocols.speculative import Asked, Proposal, Proposer, SpeculativeResult, Verifier
from sagellm.core.types import Request, Tokens


class LoopDecoder:
    """Implements `SpeculativeDecoder`. `num_tokens`: the most that are proposed at a time; 0: none."""

    def __init__(self, num_tokens: int = 4) -> None:
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
        self._num_tokens = num_tokens

    def generate(self, proposer: Proposer, verifier: Verifier, request: Request) -> SpeculativeResult:
        """As the contract says. Raises `ValueError` without `max_tokens`, which ends a generation."""
        params, ends = request.params, frozenset(request.params.stop_token_ids)
        if params.max_tokens is None:
            raise ValueError("set params.max_tokens: nothing else ends every generation")
        if not params.ignore_eos:
            ends |= request.eos_token_ids
        tokens, num_prompt_tokens = Tokens(request.tokens), len(request.tokens)
        num_steps = num_proposed = num_accepted = 0
        left = params.max_tokens
        while left:
            most = min(self._num_tokens, left - 1)
            [proposal] = proposer.propose([Asked(request, tokens, most)] if most else []) or [Proposal()]
            judged = verifier.verify(request, tokens, proposal)
            proposer.observe(request.request_id, len(judged.accepted))
            num_steps += 1
            num_proposed += len(proposal.token_ids)
            num_accepted += len(judged.accepted)
            drawn = [*judged.accepted, judged.next_token]
            at_end = next((i for i, token in enumerate(drawn) if token in ends), len(drawn) - 1)
            tokens.extend(drawn[: at_end + 1])
            left -= at_end + 1
            if tokens[-1] in ends:
                break
        proposer.forget(request, tokens)
        return SpeculativeResult(
            tuple(tokens.slice(num_prompt_tokens)), num_steps, num_proposed, num_accepted
        )
