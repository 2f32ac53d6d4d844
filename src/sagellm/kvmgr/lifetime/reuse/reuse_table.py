"""Predicts block reuse from hazard tables: how likely, and when, given the idle time.

A cell holds, by time since the last use, how many blocks were used again and how many were watched. From that
comes the product-limit estimate (Kaplan and Meier 1958), with the actuarial correction for blocks that were
watched for a part of a step. Blocks whose end is not seen count for as long as they were watched, so that an
eviction is no evidence against reuse.

Cells are by uses, turn, length, position and gap. A cell with little data leans on a coarser one, and that on
one for all: their hazard counts as `prior` blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from sagellm.core.protocols.lifetime import ReuseFeatures, ReusePrediction
from sagellm.kvmgr.lifetime._quantiles import LEVELS

FIRST_STEP_S, GROWTH = 0.5, 1.35
"""The first step of time, and how much longer each is than the one before."""
MIN_SEEN = 32
"""Outcomes of any blocks below which the table abstains."""
PRIOR_OF_ALL = 1.0
"""Where there is nothing coarser, a hazard of 0 counts as one block."""
LARGEST = 63
_STEP = tuple(min(n, 4) if n < 5 else n.bit_length() + 2 for n in range(LARGEST + 1))
"""Uses and turns in steps: 0, 1, 2, 3, 4, 5 to 7, 8 to 15, 16 to 31, more."""


class _Cell:
    """Counts by time step, and the reuse probabilities estimated from them.

    `used_by` is the share that is used again by the end of each step; answers read so far are cached."""

    __slots__ = (
        "_answers", "_parent", "_renew_at", "_stale_at",
        "began", "ended", "events", "hazards", "seen", "used_by",
    )  # fmt: skip

    def __init__(self, parent: _Cell | None, num_steps: int) -> None:
        self._parent = parent
        self.events = [0.0] * num_steps
        self.ended = [0.0] * num_steps
        self.began = [0.0] * num_steps
        self.seen = 0.0
        self.hazards: list[float] = []
        self.used_by: list[float] = []
        self._stale_at = self._renew_at = 0.0
        self._answers: list[ReusePrediction | None] = []

    def answer(self, step: int, table: ReuseTable) -> ReusePrediction:
        self.refresh(table.prior, table.num_seen)
        found = self._answers[step]
        if found is None:
            found = self._answers[step] = table.read(self.used_by, step)
        return found

    def halve(self) -> None:
        """Halve the weight of all outcomes so far."""
        for counts in (self.events, self.ended, self.began):
            counts[:] = [count / 2 for count in counts]
        self.seen /= 2
        self._stale_at = 0.0

    def refresh(self, prior: float, num_all: float) -> None:
        """Estimate the hazards again if there is enough new data.

        That is a quarter more in this cell, or a half more in the table. The parent is refreshed first.
        Amortised, this costs an update little."""
        if self.seen < self._stale_at and num_all < self._renew_at:
            return
        self._stale_at, self._renew_at = 1.25 * self.seen + 8, 1.5 * num_all + 8
        self._answers = [None] * len(self.events)
        if self._parent is None:
            lean, prior = [0.0] * len(self.events), PRIOR_OF_ALL
        else:
            self._parent.refresh(prior, num_all)
            lean = self._parent.hazards
        self.hazards = []
        # A block that begins or stops being watched within a step counts half for it. Those that begin at 0
        # begin with the step.
        watched, halves = self.began[0] / 2, -self.began[0] / 2
        for events, ended, began, leaned in zip(self.events, self.ended, self.began, lean, strict=True):
            exposed = watched + (began - (ended - events)) / 2
            self.hazards.append((events + prior * leaned) / (max(exposed, events) + prior))
            watched += began - ended + halves
            halves = 0.0
        unused, self.used_by = 1.0, [0.0]
        for hazard in self.hazards:
            unused *= 1 - hazard
            self.used_by.append(1 - unused)


class ReuseTable:
    """A `ReusePredictor` that takes about a microsecond to predict and two to learn.

    `horizon_s`: a block that is idle for longer counts as not used again. `prior`: the estimate of a coarser
    cell counts as so many blocks; blocks of one prompt are reused together, so it is more than a few.
    `memory`: after so many outcomes all counts are halved, so that the table follows changes.
    """

    def __init__(self, horizon_s: float = 1800.0, prior: float = 64.0, memory: int = 1_000_000) -> None:
        if not horizon_s > FIRST_STEP_S or not prior > 0 or memory < MIN_SEEN:
            raise ValueError(
                f"horizon_s must be over {FIRST_STEP_S}, prior over 0 and memory over {MIN_SEEN}, "
                f"got {horizon_s}, {prior} and {memory}"
            )
        self._horizon_s, self.prior, self._memory = horizon_s, prior, memory
        self._edges = _edges(horizon_s)
        self._all = _Cell(None, len(self._edges) - 1)
        self._coarse: dict[int, _Cell] = {}
        self._fine: dict[int, _Cell] = {}
        levels = dict.fromkeys(LEVELS, 0.0)
        self._never = ReusePrediction(0.0, levels)
        self._unknown = ReusePrediction(0.5, {level: level * horizon_s for level in LEVELS}, abstained=True)

    @property
    def horizon_s(self) -> float:
        return self._horizon_s

    @property
    def num_seen(self) -> float:
        """Outcomes and pieces so far, the older ones discounted."""
        return self._all.seen

    @property
    def num_cells(self) -> int:
        return 1 + len(self._coarse) + len(self._fine)

    def predict(self, features: ReuseFeatures, age_s: float = 0.0) -> ReusePrediction:
        """0 for a block that has been idle for the horizon or longer."""
        if age_s >= self._horizon_s:
            return self._never
        uses, turn, position, length, gap_s = features
        coarse = _coarse(uses, turn, gap_s)
        cell = (
            self._fine.get((coarse << 8) + _fine(position, length)) or self._coarse.get(coarse) or self._all
        )
        if self._all.seen < MIN_SEEN:
            return self._unknown
        return cell.answer(bisect_right(self._edges, age_s) - 1, self)

    def update(self, features: ReuseFeatures, seconds: float, *, reused: bool, since_s: float = 0.0) -> None:
        """Raises `ValueError` for a piece of time that ends before it begins.

        Reuse after the horizon counts as none."""
        if not 0 <= since_s <= seconds:
            raise ValueError(f"a block cannot be watched from {since_s} to {seconds} seconds")
        last = len(self._edges) - 2
        began = bisect_right(self._edges, since_s) - 1
        step = bisect_right(self._edges, seconds) - 1
        if began > last:
            return
        for cell in self._cells(features):
            cell.seen += 1
            cell.began[began] += 1
            if step <= last:
                cell.ended[step] += 1
                if reused:
                    cell.events[step] += 1
        if self._all.seen >= self._memory:
            for cell in (self._all, *self._coarse.values(), *self._fine.values()):
                cell.halve()

    def read(self, used_by: Sequence[float], step: int) -> ReusePrediction:
        """The answer for a block in that time step.

        Evaluated at the step's beginning for the first, else halfway."""
        edges = self._edges
        before, now_s = 0.0, 0.0
        if step:
            before, now_s = (used_by[step] + used_by[step + 1]) / 2, (edges[step] + edges[step + 1]) / 2
        later = used_by[-1] - before
        quantiles = {
            level: max(0.0, self._time_of(used_by, before + level * later) - now_s) for level in LEVELS
        }
        return ReusePrediction(later / (1 - before) if before < 1 else 0.0, quantiles)

    def check(self) -> None:
        """Every cell's outcomes are also in the coarser ones; raises `AssertionError`."""
        for cells in (self._coarse, self._fine):
            for place in range(len(self._all.ended)):
                for counts in ("began", "ended", "events"):
                    parts = sum(getattr(cell, counts)[place] for cell in cells.values())
                    assert parts == getattr(self._all, counts)[place]
        assert self._all.seen == sum(self._all.began) >= sum(self._all.ended) >= sum(self._all.events)

    def _cells(self, features: ReuseFeatures) -> tuple[_Cell, _Cell, _Cell]:
        uses, turn, position, length, gap_s = features
        key = _coarse(uses, turn, gap_s)
        coarse = self._coarse.get(key)
        if coarse is None:
            coarse = self._coarse[key] = _Cell(self._all, len(self._edges) - 1)
        key = (key << 8) + _fine(position, length)
        fine = self._fine.get(key)
        if fine is None:
            fine = self._fine[key] = _Cell(coarse, len(self._edges) - 1)
        return self._all, coarse, fine

    def _time_of(self, used_by: Sequence[float], share: float) -> float:
        """The time by which that share is used again; linear within a step."""
        after = bisect_left(used_by, share)
        if after == 0:
            return 0.0
        if after >= len(used_by):
            return self._horizon_s
        below, above = used_by[after - 1], used_by[after]
        part = (share - below) / (above - below) if above > below else 1.0
        return self._edges[after - 1] + part * (self._edges[after] - self._edges[after - 1])


def _coarse(uses: int, turn: int, gap_s: float) -> int:
    """Four bits each for uses, turn and gap (by octaves; 0: used once)."""
    gap = 0 if gap_s < 0 else min(15, int(gap_s).bit_length() + 1)
    return (_STEP[min(uses, LARGEST)] << 8) + (_STEP[min(turn, LARGEST)] << 4) + gap


def _fine(position: int, length: int) -> int:
    """Position in the prompt and its length in octaves, four bits each."""
    return (min(15, position.bit_length()) << 4) + min(15, length.bit_length())


def _edges(horizon_s: float) -> list[float]:
    edges = [0.0, FIRST_STEP_S]
    while edges[-1] * GROWTH < horizon_s:
        edges.append(edges[-1] * GROWTH)
    return [*edges, horizon_s]


PLUGIN = ReuseTable
