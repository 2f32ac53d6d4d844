"""Fits a cost model's coefficients to measured request timings: few, bounded, and the same for the same data.

Which step computed what is not in the measurements, so the engine itself is simulated: with the coefficients
so far it yields the steps, and which of them each request waited for; then the coefficients are moved to
where these steps together take the time that was measured; and again, since the steps depend on the
coefficients (a part of the way each time: near saturation a little more speed is a lot less waiting).

The inner problem is least squares on the logarithms of the coefficients (Levenberg 1944, Marquardt 1963). It
is robust, with Huber's (1964) loss at first and Cauchy's later, because a request that was preempted in one
world and not in the other says nothing about the price of a step. Where the measurements do not tell
coefficients apart, a prior does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sagellm.core.errors import ConfigError
from sagellm.engines.simulator.cost_model import Coefficients, CostModel
from sagellm.engines.simulator.measured import Measured, Run

Floats: TypeAlias = npt.NDArray[np.float64]
Loss: TypeAlias = Callable[[Floats], tuple[Floats, Floats]]
Simulate: TypeAlias = Callable[[Sequence[Measured], CostModel], Run]
"""Serves requests in simulated time."""

MIN_REQUESTS = 10
OUTLIER = 2.0
"""Deviations, in units of what is expected of one span, from which on a span counts less."""
SHARE = 0.6
"""Of the way to the best coefficients for the steps of one round that the next round takes."""
ROUGH_ROUNDS = 3
"""Rounds with Huber's loss, whose only minimum is found from afar."""
DECODE_NOISE, WAIT_NOISE, PREFILL_NOISE = 0.01, 0.03, 0.10
"""What is expected of one span's relative error: decoding, waiting and prefill together, prefill alone."""
MAX_MOVES, DELTA, MAX_DAMPING, TOLERANCE = 80, 1e-4, 1e9, 1e-7
"""Of the least squares: moves, difference for slopes, when to give up a direction, gain that is none."""
UNDETERMINED = 0.7
"""Of the prior's width: a coefficient that stays wider than that is not determined."""
EDGE = 0.01
"""A coefficient that is as near as this to a bound is held by it; the way to it is taken in shares."""
INDEPENDENT_SPANS = 30
"""How many spans tell of different steps, at most: most share nearly all of theirs."""
SHORT_S = 0.005
"""Seconds added to that: what timestamps and launch times scatter."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of a coefficient before anything is measured: a log-normal, cut at physical bounds."""

    mean: float
    log_sigma: float
    low: float
    high: float


def _prior(name: str, log_sigma: float, low: float, high: float) -> Prior:
    return Prior(getattr(Coefficients(), name), log_sigma, low, high)


PRIORS: Mapping[str, Prior] = MappingProxyType(
    {
        "weight_bandwidth": _prior("weight_bandwidth", 0.15, 0.2, 1.0),
        "kv_bandwidth": _prior("kv_bandwidth", 0.15, 0.2, 1.0),
        "compute": _prior("compute", 0.25, 0.1, 1.1),
        "chunk_attention": _prior("chunk_attention", 0.3, 0.05, 1.0),
        "overlap": _prior("overlap", 0.2, 1.0, 8.0),
        "step_s": _prior("step_s", 0.7, 1e-5, 3e-2),
        "chunk_step_s": _prior("chunk_step_s", 1.0, 1e-5, 5e-2),
        "row_s": _prior("row_s", 0.5, 1e-8, 1e-4),
        "expert_bandwidth": _prior("expert_bandwidth", 0.25, 0.1, 1.0),
        "expert_compute": _prior("expert_compute", 0.8, 0.02, 1.0),
        "expert_row_s": _prior("expert_row_s", 1.0, 1e-8, 2e-4),
        "link_bandwidth": _prior("link_bandwidth", 0.4, 0.05, 1.0),
        "link_latency": _prior("link_latency", 0.5, 0.1, 10.0),
    }
)
"""Around the defaults. A peak may be passed a little: devices clock higher than their sheets say."""


NARROWEST = 0.03
"""The relative width that is left to a coefficient, however well another calibration knows it."""


def narrowed(
    priors: Mapping[str, Prior], known: Coefficients, log_sigmas: Mapping[str, float]
) -> dict[str, Prior]:
    """Priors around the coefficients of another calibration, as narrow as it determined each."""
    values = known.as_dict()
    return {
        name: replace(
            one,
            mean=min(max(values[name], one.low), one.high),
            log_sigma=min(one.log_sigma, max(NARROWEST, log_sigmas.get(name, one.log_sigma))),
        )
        for name, one in priors.items()
    }


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted model and how it did: `errors` are relative errors of mean TPOT and mean TTFT on the
    requests that were fitted. `log_sigmas`: how well each coefficient is known, as standard deviations of its
    logarithm."""

    cost_model: CostModel
    errors: tuple[float, float]
    num_requests: int
    num_rounds: int
    score: float
    log_sigmas: Mapping[str, float] = field(default_factory=dict)
    priors: Mapping[str, Prior] = field(default_factory=dict)

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Coefficients of which neither these measurements nor those of a calibration before say much."""
        sigmas = self.log_sigmas.items()
        return tuple(name for name, sigma in sigmas if sigma > UNDETERMINED * PRIORS[name].log_sigma)

    @property
    def on_a_bound(self) -> tuple[str, ...]:
        """Coefficients at the edge of what is physically sensible."""
        values = self.cost_model.coefficients.as_dict()
        return tuple(
            name
            for name, prior in self.priors.items()
            if not prior.low * (1 + EDGE) < values[name] < prior.high * (1 - EDGE)
        )


def calibrate(
    requests: Sequence[Measured],
    start: CostModel,
    simulate: Simulate,
    *,
    num_fitted: int | None = None,
    open_end: bool = False,
    rounds: int = 12,
    priors: Mapping[str, Prior] = PRIORS,
) -> Calibration:
    """Fit to the timings of the first `num_fitted` requests by arrival (None: all).

    All of `requests` arrive in the simulation; of those beyond `num_fitted` only arrival and lengths are
    read. `open_end`: others followed that are not known, so only what happened before the last known request
    was scheduled counts. Raises `ConfigError` for fewer than `MIN_REQUESTS`.
    """
    fitted = requests[:num_fitted]
    if len(fitted) < MIN_REQUESTS:
        raise ConfigError(f"{len(fitted)} requests to fit to: at least {MIN_REQUESTS} are needed")
    horizon_s = max(one.scheduled_s for one in fitted) if open_end else np.inf
    model, best = start, None
    for number in range(rounds):
        run = simulate(requests, model)
        spans = Spans.of(fitted, run, horizon_s)
        problem = Problem(model, StepArrays.of(run, model), spans, priors)
        found = Calibration(model, _errors(fitted, run), len(fitted), number, spans.score(), priors=priors)
        if best is None or found.score < best.score:
            best = replace(found, log_sigmas=problem.log_sigmas())
        loss_of = _huber if number < ROUGH_ROUNDS else _cauchy
        moved = replace(model, coefficients=problem.solve(loss_of))
        if _close(moved.coefficients, model.coefficients):
            break
        model = moved
    assert best is not None
    return replace(best, num_rounds=number + 1)


def _errors(measured: Sequence[Measured], run: Run) -> tuple[float, float]:
    """Relative errors of the simulated means of TPOT and TTFT."""
    timings = run.timings[: len(measured)]
    tpot = np.mean([one.tpot_s for one in timings]) / np.mean([one.tpot_s for one in measured])
    ttft = np.mean([one.ttft_s for one in timings]) / np.mean([one.ttft_s for one in measured])
    return float(tpot - 1), float(ttft - 1)


@dataclass(frozen=True, slots=True)
class Spans:
    """Stretches of time that were measured, and the steps that fill them in the simulation: after `first`
    steps had ended, until `last` had. `simulated_s` is what they took there."""

    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    measured_s: Floats
    simulated_s: Floats
    noise_s: Floats

    @classmethod
    def of(cls, measured: Sequence[Measured], run: Run, horizon_s: float) -> Spans:
        """Decoding, queue to first token, and batch to first token of each request, up to the horizon."""
        rows = []
        for one, twin in zip(measured, run.timings, strict=False):
            decode_s = one.last_token_s - one.first_token_s
            prefill_s = one.first_token_s - one.scheduled_s
            if one.num_output_tokens > 1 and one.last_token_s <= horizon_s:
                rows.append((twin.first_token_s, twin.finished_s, decode_s, DECODE_NOISE))
            if one.first_token_s <= horizon_s:
                rows.append((twin.queued_s, twin.first_token_s, one.ttft_s, WAIT_NOISE))
                rows.append((twin.scheduled_s, twin.first_token_s, prefill_s, PREFILL_NOISE))
        begin_s, end_s, measured_s, noise = np.array(rows).T
        noise_s = noise * measured_s + SHORT_S
        return cls(run.steps_until(begin_s), run.steps_until(end_s), measured_s, end_s - begin_s, noise_s)

    def residuals(self, steps_s: Floats) -> Floats:
        """Deviations in units of the noise, if the steps took that long."""
        total_s = np.concatenate(([0.0], np.cumsum(steps_s)))
        return (total_s[self.last] - total_s[self.first] - self.measured_s) / self.noise_s

    def score(self) -> float:
        """Mean loss of the simulation as it was."""
        return float(np.mean(_cauchy((self.simulated_s - self.measured_s) / self.noise_s)[0]))


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The steps of a run as the arguments of `CostModel.compute_s`, one entry per step."""

    columns: tuple[Floats, Floats, Floats, Floats, Floats, Floats, Floats]
    moves_s: Floats

    @classmethod
    def of(cls, run: Run, model: CostModel) -> StepArrays:
        rows = np.array([model.columns(shape) for shape in run.shapes], dtype=np.float64)
        decodes, context, tokens, chunks, keys, pairs, together = rows.T
        moves = [model.moves_s(shape.bytes_copied, shape.bytes_transferred) for shape in run.shapes]
        return cls((decodes, context, tokens, chunks, keys, pairs, together), np.array(moves))

    def seconds(self, model: CostModel) -> Floats:
        return model.compute_s(*self.columns) + self.moves_s


class Problem:
    """The least squares of one round: which coefficients make these steps take the time that was measured."""

    def __init__(
        self, model: CostModel, steps: StepArrays, spans: Spans, priors: Mapping[str, Prior]
    ) -> None:
        self._model, self._steps, self._spans, self._names = model, steps, spans, tuple(priors)
        self._means = np.log([one.mean for one in priors.values()])
        self._sigmas = np.array([one.log_sigma for one in priors.values()])
        self._lows = np.log([one.low for one in priors.values()])
        self._highs = np.log([one.high for one in priors.values()])
        given = model.coefficients.as_dict()
        start = np.log([max(given[name], 1e-12) for name in self._names])
        self._start: Floats = np.clip(start, self._lows, self._highs)

    def solve(self, loss_of: Loss) -> Coefficients:
        """`SHARE` of the way to the coefficients that minimise the loss over spans and priors."""
        best = _least_squares(self._deviations, loss_of, self._start, self._lows, self._highs)
        return self._coefficients(self._start + SHARE * (best - self._start))

    def log_sigmas(self) -> dict[str, float]:
        """How well each coefficient is known now: standard deviations of its logarithm, by the curvature of
        the loss (Laplace) where the model stands. Spans that share steps do not count as many."""
        found = self._deviations(self._start)
        slopes = _slopes(self._deviations, self._start, found)[:, : -len(self._names)]
        weights = _cauchy(found[: slopes.shape[1]])[1] * min(1.0, INDEPENDENT_SPANS / slopes.shape[1])
        precision = (slopes * weights) @ slopes.T + np.diag(self._sigmas**-2)
        sigmas = np.sqrt(np.diag(np.linalg.inv(precision)))
        return dict(zip(self._names, sigmas.tolist(), strict=True))

    def _coefficients(self, point: Floats) -> Coefficients:
        return Coefficients(**dict(zip(self._names, np.exp(point).tolist(), strict=True)))

    def _deviations(self, point: Floats) -> Floats:
        seconds = self._steps.seconds(replace(self._model, coefficients=self._coefficients(point)))
        return np.concatenate((self._spans.residuals(seconds), (point - self._means) / self._sigmas))


def _slopes(deviations: Callable[[Floats], Floats], point: Floats, found: Floats) -> Floats:
    return np.array([deviations(point + one) - found for one in DELTA * np.eye(len(point))]) / DELTA


def _least_squares(
    deviations: Callable[[Floats], Floats], loss_of: Loss, start: Floats, lows: Floats, highs: Floats
) -> Floats:
    """Minimise the sum of losses within bounds: damped Gauss-Newton, slopes by differences."""
    point, damping = start, 1e-3
    found = deviations(point)
    losses, weights = loss_of(found)
    loss = float(np.sum(losses))
    for _ in range(MAX_MOVES):
        slopes = _slopes(deviations, point, found)
        square, down = (slopes * weights) @ slopes.T, -(slopes * weights) @ found
        moved = False
        while not moved and damping < MAX_DAMPING:
            move = np.linalg.solve(square + damping * np.diag(np.diag(square)), down)
            candidate = np.clip(point + move, lows, highs)
            values = deviations(candidate)
            losses, new_weights = loss_of(values)
            new_loss = float(np.sum(losses))
            moved = new_loss < loss
            damping = damping / 5 if moved else damping * 5
        if not moved:
            break
        gain, point, found = loss - new_loss, candidate, values
        loss, weights = new_loss, new_weights
        if gain < TOLERANCE * loss:
            break
        damping = max(damping, 1e-9)
    return point


def _huber(deviations: Floats) -> tuple[Floats, Floats]:
    """Huber's loss, and the weights in a least-squares step that belong to it."""
    size = np.abs(deviations)
    loss = np.where(size <= OUTLIER, size**2, OUTLIER * (2 * size - OUTLIER)) / 2
    return loss, 1.0 / np.maximum(1.0, size / OUTLIER)


def _cauchy(deviations: Floats) -> tuple[Floats, Floats]:
    """The same of Cauchy's loss, which all but forgets what is far off."""
    ratio = (deviations / OUTLIER) ** 2
    return OUTLIER**2 / 2 * np.log1p(ratio), 1.0 / (1.0 + ratio)


def _close(one: Coefficients, other: Coefficients) -> bool:
    pairs = zip(one.as_dict().values(), other.as_dict().values(), strict=True)
    return all(abs(a - b) <= 1e-3 * max(a, b) for a, b in pairs)
