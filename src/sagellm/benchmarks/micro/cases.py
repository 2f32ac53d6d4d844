"""What a micro benchmark is made of: operations, their timing, recipes and rows. Times are of the thread's
CPU, which other processes hardly affect, with the wall time beside."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from sagellm.benchmarks.reporting import Table
from sagellm.core.errors import ConfigError

SHORT_US = 5.0
CALLS_OF_SHORT = 100
_MAYBE_SHORT_US = 4 * SHORT_US  # a short call takes longer if it is timed alone between setups
_WARM_UP = 2
BLOCK_SIZE = 16
BYTES_PER_BLOCK = "bytes/block"


@dataclass(frozen=True, slots=True)
class TimedOperation:
    """`run(context)` is timed; `setup() -> context` and `teardown(context, result)` are not."""

    run: Callable[[Any], Any]
    setup: Callable[[], Any] = lambda: None
    teardown: Callable[[Any, Any], None] = lambda context, result: None


Prepare = Callable[[int], TimedOperation]
"""`prepare(calls)` makes an operation that may run `calls` times between its setups and its teardowns."""


@dataclass(frozen=True, slots=True)
class Spread:
    """µs per call over the samples: median, 99th percentile, minimum, interquartile range."""

    median: float
    p99: float
    min: float
    iqr: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        ordered = sorted(samples)
        quartiles = _at(ordered, 0.25), _at(ordered, 0.75)
        figures = statistics.median(ordered), _at(ordered, 0.99), ordered[0], quartiles[1] - quartiles[0]
        return cls(*(round(figure, 3) for figure in figures))


@dataclass(frozen=True, slots=True)
class Timing:
    """`samples` samples, each the mean of `calls_per_sample` calls in a row. `single` is the median CPU
    time in µs of one call after its own setup: what a caller pays whose caches hold other data, and how
    the peers' harness measures."""

    samples: int
    calls_per_sample: int
    cpu: Spread
    wall: Spread
    single: float


class Stopwatch:
    """Times operations; `cpu_ns` and `wall_ns` are its two clocks, in nanoseconds.

    The cost of reading the clocks and entering the loop is measured beside every sample, since the speed of a
    machine changes, and its median is subtracted; the call of the operation itself is not. Operations shorter
    than `SHORT_US` are timed `CALLS_OF_SHORT` at once, since one call alone would be below the resolution of
    the clocks, unless so many contexts make them slower.
    """

    def __init__(
        self,
        repeats: int,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
        wall_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        self.repeats = repeats
        self._cpu_ns = cpu_ns
        self._wall_ns = wall_ns

    def time(self, prepare: Prepare, *, calls: int | None = None) -> Timing:
        """Times an operation over `repeats` samples. `calls` in each; None: many if they are short."""
        if calls is not None:
            cpu, wall = self._spreads(prepare, calls)
            return Timing(self.repeats, calls, cpu, wall, cpu.median)
        single_cpu, single_wall = self._spreads(prepare, 1)
        single = single_cpu.median
        if single < _MAYBE_SHORT_US:
            cpu, wall = self._spreads(prepare, CALLS_OF_SHORT)
            if cpu.median < SHORT_US:
                return Timing(self.repeats, CALLS_OF_SHORT, cpu, wall, single)
        return Timing(self.repeats, 1, single_cpu, single_wall, single)

    def _spreads(self, prepare: Prepare, calls: int) -> tuple[Spread, Spread]:
        """CPU and wall time per call. Objects that are alive before are hidden from the garbage collector."""
        operation = prepare(calls)
        for _ in range(_WARM_UP):
            self._sample(operation, calls)
        gc.collect()
        gc.freeze()
        try:
            samples = [self._sample(operation, calls) for _ in range(self.repeats)]
        finally:
            gc.unfreeze()
        cpu, wall = (_spread(clock, calls) for clock in zip(*samples, strict=True))
        return cpu, wall

    def _sample(self, operation: TimedOperation, calls: int) -> list[tuple[int, int]]:
        """Returns, by clock, the ns of `calls` calls in a row and of none."""
        contexts = [operation.setup() for _ in range(calls)]
        none = self._read(operation, [])
        return list(zip(self._read(operation, contexts), none, strict=True))

    def _read(self, operation: TimedOperation, contexts: list[Any]) -> tuple[int, int]:
        cpu_ns, wall_ns, run = self._cpu_ns, self._wall_ns, operation.run
        cpu_start = cpu_ns()
        wall_start = wall_ns()
        results = [run(context) for context in contexts]
        wall_end = wall_ns()
        cpu_end = cpu_ns()
        for context, result in zip(contexts, results, strict=True):
            operation.teardown(context, result)
        return cpu_end - cpu_start, wall_end - wall_start


def _spread(samples: Sequence[tuple[int, int]], calls: int) -> Spread:
    """µs per call, from samples of one clock as `_sample` returns them."""
    overhead_ns = statistics.median(none for _, none in samples)
    return Spread.of([max(0.0, spent - overhead_ns) / calls / 1000 for spent, _ in samples])


def _at(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of the ordered samples lies, without interpolation."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True)
class MicroBenchPlan:
    """What to run: the implementations under test, sizes, and samples per row.

    `sizes` are prompts in tokens, `allocations` requests in blocks, and `evictions` blocks evicted from a
    pool of `large_pool` blocks. `memory_blocks` are cached to weigh the metadata. `running` and `new` are
    numbers of requests. `rows` are tokens that kernels compute at a time, in `layers` layers; `lengths` are
    contexts in tokens, `contexts` those of a single sequence. `paths` are prompts in tokens whose KV tiers
    save or load, and `moved_mb` the MB that are moved in each of `rounds` rounds. `devices` are accelerators
    of a host whose topology is read, with as many NICs. `buffers_kb` are what ranks reduce and exchange.
    `tasks` are planned at once; `pieces` of about `task_ms` are run. A router chooses among `instances`,
    which have `indexed_blocks` different blocks. `batches` are requests that decode at once.
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
    contexts: tuple[int, ...] = (2048, 8192)
    layers: int = 12
    paths: tuple[int, ...] = (1024, 32768)
    moved_mb: int = 1024
    devices: tuple[int, ...] = (8, 72)
    buffers_kb: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
    rounds: int = 3
    tasks: tuple[int, ...] = (64, 1024, 8192)
    pieces: int = 32
    task_ms: float = 5.0
    instances: int = 64
    indexed_blocks: int = 1_000_000
    batches: tuple[int, ...] = (1, 4, 16)
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

    @property
    def one_machine(self) -> tuple[int, ...]:
        """The size of what has none."""
        return (1,)

    @property
    def one_length(self) -> tuple[int, ...]:
        """A prompt whose length makes no difference."""
        return (self.sizes[0],)

    @property
    def caches(self) -> tuple[int, ...]:
        """Sizes of caches in blocks: 64 prompts of 512 tokens, and a large one."""
        return (64 * 512 // BLOCK_SIZE, self.large_pool)

    def quick(self) -> MicroBenchPlan:
        """Returns small sizes and few samples, to see whether everything works."""
        return dataclasses.replace(
            self,
            sizes=(512, 1024, 4096),
            allocations=(32, 64, 256),
            large_pool=6400,
            running=(64,),
            new=(16,),
            rows=(1, 8),
            lengths=(256,),
            contexts=(256,),
            layers=1,
            paths=(1024,),
            moved_mb=64,
            devices=(8,),
            buffers_kb=(1, 64, 1024),
            rounds=1,
            tasks=(64,),
            pieces=16,
            instances=8,
            indexed_blocks=10_000,
            batches=(2,),
            repeats=min(self.repeats, 20),
        )


@dataclass(frozen=True, slots=True)
class MicroBenchCell:
    """One cell of the table: which implementation, at which size."""

    plan: MicroBenchPlan
    variant: str
    size: int

    @property
    def num_blocks(self) -> int:
        """Blocks of a prompt of `size` tokens."""
        return self.size // BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class MicroBenchRow:
    """A value of a case, in its unit.

    In µs: the median CPU time with its `timing`, wall time without. Others: bytes per block, GB/s, a ratio.

    `size` is in tokens in sections a to c and t, in blocks in d and f, in MB in m, in KB in r and o, in tasks
    in h and p, in requests in a of `speculative`. `turn` counts the runs of the section, from 0, when it
    alternates with peers.
    """

    section: str
    case: str
    size: int
    variant: str
    unit: str
    value: float
    timing: Timing | None = None
    turn: int = 0


Build: TypeAlias = Callable[[MicroBenchCell, int], TimedOperation]
"""Makes the operation of one cell, able to run that many times between its setups and its teardowns."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A case at the plan's field `sizes`. `calls` per sample; None: as the stopwatch decides. Where the cost
    of a call depends on the calls before it, only the mean over many in a row is meaningful."""

    case: str
    build: Build
    sizes: str = "sizes"
    calls: int | None = None


Section: TypeAlias = Callable[[MicroBenchPlan, Stopwatch], Iterator[MicroBenchRow]]
"""Measures one section of a benchmark, row by row."""


@dataclass(frozen=True, slots=True)
class MicroBenchmark:
    """A benchmark and its sections by letter, which are those of the peers' harness. `names` gives the
    variants; `check` raises `UnknownNameError` for another name. `tables`: of sections whose rows have a
    table of their own."""

    name: str
    names: Callable[[], Sequence[str]]
    check: Callable[[str], object]
    sections: dict[str, Section]
    tables: Mapping[str, Callable[[Sequence[MicroBenchRow]], Table]] = field(default_factory=dict)


def timed(letter: str, *recipes: Recipe) -> Section:
    """Returns a section that times each recipe at all its sizes, by implementation."""

    def section(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
        for variant in plan.variants:
            for recipe in recipes:
                for size in getattr(plan, recipe.sizes):
                    prepare = partial(recipe.build, MicroBenchCell(plan, variant, size))
                    timing = stopwatch.time(prepare, calls=recipe.calls)
                    yield MicroBenchRow(letter, recipe.case, size, variant, "us", timing.cpu.median, timing)

    return section
