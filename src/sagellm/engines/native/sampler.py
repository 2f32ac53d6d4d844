"""From logits to tokens, for the rows of one step at once, each row with its own `SamplingParams`.

Order of operations as `SamplingParams` promises: logit_bias, min_tokens mask, penalties, temperature, top_k,
top_p, min_p, draw. What no row asks for costs nothing. The draw (`draw.py`) is at one uniform number per
token; that number is a hash of (seed, output position), so neither the batch nor a preemption changes what a
request gets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core.types import SamplingParams, TokenLogprob
from sagellm.engines.native.draw import draw, greatest

NO_TOKEN = -1
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijective hash of 64 bits."""
    z = (state + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on `seed` and `position` alone; 53 random bits."""
    return (splitmix64(splitmix64(seed & _MASK64) ^ position) >> 11) * 2.0**-53


def request_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a request that gave none: the same in every process, unlike `hash`."""
    digest = hashlib.blake2b(f"{engine_seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(slots=True)
class RowSampler:
    """What sampling must know of one row. `num_outputs` counts the tokens drawn so far.

    `seen` (bool [vocab], prompt and output) and `counts` (float [vocab], output) exist only under penalties.
    `is_plain`: its token is that of the greatest logit, and nothing else is asked for.
    """

    params: SamplingParams
    seed: int
    num_outputs: int
    forbidden: tuple[int, ...]
    bias_ids: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    is_plain: bool = False

    @classmethod
    def of(
        cls, params: SamplingParams, seed: int, prompt: Sequence[int], outputs: Sequence[int],
        eos_token_ids: Iterable[int], vocab_size: int, device: torch.device,
    ) -> RowSampler:  # fmt: skip
        """The state of a row whose request has drawn `outputs` after `prompt` (some, after a preemption)."""
        held_back = {*eos_token_ids, *params.stop_token_ids} if params.min_tokens else ()
        row = cls(params, seed, len(outputs), tuple(i for i in sorted(held_back) if 0 <= i < vocab_size))
        if params.logit_bias:
            known = {i: bias for i, bias in params.logit_bias.items() if 0 <= i < vocab_size}
            row.bias_ids = torch.tensor(list(known), dtype=torch.long, device=device)
            row.bias = torch.tensor(list(known.values()), dtype=torch.float64, device=device)
        if params.has_penalties:
            drawn = torch.tensor(outputs, dtype=torch.long)
            row.seen = torch.zeros(vocab_size, dtype=torch.bool)
            row.seen[torch.tensor(prompt, dtype=torch.long)] = True
            row.seen[drawn] = True
            row.counts = torch.bincount(drawn, minlength=vocab_size).float()
            row.seen, row.counts = row.seen.to(device), row.counts.to(device)
        changed = held_back or params.logit_bias or params.has_penalties
        row.is_plain = params.greedy and params.logprobs is None and not changed
        return row

    def accept(self, token_id: int) -> None:
        """Count a token that was drawn for the row."""
        self.num_outputs += 1
        if self.seen is not None and self.counts is not None:
            with torch.inference_mode():  # they may have been made in it, by whoever called the engine
                self.seen[token_id] = True
                self.counts[token_id] += 1


@dataclass(slots=True)
class Sample:
    """`token_ids[i]` for row i; `logprobs[i]` where row i asked for them."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)


Draw = Callable[[torch.Tensor, torch.Tensor, Sequence[SamplingParams], Sequence[float]], torch.Tensor]
"""Token ids [S] of logits [S, vocab], the best [S] of each, and uniform numbers [S], for rows that are not
greedy; of rows whose best is not finite, any.
"""


def sample(logits: torch.Tensor, rows: Sequence[RowSampler], by_kernel: Draw | None = None) -> Sample:
    """Draw one token per row from `logits` [len(rows), vocab], which are used up, `by_kernel` where one is
    given. Does not count the tokens.

    A row whose logits are not numbers, so that nothing can be drawn, gets `NO_TOKEN`.
    """
    if logits.is_cpu and all(row.is_plain for row in rows):
        return Sample(_greedy(logits.numpy()))
    return _sample(logits, rows, by_kernel)


def _greedy(logits: npt.NDArray[np.floating[Any]]) -> list[int]:
    """As `_sample` for plain rows, and without torch: each of its operators takes 20 to 80 us where a step's
    weights have just gone through the caches.
    """
    ids: list[int] = logits.argmax(-1).tolist()
    return [token if math.isfinite(logits[i, token]) else NO_TOKEN for i, token in enumerate(ids)]


@torch.inference_mode()
def _sample(logits: torch.Tensor, rows: Sequence[RowSampler], by_kernel: Draw | None) -> Sample:
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    raw = logits[asked].log_softmax(-1) if asked else None
    _adjust(logits, rows)
    best, ids = greatest(logits)
    drawing = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawing:
        chosen = logits if len(drawing) == len(rows) else logits[drawing]
        points = [uniform(rows[i].seed, rows[i].num_outputs) for i in drawing]
        ids[drawing] = (by_kernel or _drawn)(chosen, best[drawing], [rows[i].params for i in drawing], points)
    answer = Sample(torch.where(best.isfinite(), ids, NO_TOKEN).tolist())
    if raw is not None:
        for i, row_logprobs in zip(asked, raw, strict=True):
            answer.logprobs[i] = _logprob(row_logprobs, answer.token_ids[i], rows[i].params.logprobs or 0)
    return answer


def _drawn(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], points: Sequence[float]
) -> torch.Tensor:
    """`Draw` by torch."""
    ids = torch.zeros(len(params), dtype=torch.long)
    finite = best.isfinite().nonzero()[:, 0].tolist()
    if len(finite) < len(params):
        logits, best = logits[finite], best[finite]
    drawn = draw(logits, best, [params[i] for i in finite], [points[i] for i in finite])
    ids[finite] = torch.tensor(drawn, dtype=torch.long)
    return ids.to(logits.device)


def _adjust(logits: torch.Tensor, rows: Sequence[RowSampler]) -> None:
    """Bias, min_tokens mask and penalties, in place."""
    for i, row in enumerate(rows):
        if row.bias_ids is not None and row.bias is not None:
            logits[i, row.bias_ids] += row.bias.to(logits.dtype)
        if row.forbidden and row.num_outputs < row.params.min_tokens:
            logits[i, list(row.forbidden)] = -math.inf
        if row.seen is not None and row.counts is not None:
            _penalize(logits[i], row.params, row.seen, row.counts)


def _penalize(logits: torch.Tensor, params: SamplingParams, seen: torch.Tensor, counts: torch.Tensor) -> None:
    """Repetition (Keskar et al. 2019, arXiv:1909.05858): divide positive, multiply negative logits of seen
    tokens. Presence and frequency (OpenAI's API): subtract once, and once per occurrence in the output.
    """
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        scaled = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits.copy_(torch.where(seen, scaled, logits))
    if params.presence_penalty or params.frequency_penalty:
        logits.sub_(params.frequency_penalty * counts + params.presence_penalty * (counts > 0))


def _logprob(logprobs: torch.Tensor, token_id: int, top: int) -> TokenLogprob:
    best = torch.topk(logprobs, min(top, len(logprobs)))
    pairs = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), pairs)
