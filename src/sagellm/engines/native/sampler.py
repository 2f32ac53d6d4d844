"""From logits to tokens and log-probabilities, for all rows of a step.

Order of operations: logit_bias and a soft budget's bias, min_tokens mask, penalties, temperature, top_k,
top_p, min_p, draw. An operation that no row asks for costs nothing. Where a budget of reasoning is spent, its
end marker takes the place of the drawn token, and has the log-probability that the model gives it.

Each of top_k, top_p and min_p keeps a first part of the tokens in order of falling logits, ties by rising id.
So a row needs only its largest logits, as many as are kept and one more: `topk` of a size that grows until it
is enough, and no sort of the vocabulary. The draw inverts the distribution function over ascending ids, in
float64, at one uniform number per token. That number is a hash of (seed, output position), so neither the
batch nor a preemption changes a request's tokens.

On a CPU numpy finds positions: its argmax and comparison use vector instructions, torch's do not (152 k
logits: 13 us against 170).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sagellm.accel.cot.reasoning import ReasoningTracker
from sagellm.core.protocols.fusion import FusedKernel
from sagellm.core.types import SamplingParams, TokenLogprob
from sagellm.engines.native.memory import to_device

NO_TOKEN = -1
SMALL_VOCABULARY = 2**15
"""Up to it numpy draws sooner than torch: of 768 tokens in 10 us, not 40; of 32,000 in 160, not 140, but
torch takes 120 more for what comes before."""
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014): a bijective 64-bit hash."""
    z = (state + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from `seed` and `position` alone; 53 random bits."""
    return (splitmix64(splitmix64(seed & _MASK64) ^ position) >> 11) * 2.0**-53


@dataclass(slots=True)
class RowSampler:
    """Sampling state of one row. `num_outputs` counts the tokens drawn so far. `seen` (bool [vocab], prompt
    and output) and `counts` (float [vocab], output) exist only under penalties, `reasoning` only with a
    budget. A row that `is_plain` takes the greatest logit, or of a small vocabulary any by temperature alone,
    or what the budget forces; and it wants the log-probability of no other token.
    """

    params: SamplingParams
    seed: int
    num_outputs: int
    forbidden: tuple[int, ...]
    bias_ids: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    reasoning: ReasoningTracker | None = None
    is_plain: bool = False

    @classmethod
    def of(
        cls, params: SamplingParams, seed: int, prompt: Sequence[int], outputs: Sequence[int],
        eos_token_ids: Collection[int], vocab_size: int, device: torch.device,
    ) -> RowSampler:  # fmt: skip
        """The state of a row that has drawn `outputs` after `prompt`."""
        held_back = {*eos_token_ids, *params.stop_token_ids} if params.min_tokens else ()
        row = cls(params, seed, len(outputs), tuple(i for i in sorted(held_back) if 0 <= i < vocab_size))
        row.reasoning = ReasoningTracker.of(params, prompt, outputs, eos_token_ids)
        if params.logit_bias:
            known = {i: bias for i, bias in params.logit_bias.items() if 0 <= i < vocab_size}
            row.bias_ids = torch.tensor(list(known), dtype=torch.long, device=device)
            row.bias = torch.tensor(list(known.values()), dtype=torch.float64, device=device)
        if params.has_penalties:
            given, drawn = (np.array(ids, dtype=np.int64) for ids in (prompt, outputs))
            counts = np.bincount(drawn, minlength=vocab_size).astype(np.float32)
            seen = counts > 0
            seen[given] = True
            row.seen, row.counts = torch.from_numpy(seen).to(device), torch.from_numpy(counts).to(device)
        changed = held_back or params.logit_bias or params.has_penalties
        changed = changed or params.soft_reasoning_tokens is not None
        draws = vocab_size <= SMALL_VOCABULARY and not _is_filtered(params, vocab_size)
        row.is_plain = (params.greedy or draws) and not params.logprobs and not changed
        return row

    def after(self, token_ids: Sequence[int]) -> RowSampler:
        """The state once these tokens are drawn. This one stays as it is."""
        if not token_ids:
            return self
        if self.seen is None and self.reasoning is None:
            return replace(self, num_outputs=self.num_outputs + len(token_ids))
        later = replace(self, reasoning=copy(self.reasoning))
        if self.seen is not None and self.counts is not None:
            with torch.inference_mode():
                later.seen, later.counts = self.seen.clone(), self.counts.clone()
        for token_id in token_ids:
            later.accept(token_id)
        return later

    def accept(self, token_id: int) -> None:
        """Count a token that was drawn for the row."""
        self.num_outputs += 1
        if self.reasoning is not None:
            self.reasoning.push(token_id)
        if self.seen is not None and self.counts is not None:
            with torch.inference_mode():  # they may have been made in it, by the engine's caller
                self.seen[token_id] = True
                self.counts[token_id] += 1


@dataclass(slots=True)
class SampledTokens:
    """`token_ids[i]` for row i; `logprobs[i]` if row i asked for them."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)


Draw = Callable[[torch.Tensor, torch.Tensor, Sequence[SamplingParams], Sequence[float]], torch.Tensor]
"""Token ids [S] from logits [S, vocab], the best [S] of each and uniform numbers [S], for rows that are not
greedy. A row whose best is not finite may get any id.
"""


def sample(logits: torch.Tensor, rows: Sequence[RowSampler], by_kernel: Draw | None = None) -> SampledTokens:
    """Draw one token per row from `logits` [len(rows), vocab], which it overwrites. Uses `by_kernel` if
    given. Does not count the tokens. A row whose logits are not numbers gets `NO_TOKEN`.
    """
    if logits.is_cpu and all(row.is_plain for row in rows):
        values = logits.numpy()
        drawn = SampledTokens(_forced(_plain(values, rows), rows))
        for i, row in enumerate(rows):
            if row.params.logprobs is not None:
                token_id = drawn.token_ids[i]
                drawn.logprobs[i] = TokenLogprob(token_id, _logprob_of(values[i], token_id), ())
        return drawn
    return _sample(logits, rows, by_kernel)


def _plain(logits: npt.NDArray[np.floating[Any]], rows: Sequence[RowSampler]) -> list[int]:
    """As `_sample` for plain rows, without torch. Each torch operator takes 20 to 80 us after a step's
    weights have gone through the caches.
    """
    ids: list[int] = logits.argmax(-1).tolist()
    for i, (row, token_id) in enumerate(zip(rows, ids, strict=True)):
        best = logits[i, token_id]
        if not math.isfinite(best):
            ids[i] = NO_TOKEN
        elif not row.params.greedy:
            ids[i] = draw_one(logits[i], best, row.params.temperature, uniform(row.seed, row.num_outputs))
    return ids


def draw_one(
    logits: npt.NDArray[np.floating[Any]], best: npt.ArrayLike, temperature: float, point: float
) -> int:
    """As `draw` without filters, for one row [vocab], without torch."""
    weights = np.subtract(logits, best, dtype=np.float64)
    weights /= temperature
    cumulative = np.exp(weights, out=weights).cumsum()
    total = cumulative[-1]
    return int(min(cumulative.searchsorted(point * total, "right"), cumulative.searchsorted(total)))


def _logprob_of(logits: npt.NDArray[np.floating[Any]], token_id: int) -> float:
    """As `log_softmax` of logits [vocab], for one token. NaN for `NO_TOKEN`."""
    if token_id == NO_TOKEN:
        return math.nan
    best = logits.max()
    return float(logits[token_id] - best) - math.log(float(np.exp(logits - best).sum()))


def _forced(token_ids: list[int], rows: Sequence[RowSampler]) -> list[int]:
    """The drawn tokens, with end markers where budgets of reasoning force them."""
    for i, row in enumerate(rows):
        if row.reasoning is not None and token_ids[i] != NO_TOKEN:
            forced_id = row.reasoning.forced_id
            token_ids[i] = token_ids[i] if forced_id is None else forced_id
    return token_ids


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
        params = [rows[i].params for i in drawing]
        if by_kernel is not None:
            ids[drawing] = by_kernel(chosen, best[drawing], params, points)
        else:
            ids[drawing] = torch.tensor(draw(chosen, best[drawing], params, points), device=ids.device)
    answer = SampledTokens(_forced(torch.where(best.isfinite(), ids, NO_TOKEN).tolist(), rows))
    if raw is not None:
        for i, row_logprobs in zip(asked, raw, strict=True):
            answer.logprobs[i] = _logprob(row_logprobs, answer.token_ids[i], rows[i].params.logprobs or 0)
    return answer


def _adjust(logits: torch.Tensor, rows: Sequence[RowSampler]) -> None:
    """Apply biases, min_tokens mask and penalties, in place."""
    for i, row in enumerate(rows):
        if row.bias_ids is not None and row.bias is not None:
            logits[i, row.bias_ids] += row.bias.to(logits.dtype)
        if row.reasoning is not None and (end_bias := row.reasoning.end_bias):
            logits[i, row.reasoning.end_id] += end_bias
        if row.forbidden and row.num_outputs < row.params.min_tokens:
            logits[i, list(row.forbidden)] = -math.inf
        if row.seen is not None and row.counts is not None:
            _penalize(logits[i], row.params, row.seen, row.counts)


def _penalize(logits: torch.Tensor, params: SamplingParams, seen: torch.Tensor, counts: torch.Tensor) -> None:
    """Repetition (Keskar et al. 2019, arXiv:1909.05858), presence and frequency (OpenAI's API) penalties.
    Repetition divides positive and multiplies negative logits of seen tokens. Presence is subtracted once,
    frequency once per occurrence in the output.
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
    """The tokens that the filters keep of some rows. `ids` [s, n] ascend; a token is drawn in proportion to
    its `weights` [s, n], which are 0 behind a row's last id.
    """

    rows: list[int]
    ids: torch.Tensor
    weights: torch.Tensor


def greatest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and id [S] of each row's greatest logit; NaN if it has one. Of equal logits the first counts."""
    ids = torch.from_numpy(logits.numpy().argmax(-1)) if logits.is_cpu else logits.argmax(-1)
    return logits.gather(-1, ids[:, None])[:, 0], ids


def draw(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], points: Sequence[float]
) -> list[int]:
    """Draw a token id for each row of `logits` [S, vocab]. `best` [S] are the rows' greatest logits; a row
    whose best is not finite gets 0. `points` are in [0, 1).
    """
    drawn = [0] * len(params)
    finite = [i for i, is_finite in enumerate(best.isfinite().tolist()) if is_finite]
    filtered = [i for i in finite if _is_filtered(params[i], logits.shape[1])]
    for i in set(finite).difference(filtered):  # each alone: its float64 stays in cache
        if logits.is_cpu and logits.shape[1] <= SMALL_VOCABULARY:
            drawn[i] = draw_one(logits[i].numpy(), best[i].numpy(), params[i].temperature, points[i])
            continue
        weights = _scores(logits[i, None], best[i, None], [params[i]]).exp_()
        drawn[i] = int(_draw_columns(weights, [points[i]]))
    for kept in filter_rows(logits, best, params, filtered):
        columns = _draw_columns(kept.weights, [points[i] for i in kept.rows])
        for i, token_id in zip(kept.rows, kept.ids.gather(1, columns)[:, 0].tolist(), strict=True):
            drawn[i] = token_id
    return drawn


def filter_rows(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], rows: Sequence[int]
) -> Iterator[KeptTokens]:
    """The tokens that top_k, then top_p, then min_p keep of each of `rows`. A token passes top_p (Holtzman et
    al. 2020, arXiv:1904.09751) if the mass before it is under top_p, so the first always does. min_p is
    relative to the best token.
    """
    vocab, left = logits.shape[1], list(rows)
    masses = {i: _mass(logits[i, None], best[i, None], params[i]) for i in left}
    size = max([FIRST_SIZE, *(params[i].top_k + 1 for i in left if _cuts_rank(params[i], vocab))])
    while left:
        size = min(size, vocab)
        own = [params[i] for i in left]
        values, ids = logits[left].topk(size)
        scores = _scores(values, best[left], own)
        stays = _kept_mask(scores, own, [masses[i] for i in left], vocab)
        counts = stays.sum(-1)
        enough = [i for i, count in enumerate(counts.tolist()) if count < size or size == vocab]
        if enough:
            most = int(counts[enough].max())
            for i in enough:
                _keep_smallest_tied_ids(logits[left[i]], values[i], ids[i], int(counts[i]))
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
    """The weight of a row [1, vocab], for top_p; 0 if not needed."""
    if params.top_p >= 1.0 or _cuts_rank(params, logits.shape[1]):
        return 0.0
    return float(_scores(logits, best, [params]).exp_().sum())


def _scores(logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logarithms of weights relative to the best token's, float64 [S, n]."""
    temperatures = _column((row.temperature for row in params), logits.device)
    return (logits - best.double()[:, None]).div_(temperatures)


def _kept_mask(
    scores: torch.Tensor, params: Sequence[SamplingParams], masses: Sequence[float], vocab: int
) -> torch.Tensor:
    """Which leading tokens are kept, bool [S, n]; of each row a first part."""
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


def _keep_smallest_tied_ids(
    logits: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, count: int
) -> None:
    """Keep the smallest ids of tokens that tie at the cut; `topk` takes any."""
    last = values[count - 1]
    if count == len(values) or values[count] != last or last.isinf():
        return
    better = int((values > last).sum())
    if logits.is_cpu:
        equal = torch.from_numpy(np.flatnonzero(logits.numpy() == last.numpy()))
    else:
        equal = (logits == last).nonzero()[:, 0]
    ids[better:count] = equal[: count - better]


def _draw_columns(weights: torch.Tensor, points: Sequence[float]) -> torch.Tensor:
    """The column [S, 1] of each point, as a share of its row's weight."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    # The last column with any weight is the limit: rounding must not step over it.
    limit = torch.searchsorted(cumulative, total)
    found = torch.searchsorted(cumulative, _column(points, weights.device) * total, right=True)
    return torch.minimum(found, limit)


def _column(values: Iterable[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device=device)[:, None]


def kernel_draw(kernel: FusedKernel) -> Draw:
    """`Draw` by a kernel, whose parameters go to the device in one copy."""

    def drawn(
        logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], points: Sequence[float]
    ) -> torch.Tensor:
        rows = [
            (row.temperature, max(0, row.top_k), row.top_p, row.min_p, point)
            for row, point in zip(params, points, strict=True)
        ]
        table = torch.tensor(rows, dtype=torch.float64)
        tokens: torch.Tensor = kernel.apply(logits, to_device(table, logits.device))
        return tokens

    return drawn


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Positions of a row's prompt whose logits are wanted. They are the step's flat rows `[first_row,
    first_row + len(targets))`. `targets` are the tokens that follow, `top` is the number of alternatives to
    report.
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
    """The log-probability of each target, by row. `hidden` [R, hidden] holds the positions before the
    targets, for one of `scored` after the other. Logits are made and dropped a few rows at a time.
    """
    most, sizes = max(1, MAX_LOGITS // vocab_size), [len(prompt.targets) for prompt in scored]
    found: dict[int, tuple[TokenLogprob, ...]] = {}
    for prompt, own in zip(scored, torch.split(hidden, sizes), strict=True):
        entries: list[TokenLogprob] = []
        for start in range(0, len(own), most):
            targets = prompt.targets[start : start + most]
            entries += _target_logprobs(head(own[start : start + most]), targets, min(prompt.top, vocab_size))
        found[prompt.row] = tuple(entries)
    return found


def _target_logprobs(logits: torch.Tensor, targets: Sequence[int], top: int) -> Iterator[TokenLogprob]:
    """Log-probabilities of each row's target and of the `top` likeliest tokens."""
    total = logits.logsumexp(-1, keepdim=True)
    column = torch.tensor(targets, dtype=torch.long, device=logits.device)[:, None]
    chosen = (logits.gather(1, column) - total)[:, 0].tolist()
    best = logits.topk(top, dim=-1)
    pairs = zip(best.indices.tolist(), (best.values - total).tolist(), strict=True)
    for token_id, logprob, (ids, values) in zip(targets, chosen, pairs, strict=True):
        yield TokenLogprob(token_id, logprob, tuple(zip(ids, values, strict=True)))
