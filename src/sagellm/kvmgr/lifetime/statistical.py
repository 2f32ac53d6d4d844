"""Length prediction without a network: quantiles of the outputs of similar requests.

Several tables predict side by side; each has its own idea of similar (by length of the prompt, by output of
the previous turn, by category, by session). The table with the lowest recent loss answers: the
follow-the-leader rule over experts (Cesa-Bianchi and Lugosi 2006), with a loss that fades.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import exp, log, log2

from sagellm.core.protocols.lifetime import Prediction, PredictionRequest
from sagellm.kvmgr.lifetime._quantiles import (
    Bounded,
    Outcomes,
    answer,
    pinball,
    prompt_length,
    room_of,
    uniform,
)

ALL = "all"
FADE = 0.995
"""Weight of the past in the tables' losses: about the last 200 answers count."""
DOUBT = 20.0
"""A new table starts as if it had given so many answers, all as good as those of the table of all."""
SESSION_MEMORY = 0.7
"""Weight of the past in a session's mean (of logarithms)."""
FIRST_TOKEN_S, TOKEN_S_MEMORY = 0.02, 0.9
"""Seconds per token at first, and the weight of the past in their moving average."""


@dataclass(slots=True)
class _Session:
    """Output tokens of a session's last turn, and the mean logarithm over its turns."""

    previous: int
    mean_log: float


@dataclass(slots=True)
class _Standing:
    """Discounted losses of a table and of the overall table, on the same requests."""

    loss: float = 0.0
    loss_of_all: float = 0.0
    weight: float = 0.0

    def observe(self, loss: float, loss_of_all: float) -> None:
        self.loss = FADE * self.loss + loss
        self.loss_of_all = FADE * self.loss_of_all + loss_of_all
        self.weight = FADE * self.weight + 1

    def relative(self) -> float:
        """The loss relative to the table of all; 1 at first."""
        ratio = self.loss / self.loss_of_all if self.loss_of_all else 1.0
        return (self.weight * ratio + DOUBT) / (self.weight + DOUBT)


@dataclass(slots=True)
class _Open:
    """A predicted sequence until it ends."""

    prompt: int
    generated: int
    session_id: str | None
    keys: dict[str, Hashable]
    answers: dict[str, list[float]] = field(default_factory=dict)


class StatisticalLifetimePredictor:
    """Conditional quantiles of recent output lengths of similar requests.

    Of the last `window` outputs of the same kind, those longer than what is generated already count. A table
    with fewer than `min_samples` such outputs has no answer. Where none has one, or where the answer's
    confidence is below `min_confidence`, the predictor abstains. `max_open` bounds the number of open
    sequences, and of sessions and kinds in each table.
    """

    def __init__(
        self, window: int = 512, min_samples: int = 8, max_open: int = 65536, min_confidence: float = 0.1
    ) -> None:
        self._window, self._min_samples, self._max_open = window, min_samples, max_open
        self._min_confidence = min_confidence
        self._tables: dict[str, Bounded[Hashable, Outcomes]] = {}
        self._standings: dict[str, _Standing] = {}
        self._open: Bounded[str, _Open] = Bounded(max_open)
        self._sessions: Bounded[str, _Session] = Bounded(max_open)
        self.seconds_per_token = FIRST_TOKEN_S

    def predict(self, request: PredictionRequest) -> Prediction:
        remaining, known = self.remaining(request)
        return answer(remaining, self.seconds_per_token, self._min_confidence, known=known)

    def remaining(self, request: PredictionRequest) -> tuple[list[float], bool]:
        """The quantiles of remaining tokens at `LEVELS`, and whether outcomes support them."""
        prompt = prompt_length(request)
        entry = _Open(
            prompt, max(0, request.current_length - prompt), request.session_id, self._keys(request, prompt)
        )
        self._open[request.sequence_id] = entry
        for name, key in entry.keys.items():
            outcomes = self._outcomes(name, key)
            found = outcomes and outcomes.remaining(entry.generated, self._min_samples)
            if found:
                entry.answers[name] = found
        room = room_of(request)
        if not entry.answers:
            return uniform(room), False
        best = min(entry.answers, key=self._relative)
        return [min(float(room), value) for value in entry.answers[best]], True

    def previous_output(self, session_id: str | None) -> int | None:
        """Output tokens of the last finished turn of the session."""
        session = None if session_id is None else self._sessions.get(session_id)
        return None if session is None else session.previous

    def update(self, sequence_id: str, actual_length: int, actual_time: float) -> None:
        entry = self._open.pop(sequence_id, None)
        if entry is None:
            return
        output = max(0, actual_length - entry.prompt)
        if output and actual_time >= 0:
            newest = actual_time / output
            self.seconds_per_token = TOKEN_S_MEMORY * self.seconds_per_token + (1 - TOKEN_S_MEMORY) * newest
        self._judge(entry, output)
        for name, key in entry.keys.items():
            outcomes = self._outcomes(name, key)
            if outcomes is None:
                outcomes = Outcomes(self._window)
            self._tables.setdefault(name, Bounded(self._max_open))[key] = outcomes
            outcomes.add(output)
        if entry.session_id is not None:
            self._remember(entry.session_id, output)

    def _outcomes(self, name: str, key: Hashable) -> Outcomes | None:
        table = self._tables.get(name)
        return table.get(key) if table is not None else None

    def _relative(self, name: str) -> float:
        standing = self._standings.get(name)
        return 1.0 if standing is None else standing.relative()

    def _judge(self, entry: _Open, output: int) -> None:
        """Compare each table with the overall table on this request alone.

        Tables answer different requests, so only common ones compare."""
        if ALL not in entry.answers:
            return
        remaining = float(max(0, output - entry.generated))
        loss_of_all = pinball(entry.answers[ALL], remaining)
        for name, found in entry.answers.items():
            standing = self._standings.setdefault(name, _Standing())
            standing.observe(pinball(found, remaining), loss_of_all)

    def _remember(self, session_id: str, output: int) -> None:
        session = self._sessions.get(session_id)
        newest = log(1 + output)
        mean = (
            newest if session is None else SESSION_MEMORY * session.mean_log + (1 - SESSION_MEMORY) * newest
        )
        self._sessions[session_id] = _Session(output, mean)

    def _keys(self, request: PredictionRequest, prompt: int) -> dict[str, Hashable]:
        """The key of this request in each table that applies, by the table's name."""
        category = request.category
        keys: dict[str, Hashable] = {
            ALL: 0,
            "input": prompt.bit_length(),
            "input, fine": (category, _steps(prompt, 4)),
        }
        if category:
            keys["category"] = category
            keys["category and input"] = (category, prompt.bit_length())
        session = None if request.session_id is None else self._sessions.get(request.session_id)
        if session is not None:
            keys["session"] = request.session_id
            keys["previous"] = _steps(session.previous, 2)
            keys["session's mean"] = _steps(exp(session.mean_log) - 1, 3)
        return keys


def _steps(length: float, per_octave: int) -> int:
    """Which step of the logarithm a length is on."""
    return int(per_octave * log2(1 + length))


PLUGIN = StatisticalLifetimePredictor
