"""ServeGen's client statistics (Xiang et al., 2025): requests drawn from rates and lengths."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from sagellm.benchmarks.traces._parsing import BrokenLineError, IdMap, brief, json_object, required, text
from sagellm.benchmarks.traces.files import DAMAGE, opened
from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.core.errors import ConfigError
from sagellm.core.types import Namespace, Tokens

WINDOW_S = 600.0
NUM_CELLS = 7
PATTERNS = ("Gamma", "Weibull")
LENGTHS = {"input_tokens", "output_tokens"}

Lengths = tuple[Sequence[int], Sequence[float]]
"""Numbers of tokens, and the cumulative frequency of each, on any scale."""


class ServegenFormat:
    """Draws requests from the rates and lengths of each client. The files hold no requests.

    A line of the rates file is a client's window of 600 s: client, start, requests per second, variation of
    the gaps, the name of their distribution and two arguments. A window gets as many requests as its rate
    says. Gaps have the distribution's shape (the first argument) and are scaled to fill the window, since the
    second argument does not agree with the rate. Input and output lengths come, independently, from the
    client's distributions in the last earlier window that has any, or else the first later one. `lengths` is
    the file that holds them. Requests arrive in `[start_s, start_s + span_s)`, and `start_s` is 0 of the
    trace. A client is a tenant. `ids` stay empty.
    """

    block_tokens = 1
    title = None
    from_zero = False

    def __init__(
        self, lengths: str | Path | None = None, start_s: float = 0.0, span_s: float = 3600.0, seed: int = 0
    ) -> None:
        if not (start_s >= 0 and span_s > 0):
            raise ConfigError(
                f"start_s must be at least 0 and span_s greater than 0, got {start_s}, {span_s}"
            )
        self._file = None if lengths is None else Path(lengths)
        self._start_s, self._stop_s = start_s, start_s + span_s
        self._seed = seed
        self._clients: dict[str, _Client] | None = None

    def recognises(self, line: str, record: Mapping[str, Any] | None) -> bool:
        cells = line.strip().split(",")
        return len(cells) == NUM_CELLS and cells[4] in ("", *PATTERNS)

    def parse(self, line_number: int, line: str, ids: IdMap) -> Iterable[TraceRequest]:
        client, window_s, rate, pattern, shape = _cells(line)
        if not rate or window_s + WINDOW_S <= self._start_s or window_s >= self._stop_s:
            return
        inputs, outputs = self._client(client).lengths(window_s)
        random = Random(f"{self._seed}/{client}/{window_s}")
        for time_s in _arrivals(random, window_s, rate, pattern, shape):
            num_input, num_output = _draw(random, inputs), _draw(random, outputs)
            if self._start_s <= time_s < self._stop_s:
                yield TraceRequest(
                    time_s=time_s - self._start_s,
                    ids=Tokens(),
                    namespace=Namespace(tenant=client),
                    num_input_tokens=num_input,
                    num_output_tokens=num_output,
                    tenant=client,
                )

    def _client(self, name: str) -> _Client:
        if self._file is None:
            raise ConfigError("servegen needs the file of lengths beside that of rates: option lengths=FILE")
        if self._clients is None:
            self._clients = _read_lengths(self._file)
        if name not in self._clients:
            raise BrokenLineError(f"client {name} has no lengths in {self._file}")
        return self._clients[name]


class _Client:
    """A client's distributions of lengths. Each is parsed at its first use since the texts are long."""

    def __init__(self, windows: Mapping[str, Any]) -> None:
        self._texts = {float(start_s): window for start_s, window in windows.items()}
        self._read: dict[float, tuple[Lengths, Lengths] | None] = {}

    def lengths(self, time_s: float) -> tuple[Lengths, Lengths]:
        """Distributions of inputs and outputs at that time; raises `BrokenLineError` if there are none."""
        before = sorted((start for start in self._texts if start <= time_s), reverse=True)
        after = sorted(start for start in self._texts if start > time_s)
        for start_s in (*before, *after):
            if start_s not in self._read:
                self._read[start_s] = _window(self._texts[start_s])
            found = self._read[start_s]
            if found is not None:
                return found
        raise BrokenLineError("the client has a rate, and no lengths in any window")


def _cells(line: str) -> tuple[str, float, float, str, float]:
    cells = [cell.strip() for cell in line.strip().split(",")]
    if len(cells) != NUM_CELLS:
        raise BrokenLineError(f"{len(cells)} cells; a line of rates has {NUM_CELLS}")
    client, start, rate, _, pattern, shape, _ = cells
    try:
        numbers = float(start), float(rate), float(shape)
    except ValueError as error:
        raise BrokenLineError(f"start, rate and arguments must be numbers, got {brief(cells)}") from error
    if not all(0 <= value < float("inf") for value in numbers):
        raise BrokenLineError(f"start, rate and arguments must be from 0 on, got {brief(cells)}")
    if numbers[1] and (pattern not in PATTERNS or not numbers[2]):
        raise BrokenLineError(f"a rate needs one of {', '.join(PATTERNS)} and its shape, got {brief(cells)}")
    return client, numbers[0], numbers[1], pattern, numbers[2]


def _arrivals(random: Random, window_s: float, rate: float, pattern: str, shape: float) -> list[float]:
    """Returns moments in the window. A fraction of a request is a request with that probability."""
    count = int(rate * WINDOW_S + random.random())
    if pattern == "Gamma":
        gaps = [random.gammavariate(shape, 1.0) for _ in range(count + 1)]
    else:
        gaps = [random.weibullvariate(1.0, shape) for _ in range(count + 1)]
    scale = WINDOW_S / (sum(gaps) or 1.0)
    return [window_s + moment * scale for moment in itertools.accumulate(gaps[:-1])]


def _draw(random: Random, lengths: Lengths) -> int:
    numbers, cumulated = lengths
    [drawn] = random.choices(numbers, cum_weights=cumulated)
    return drawn


def _read_lengths(path: Path) -> dict[str, _Client]:
    """Returns the clients by name; raises `ConfigError` naming the file."""
    clients: dict[str, _Client] = {}
    with opened(path) as lines:
        try:
            for line in lines:
                record = json_object(line.decode())
                clients[text(record, "client")] = _Client(required(record, "windows"))
        except (ValueError, AttributeError, *DAMAGE) as error:  # BrokenLineError is a ValueError
            after = f"after {len(clients)} clients"
            raise ConfigError(f"{path}: {after} comes a line without lengths of one: {error}") from error
    return clients


def _window(window: Any) -> tuple[Lengths, Lengths] | None:
    """Returns the lengths of a window, None for a window without requests. Raises `BrokenLineError`, and
    `ConfigError` for a window of a client that also sends images, audio or video."""
    if isinstance(window, dict) and not window.keys() >= LENGTHS:
        raise ConfigError(
            f"a window of lengths has {', '.join(sorted(window)) or 'nothing'} and not both of "
            f"{' and '.join(sorted(LENGTHS))}: ServeGen's language and reasoning data are read, its "
            "multimodal data are not"
        )
    try:
        inputs, outputs = (
            ast.literal_eval(window[name]) for name in ("input_tokens", "output_tokens")
        )  # a Python dictionary in a text
        pair = _weighted(inputs), _weighted(outputs)
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError) as error:
        raise BrokenLineError(f"lengths of a window that cannot be read: {error}") from error
    return pair if all(cumulated and cumulated[-1] > 0 for _, cumulated in pair) else None


def _weighted(shares: Mapping[Any, Any]) -> Lengths:
    return [int(tokens) for tokens in shares], list(itertools.accumulate(map(float, shares.values())))


PLUGIN = ServegenFormat
