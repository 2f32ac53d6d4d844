"""Requests whose output length is known, in the order in which a predictor meets them, in three parts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")
TRAIN, VALIDATION = 0.6, 0.2
"""Shares of the first two parts; the rest is test."""


@dataclass(frozen=True, slots=True)
class LengthSample:
    """One request. `tokens` is the prompt, or nothing where a trace has no text; times in seconds."""

    name: str
    time_s: float
    num_input: int
    num_output: int
    part: Part = "train"
    session_id: str | None = None
    category: str = ""
    tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class LengthWorkload:
    """Samples in the order of the parts, and of time within a part.

    `learns_in_test`: outcomes of the tested part are told as requests end, as in service (split by time or by
    session). Where a split keeps prompts apart and one prompt has many answers, they are not told.
    """

    name: str
    split: str
    samples: tuple[LengthSample, ...]
    learns_in_test: bool = True

    def of(self, part: Part) -> list[LengthSample]:
        return [sample for sample in self.samples if sample.part == part]


def split_by_time(samples: Iterable[LengthSample]) -> tuple[LengthSample, ...]:
    """The first 60 % of the requests are for training, the next 20 % for validation, the last for test."""
    ordered = sorted(samples, key=lambda sample: sample.time_s)
    return tuple(
        replace(sample, part=part_at((place + 0.5) / len(ordered))) for place, sample in enumerate(ordered)
    )


def split_by_hash(samples: Iterable[tuple[str, LengthSample]]) -> tuple[LengthSample, ...]:
    """Samples of one key (a session, a prompt) share a part; within a part they stay in order of time."""
    parts = [replace(sample, part=part_of(key)) for key, sample in samples]
    return tuple(sorted(parts, key=lambda sample: (PARTS.index(sample.part), sample.time_s)))


def part_of(key: str) -> Part:
    """The part of everything with that key: 60, 20 and 20 % of all keys."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return part_at(int.from_bytes(digest, "big") / 2**32)


def part_at(place: float) -> Part:
    """The part at a place from 0 to 1."""
    return "train" if place < TRAIN else "validation" if place < TRAIN + VALIDATION else "test"
