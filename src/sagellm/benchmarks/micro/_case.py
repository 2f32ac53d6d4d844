"""What a micro benchmark is made of: recipes of operations, their sizes, and the rows that come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from sagellm.benchmarks.micro._timing import Operation, Stopwatch, Timing
from sagellm.core.errors import ConfigError

BLOCK_SIZE = 16
MICROSECONDS = "us"
BYTES_PER_BLOCK = "bytes/block"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: the implementations under test, sizes, and samples per row.

    `sizes` are prompts in tokens, `allocations` requests in blocks, and `evictions` those made of a pool of
    `large_pool` blocks. `memory_blocks` are cached to weigh the metadata. `running` and `new` are requests.
    `rows` are tokens that kernels compute at a time, in so many `layers`; `lengths` are contexts in tokens.
    """

    variants: tuple[str, ...]
    policy: str = "lru"
    sizes: tuple[int, ...] = (512, 1024, 4096, 8192, 32768, 131072)
    allocations: tuple[int, ...] = (32, 256, 2048, 8192)
    evictions: tuple[int, ...] = (1, 32, 512)
    large_pool: int = 102_400
    memory_blocks: int = 100_000
    running: tuple[int, ...] = (64, 256, 1024)
    new: tuple[int, ...] = (16, 64, 256)
    rows: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 128, 512)
    lengths: tuple[int, ...] = (512, 2048)
    layers: int = 12
    repeats: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.variants:
            raise ConfigError("nothing to measure: name at least one implementation")
        if self.repeats < 1:
            raise ConfigError(f"repeats must be at least 1, got {self.repeats}")
        if self.seed < 0:
            raise ConfigError(f"the seed must be at least 0, got {self.seed}")
        odd = [size for size in self.sizes if size < BLOCK_SIZE or size % (2 * BLOCK_SIZE)]
        if odd:
            raise ConfigError(f"prompt sizes must be multiples of {2 * BLOCK_SIZE} tokens, got {odd[0]}")

    def quick(self) -> Plan:
        """Small sizes and few samples: does everything work, and about how long does it take?"""
        return dataclasses.replace(
            self,
            sizes=(512, 1024, 4096),
            allocations=(32, 64, 256),
            large_pool=6400,
            running=(64,),
            new=(16,),
            rows=(1, 8),
            lengths=(256,),
            layers=1,
            repeats=min(self.repeats, 20),
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """One cell of the table: which implementation, at which size."""

    plan: Plan
    variant: str
    size: int

    @property
    def num_blocks(self) -> int:
        """Blocks of a prompt of `size` tokens."""
        return self.size // BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: the median CPU time in µs, with its `timing`, or bytes of memory per block.

    `size` is in tokens in sections a to c and in blocks in d and f. `turn` counts the times that the section
    was run, from 0, where it alternates with peers.
    """

    section: str
    case: str
    size: int
    variant: str
    unit: str
    value: float
    timing: Timing | None = None
    turn: int = 0


Build: TypeAlias = Callable[[Setting, int], Operation]
"""Makes the operation of one cell, able to run that many times between its setups and its teardowns."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A case at several sizes. `in_a_row`: what a call costs depends on the calls before it, so that only the
    mean over many in a row says anything."""

    case: str
    build: Build
    sizes: Callable[[Plan], tuple[int, ...]] = lambda plan: plan.sizes
    in_a_row: bool = False


Section: TypeAlias = Callable[[Plan, Stopwatch], Iterator[Row]]
"""Measures one section of a benchmark, row by row."""


class Known(Protocol):
    """Implementations by name; `get` raises the error of one that there is not."""

    def names(self) -> Sequence[str]: ...

    def get(self, name: str) -> object: ...


@dataclass(frozen=True, slots=True)
class MicroBenchmark:
    """A benchmark and its sections by letter; the letters are those of the peers' harness.

    `known`: where the names of the variants come from.
    """

    name: str
    known: Known
    sections: dict[str, Section]

    def check_sections(self, letters: str) -> None:
        """Raise `ConfigError` for a section that is not there."""
        unknown = [letter for letter in letters if letter not in self.sections]
        if unknown or not letters:
            known = ", ".join(self.sections)
            raise ConfigError(f"{self.name} has no section {''.join(unknown)!r}; it has {known}")


def timed(letter: str, *recipes: Recipe) -> Section:
    """The section that times each recipe at all of its sizes, one implementation after the other."""

    def section(plan: Plan, stopwatch: Stopwatch) -> Iterator[Row]:
        for variant in plan.variants:
            for recipe in recipes:
                for size in recipe.sizes(plan):
                    prepare = partial(recipe.build, Setting(plan, variant, size))
                    timing = stopwatch.time(prepare, in_a_row=recipe.in_a_row)
                    yield Row(letter, recipe.case, size, variant, MICROSECONDS, timing.cpu.median, timing)

    return section
