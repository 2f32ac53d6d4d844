"""Fits the coefficients of a cost model to measured request timings.

The measurements do not say which step computed what, so each round simulates the engine with the coefficients
so far. That yields the steps, and which of them each request waited for. Then the coefficients move toward
values with which these steps take the time that was measured. They move only a part of the way, since the
steps depend on the coefficients, and near saturation a little more speed is a lot less waiting.

Each round solves least squares on the logarithms of the coefficients (Levenberg 1944, Marquardt 1963), within
bounds. The loss is robust, Huber's (1964) at first and Cauchy's later, because a request that is preempted
only in the measurement or only in the simulation says nothing about the price of a step. Where measurements
do not tell coefficients apart, a prior does. The same data always give the same coefficients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sagellm.core.errors import ConfigError
from sagellm.engines.simulator.cost_model import Coefficients, CostModel, StepShape
from sagellm.engines.simulator.measured import RequestTiming, SimulatedRun

Floats: TypeAlias = npt.NDArray[np.float64]
Loss: TypeAlias = Callable[[Floats], tuple[Floats, Floats]]
Simulate: TypeAlias = Callable[[Sequence[RequestTiming], CostModel], SimulatedRun]
"""Serves requests in simulated time; see `measured.simulate`."""

MIN_REQUESTS = 10
OUTLIER = 2.0
"""Deviation, in units of its noise, from which on a span counts less."""
SHARE = 0.6
"""Part of the way to the best coefficients that one round moves."""
ROUGH_ROUNDS = 3
"""Rounds with Huber's loss, which has one minimum, found from any start."""
DECODE_NOISE, WAIT_NOISE, PREFILL_NOISE = 0.01, 0.03, 0.10
"""Expected relative error of one span: decoding, waiting and prefill together, prefill alone."""
MAX_MOVES, DELTA, MAX_DAMPING, TOLERANCE = 80, 1e-4, 1e9, 1e-7
"""Least squares: moves, difference for slopes, damping that gives up a direction, smallest gain."""
UNDETERMINED = 0.7
"""A coefficient that stays wider than this part of its prior's width is not determined."""
EDGE = 0.01
"""A coefficient within this relative distance of a bound counts as on the bound."""
INDEPENDENT_SPANS = 30
"""Most spans share nearly all of their steps: at most this many count as independent."""
SHORT_S = 0.005
"""Seconds of noise added to each span, for the scatter of timestamps and launch times."""


@dataclass(frozen=True, slots=True)
class Prior:
    """A coefficient before measurement: a log-normal distribution, cut at physical bounds."""

    mean: float
    log_sigma: float
    low: float
    high: float


PRIORS: Mapping[str, Prior] = MappingProxyType(
    {
        name: Prior(getattr(Coefficients(), name), *width_and_bounds)
        for name, width_and_bounds in {
            "weight_bandwidth": (0.15, 0.2, 1.0),
            "kv_bandwidth": (0.15, 0.2, 1.0),
            "compute": (0.25, 0.1, 1.1),
            "chunk_attention": (0.3, 0.05, 1.0),
            "overlap": (0.2, 1.0, 8.0),
            "step_s": (0.7, 1e-5, 3e-2),
            "chunk_step_s": (1.0, 1e-5, 5e-2),
            "row_s": (0.5, 1e-8, 1e-4),
            "expert_bandwidth": (0.25, 0.1, 1.0),
            "expert_compute": (0.8, 0.02, 1.0),
            "expert_row_s": (1.0, 1e-8, 2e-4),
            "link_bandwidth": (0.4, 0.05, 1.0),
            "link_latency": (0.5, 0.1, 10.0),
        }.items()
    }
)
"""Around the defaults. Devices may clock higher than their sheets say, so a peak may be exceeded a little."""
NARROWEST = 0.03
"""The smallest relative width of a prior that comes from another calibration."""


def narrowed(
    priors: Mapping[str, Prior], known: Coefficients, log_sigmas: Mapping[str, float]
) -> dict[str, Prior]:
    """Priors around another calibration's coefficients, as narrow as it determined each."""
    values = known.as_dict()
    return {
        name: replace(
            prior,
            mean=min(max(values[name], prior.low), prior.high),
            log_sigma=min(prior.log_sigma, max(NARROWEST, log_sigmas.get(name, prior.log_sigma))),
        )
        for name, prior in priors.items()
    }


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted model and how well it fits.

    `errors`: relative errors of mean TPOT and mean TTFT on the fitted requests. `log_sigmas`: how well each
    coefficient is known, as the standard deviation of its logarithm.
    """

    cost_model: CostModel
    errors: tuple[float, float]
    num_requests: int
    num_rounds: int
    score: float
    log_sigmas: Mapping[str, float] = field(default_factory=dict)
    priors: Mapping[str, Prior] = field(default_factory=dict)

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Coefficients that neither these measurements nor an earlier calibration determine."""
        sigmas = self.log_sigmas.items()
        return tuple(name for name, sigma in sigmas if sigma > UNDETERMINED * PRIORS[name].log_sigma)

    @property
    def on_a_bound(self) -> tuple[str, ...]:
        """Coefficients on a bound of what is physically plausible."""
        values = self.cost_model.coefficients.as_dict()
        return tuple(
            name
            for name, prior in self.priors.items()
            if not prior.low * (1 + EDGE) < values[name] < prior.high * (1 - EDGE)
        )


def calibrate(
    requests: Sequence[RequestTiming],
    start: CostModel,
    simulate: Simulate,
    *,
    num_fitted: int | None = None,
    open_end: bool = False,
    rounds: int = 12,
    priors: Mapping[str, Prior] = PRIORS,
) -> Calibration:
    """Fit to the timings of the first `num_fitted` requests by arrival (None: all).

    All `requests` arrive in the simulation; only arrivals and lengths are read of those beyond `num_fitted`.
    `open_end`: unknown requests followed, so only what happened before the last known request was scheduled
    counts. Raises `ConfigError` for fewer than `MIN_REQUESTS`.
    """
    fitted = requests[:num_fitted]
    if len(fitted) < MIN_REQUESTS:
        raise ConfigError(f"{len(fitted)} requests to fit to: at least {MIN_REQUESTS} are needed")
    horizon_s = max(request.scheduled_s for request in fitted) if open_end else np.inf
    model, best = start, None
    for number in range(rounds):
        run = simulate(requests, model)
        spans = Spans.of(fitted, run, horizon_s)
        problem = Problem(model, run.shapes, spans, priors)
        found = Calibration(model, _errors(fitted, run), len(fitted), number, spans.score(), priors=priors)
        if best is None or found.score < best.score:
            best = replace(found, log_sigmas=problem.log_sigmas())
        loss_of = _huber if number < ROUGH_ROUNDS else _cauchy
        moved = problem.solve(loss_of)
        pairs = zip(moved.as_dict().values(), model.coefficients.as_dict().values(), strict=True)
        if all(abs(new - old) <= 1e-3 * max(new, old) for new, old in pairs):
            break
        model = replace(model, coefficients=moved)
    assert best is not None
    return replace(best, num_rounds=number + 1)


def _errors(measured: Sequence[RequestTiming], run: SimulatedRun) -> tuple[float, float]:
    """Relative errors of the simulated means of TPOT and TTFT."""
    timings = run.timings[: len(measured)]
    tpot = np.mean([t.tpot_s for t in timings]) / np.mean([t.tpot_s for t in measured])
    ttft = np.mean([t.ttft_s for t in timings]) / np.mean([t.ttft_s for t in measured])
    return float(tpot - 1), float(ttft - 1)


@dataclass(frozen=True, slots=True)
class Spans:
    """Measured stretches of time, and the steps that fill them in the simulation.

    A span begins when `first` steps have ended and ends when `last` have; it took `simulated_s` there.
    """

    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    measured_s: Floats
    simulated_s: Floats
    noise_s: Floats

    @classmethod
    def of(cls, measured: Sequence[RequestTiming], run: SimulatedRun, horizon_s: float) -> Spans:
        """Three spans of each request: decoding, queue and batch to first token."""
        rows = []
        for real, twin in zip(measured, run.timings, strict=False):
            decode_s = real.last_token_s - real.first_token_s
            prefill_s = real.first_token_s - real.scheduled_s
            if real.num_output_tokens > 1 and real.last_token_s <= horizon_s:
                rows.append((twin.first_token_s, twin.last_token_s, decode_s, DECODE_NOISE))
            if real.first_token_s <= horizon_s:
                rows.append((twin.queued_s, twin.first_token_s, real.ttft_s, WAIT_NOISE))
                rows.append((twin.scheduled_s, twin.first_token_s, prefill_s, PREFILL_NOISE))
        begin_s, end_s, measured_s, noise = np.array(rows).T
        noise_s = noise * measured_s + SHORT_S
        return cls(run.steps_until(begin_s), run.steps_until(end_s), measured_s, end_s - begin_s, noise_s)

    def residuals(self, steps_s: Floats) -> Floats:
        """Deviations from the measured spans in units of their noise, for these step times."""
        total_s = np.concatenate(([0.0], np.cumsum(steps_s)))
        return (total_s[self.last] - total_s[self.first] - self.measured_s) / self.noise_s

    def score(self) -> float:
        """Mean loss of the simulation."""
        return float(np.mean(_cauchy((self.simulated_s - self.measured_s) / self.noise_s)[0]))


class Problem:
    """The least squares of one round: coefficients for which steps take the measured time."""

    def __init__(
        self, model: CostModel, shapes: Sequence[StepShape], spans: Spans, priors: Mapping[str, Prior]
    ) -> None:
        self._model, self._spans, self._names = model, spans, tuple(priors)
        self._columns = np.array([model.columns(shape) for shape in shapes], dtype=np.float64).T
        self._moves_s = np.array([model.moves_s(shape) for shape in shapes])
        means, self._sigmas, lows, highs = np.array([astuple(prior) for prior in priors.values()]).T
        self._means, self._lows, self._highs = np.log(means), np.log(lows), np.log(highs)
        given = model.coefficients.as_dict()
        start = np.log([max(given[name], 1e-12) for name in self._names])
        self._start: Floats = np.clip(start, self._lows, self._highs)

    def solve(self, loss_of: Loss) -> Coefficients:
        """Move `SHARE` of the way to the coefficients with the least loss."""
        best = _least_squares(self._deviations, loss_of, self._start, self._lows, self._highs)
        return self._coefficients(self._start + SHARE * (best - self._start))

    def log_sigmas(self) -> dict[str, float]:
        """How well each coefficient is known: the standard deviation of its logarithm.

        It follows from the curvature of the loss at the start (Laplace). Spans that share steps count less.
        """
        found = self._deviations(self._start)
        slopes = _slopes(self._deviations, self._start, found)[:, : -len(self._names)]
        weights = _cauchy(found[: slopes.shape[1]])[1] * min(1.0, INDEPENDENT_SPANS / slopes.shape[1])
        precision = (slopes * weights) @ slopes.T + np.diag(self._sigmas**-2)
        sigmas = np.sqrt(np.diag(np.linalg.inv(precision)))
        return dict(zip(self._names, sigmas.tolist(), strict=True))

    def _coefficients(self, point: Floats) -> Coefficients:
        return Coefficients(**dict(zip(self._names, np.exp(point).tolist(), strict=True)))

    def _deviations(self, point: Floats) -> Floats:
        model = replace(self._model, coefficients=self._coefficients(point))
        seconds = model.compute_s(*self._columns) + self._moves_s
        return np.concatenate((self._spans.residuals(seconds), (point - self._means) / self._sigmas))


def _slopes(deviations: Callable[[Floats], Floats], point: Floats, found: Floats) -> Floats:
    return np.array([deviations(point + move) - found for move in DELTA * np.eye(len(point))]) / DELTA


def _least_squares(
    deviations: Callable[[Floats], Floats], loss_of: Loss, start: Floats, lows: Floats, highs: Floats
) -> Floats:
    """Minimise the sum of losses within bounds by damped Gauss-Newton steps."""
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
    """Huber's loss of each deviation, and its weight in a least-squares step."""
    size = np.abs(deviations)
    loss = np.where(size <= OUTLIER, size**2, OUTLIER * (2 * size - OUTLIER)) / 2
    return loss, 1.0 / np.maximum(1.0, size / OUTLIER)


def _cauchy(deviations: Floats) -> tuple[Floats, Floats]:
    """Cauchy's loss, which nearly ignores outliers, and the weights."""
    ratio = (deviations / OUTLIER) ** 2
    return OUTLIER**2 / 2 * np.log1p(ratio), 1.0 / (1.0 + ratio)
