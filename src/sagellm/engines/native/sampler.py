"""From logits to tokens, for the rows of one step at once, each row with its own `SamplingParams`.

Order of operations as `SamplingParams` promises: logit_bias, min_tokens mask, penalties, temperature, top_k,
top_p, min_p, draw. What no row asks for costs nothing. The draw (`draw.py`) is at one uniform number per
token; that number is a hash of (seed, output position), so neither the batch nor a preemption changes what a
request gets.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core.protocols.fusion import FusedKernel
from sagellm.core.types import SamplingParams, TokenLogprob
from sagellm.engines.native.memory import to_device

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
class SampledTokens:
    """`token_ids[i]` for row i; `logprobs[i]` where row i asked for them."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)


Draw = Callable[[torch.Tensor, torch.Tensor, Sequence[SamplingParams], Sequence[float]], torch.Tensor]
"""Token ids [S] of logits [S, vocab], the best [S] of each, and uniform numbers [S], for rows that are not
greedy; of rows whose best is not finite, any.
"""


def sample(logits: torch.Tensor, rows: Sequence[RowSampler], by_kernel: Draw | None = None) -> SampledTokens:
    """Draw one token per row from `logits` [len(rows), vocab], which are used up, `by_kernel` where one is
    given. Does not count the tokens.

    A row whose logits are not numbers, so that nothing can be drawn, gets `NO_TOKEN`.
    """
    if logits.is_cpu and all(row.is_plain for row in rows):
        return SampledTokens(_greedy(logits.numpy()))
    return _sample(logits, rows, by_kernel)


def _greedy(logits: npt.NDArray[np.floating[Any]]) -> list[int]:
    """As `_sample` for plain rows, and without torch: each of its operators takes 20 to 80 us where a step's
    weights have just gone through the caches.
    """
    ids: list[int] = logits.argmax(-1).tolist()
    return [token if math.isfinite(logits[i, token]) else NO_TOKEN for i, token in enumerate(ids)]


@torch.inference_mode()
def _sample(logits: torch.Tensor, rows: Sequence[RowSampler], by_kernel: Draw | None) -> SampledTokens:
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    raw = logits[asked].log_softmax(-1) if asked else None
    _adjust(logits, rows)
    best, ids = greatest(logits)
    drawing = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawing:
        chosen = logits if len(drawing) == len(rows) else logits[drawing]
        points = [uniform(rows[i].seed, rows[i].num_outputs) for i in drawing]
        ids[drawing] = (by_kernel or _drawn)(chosen, best[drawing], [rows[i].params for i in drawing], points)
    answer = SampledTokens(torch.where(best.isfinite(), ids, NO_TOKEN).tolist())
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


FIRST_SIZE, GROWTH = 128, 16


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """What the filters leave of some rows: `ids` [s, n] ascending, and `weights` [s, n] in proportion to
    which they are drawn; behind a row's last id weights are 0.
    """

    rows: list[int]
    ids: torch.Tensor
    weights: torch.Tensor


def greatest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and id [S] of each row's greatest logit, the first of equals; NaN where a row has one."""
    ids = torch.from_numpy(logits.numpy().argmax(-1)) if logits.is_cpu else logits.argmax(-1)
    return logits.gather(-1, ids[:, None])[:, 0], ids


def draw(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], points: Sequence[float]
) -> list[int]:
    """One token id per row of `logits` [S, vocab], whose greatest are `best` [S], finite; `points` are in
    [0, 1).
    """
    drawn = [0] * len(params)
    filtered = [i for i, row in enumerate(params) if _is_filtered(row, logits.shape[1])]
    for i in set(range(len(params))).difference(filtered):  # each alone: its float64 stays in cache
        weights = _scores(logits[i, None], best[i, None], [params[i]]).exp_()
        drawn[i] = int(_places(weights, [points[i]]))
    for kept in filter_rows(logits, best, params, filtered):
        places = _places(kept.weights, [points[i] for i in kept.rows])
        for i, token_id in zip(kept.rows, kept.ids.gather(1, places)[:, 0].tolist(), strict=True):
            drawn[i] = token_id
    return drawn


def filter_rows(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], rows: Sequence[int]
) -> Iterator[KeptTokens]:
    """What is kept of each of `rows`: top_k, then top_p (Holtzman et al. 2020, arXiv:1904.09751) of what is
    left, then min_p relative to the best. A token stays if the mass before it is under top_p: the first
    always.
    """
    vocab, left = logits.shape[1], list(rows)
    masses = {i: _mass(logits[i, None], best[i, None], params[i]) for i in left}
    size = max([FIRST_SIZE, *(params[i].top_k + 1 for i in left if _cuts_rank(params[i], vocab))])
    while left:
        size = min(size, vocab)
        own = [params[i] for i in left]
        values, ids = logits[left].topk(size)
        scores = _scores(values, best[left], own)
        stays = _stays(scores, own, [masses[i] for i in left], vocab)
        counts = stays.sum(-1)
        enough = [i for i, count in enumerate(counts.tolist()) if count < size or size == vocab]
        if enough:
            most = int(counts[enough].max())
            for i in enough:
                _settle_ties(logits[left[i]], values[i], ids[i], int(counts[i]))
            weights = scores[enough, :most].exp_().masked_fill_(~stays[enough, :most], 0.0)
            order = ids[enough, :most].masked_fill_(~stays[enough, :most], vocab).sort(-1)
            yield KeptTokens([left[i] for i in enough], order.values, weights.gather(1, order.indices))
        left = [row for i, row in enumerate(left) if i not in set(enough)]
        size *= GROWTH


def _is_filtered(params: SamplingParams, vocab: int) -> bool:
    return _cuts_rank(params, vocab) or params.top_p < 1.0 or params.min_p > 0


def _cuts_rank(params: SamplingParams, vocab: int) -> bool:
    return 0 < params.top_k < vocab


def _mass(logits: torch.Tensor, best: torch.Tensor, params: SamplingParams) -> float:
    """The weight of all tokens of a row [1, vocab], where top_p is a share of that; else 0, as if unknown."""
    if params.top_p >= 1.0 or _cuts_rank(params, logits.shape[1]):
        return 0.0
    return float(_scores(logits, best, [params]).exp_().sum())


def _scores(logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logarithms of weights relative to the best token's, float64 [S, n]."""
    temperatures = _column((row.temperature for row in params), logits.device)
    return (logits - best.double()[:, None]).div_(temperatures)


def _stays(
    scores: torch.Tensor, params: Sequence[SamplingParams], masses: Sequence[float], vocab: int
) -> torch.Tensor:
    """Which of the leading tokens are kept, bool [S, n], by falling `scores`: of each row a first part."""
    device = scores.device
    limits = _column((row.top_k if _cuts_rank(row, vocab) else vocab for row in params), device)
    stays = torch.arange(scores.shape[1], device=device) < limits
    if any(row.top_p < 1.0 for row in params):
        weights = scores.exp().masked_fill_(~stays, 0.0)
        before = weights.cumsum(-1) - weights
        known = _column(masses, device)
        shares = _column((row.top_p if row.top_p < 1.0 else math.inf for row in params), device)
        stays &= before < shares * torch.where(known > 0, known, weights.sum(-1, keepdim=True))
    floors = [math.log(row.min_p) if row.min_p > 0 else -math.inf for row in params]
    stays &= scores >= _column(floors, device)
    stays[:, 0] = True
    return stays


def _settle_ties(logits: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, count: int) -> None:
    """Of the tokens that are as good as the last of `count` kept ones, keep the smallest ids: `topk` takes
    any.
    """
    last = values[count - 1]
    if count == len(values) or values[count] != last or last.isinf():
        return
    better = int((values > last).sum())
    if logits.is_cpu:
        equal = torch.from_numpy(np.flatnonzero(logits.numpy() == last.numpy()))
    else:
        equal = (logits == last).nonzero()[:, 0]
    ids[better:count] = equal[: count - better]


def _places(weights: torch.Tensor, points: Sequence[float]) -> torch.Tensor:
    """The column [S, 1] in which each point lies, as a share of its row's weight."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    # The last column with any weight is the limit: rounding must not step over it.
    limit = torch.searchsorted(cumulative, total)
    found = torch.searchsorted(cumulative, _column(points, weights.device) * total, right=True)
    return torch.minimum(found, limit)


def _column(values: Iterable[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device=device)[:, None]


class KernelDraw:
    """`Draw` of the sampler by `kernel`."""

    def __init__(self, kernel: FusedKernel) -> None:
        self._kernel = kernel

    def __call__(
        self, logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams],
        points: Sequence[float],
    ) -> torch.Tensor:  # fmt: skip
        rows = [
            (row.temperature, max(0, row.top_k), row.top_p, row.min_p, point)
            for row, point in zip(params, points, strict=True)
        ]
        table = torch.tensor(rows, dtype=torch.float64)
        tokens: torch.Tensor = self._kernel.apply(logits, to_device(table, logits.device))
        return tokens


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Positions of a row's prompt whose logits are wanted: flat rows `[first_row, first_row + len(targets))`
    of the step. `targets` are the tokens that follow, `top` is how many alternatives to report.
    """

    row: int
    first_row: int
    targets: array[int]
    top: int


MAX_LOGITS = 2**23
"""Logits that are held at a time: 32 MiB in float32, and as much again for their exponentials."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""From hidden rows [R, hidden] to logits [R, vocab]."""


def prompt_logprobs(
    head: Head, hidden: torch.Tensor, scored: Sequence[ScoredPrompt], vocab_size: int
) -> dict[int, tuple[TokenLogprob, ...]]:
    """By row, the log-probability of each of its targets. `hidden` [R, hidden] holds the positions before
    them, one `ScoredPrompt` after the other; the logits are made and dropped a few rows at a time.
    """
    most = max(1, MAX_LOGITS // vocab_size)
    found: dict[int, tuple[TokenLogprob, ...]] = {}
    first = 0
    for one in scored:
        entries: list[TokenLogprob] = []
        for start in range(0, len(one.targets), most):
            targets = one.targets[start : start + most]
            begin = first + start
            entries += _entries(head(hidden[begin : begin + len(targets)]), targets, min(one.top, vocab_size))
        found[one.row] = tuple(entries)
        first += len(one.targets)
    return found


def _entries(logits: torch.Tensor, targets: Sequence[int], top: int) -> Iterator[TokenLogprob]:
    """Of each row of `logits` [R, vocab], its target's entry with the `top` likeliest tokens."""
    total = logits.logsumexp(-1, keepdim=True)
    column = torch.tensor(targets, dtype=torch.long, device=logits.device)[:, None]
    chosen = (logits.gather(1, column) - total)[:, 0].tolist()
    best = logits.topk(top, dim=-1)
    pairs = zip(best.indices.tolist(), (best.values - total).tolist(), strict=True)
    for token_id, logprob, (ids, values) in zip(targets, chosen, pairs, strict=True):
        yield TokenLogprob(token_id, logprob, tuple(zip(ids, values, strict=True)))
