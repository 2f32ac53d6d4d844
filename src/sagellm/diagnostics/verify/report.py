"""What `verify` found: a report as data, for JSON, the page and the terminal."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["answers", "timing", "isolation", "accounting", "error"]
Outcome = Literal["clean", "findings", "untestable"]
EXIT_CODES: dict[Outcome, int] = {"clean": 0, "findings": 1, "untestable": 2}


@dataclass(frozen=True, slots=True)
class Evidence:
    """One warm answer beside its cold one, to look at and to ask again.

    `position` counts generated tokens from 0; `margin` is the gap of the two likeliest tokens in the cold
    answer, and `size` the largest difference of a log-probability (1 without log-probabilities), both in
    nats. `prompt` is what was sent; `steps` says what was asked before it.
    """

    prompt: Any
    steps: str
    cold: tuple[str, ...]
    warm: tuple[str, ...]
    size: float
    cached_tokens: int | None
    prompt_tokens: int | None
    position: int | None = None
    cold_token: str | None = None
    warm_token: str | None = None
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with cache hits.

    Of the kind "answers" warm and cold answers differ, and `p_value` is adjusted for all tests of the run. Of
    the kind "timing" what another salt cached is answered as fast as a hit. The other kinds are no matter of
    chance and have no p.
    """

    family: str
    kind: Kind
    message: str
    variant: str = ""
    p_value: float | None = None
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True)
class FamilyResult:
    """One family of probes: its scenarios, their hits, and warm differences in nats."""

    name: str
    scenarios: int
    hits: int | None
    divergences: int
    above_noise: int
    largest: float
    p_value: float | None
    not_tested: str = ""


@dataclass(frozen=True, slots=True)
class Noise:
    """Differences between cold answers to the same prompt, in nats.

    `largest` and `median` are over scenarios.
    `arms` has the largest by kind: "again" (asked alone, twice), "batch" (asked beside others), "path" (the
    same tokens by prefill instead of decode).
    """

    scenarios: int
    largest: float
    median: float
    divergences: int
    floor: float
    arms: dict[str, float]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server can do, as measured.

    `granularity` and `smallest_reusable` are in tokens; None if hits are not told. `cold_by` says how a
    prompt is asked without its cached KV.
    """

    url: str
    model: str
    api: str
    token_prompts: bool
    logprobs: bool
    hits_from: str
    cold_by: str
    granularity: int | None
    smallest_reusable: int | None
    max_prompt_tokens: int
    other_models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HitTiming:
    """Median seconds of one-token requests: new, again, and under another salt.

    For the longest prompt.
    """

    tokens: int
    cold_s: float
    warm_s: float
    other_salt_s: float | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a run. `limits` are sentences on what was not tested, and why."""

    outcome: Outcome
    findings: tuple[Finding, ...] = ()
    families: tuple[FamilyResult, ...] = ()
    noise: Noise | None = None
    server: ServerFacts | None = None
    timing: HitTiming | None = None
    limits: tuple[str, ...] = ()
    preset: str = ""
    seed: int = 0
    requests: int = 0
    duration_s: float = 0.0
    level: float = 0.0
    reason: str = ""
    version: str = field(default="")

    @property
    def exit_code(self) -> int:
        """0 clean, 1 findings, 2 could not test."""
        return EXIT_CODES[self.outcome]

    def to_json(self) -> str:
        """The report as JSON; infinite and undefined numbers are texts."""
        return json.dumps(_plain({"exit_code": self.exit_code, **asdict(self)}), indent=2, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
