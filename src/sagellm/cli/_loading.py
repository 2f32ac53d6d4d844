"""Loads a model, with a progress bar and times in the log."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.events import EventBus, StepDone
from sagellm.core.log_lines import set_up_logging

if TYPE_CHECKING:
    from sagellm.core.config import Config
    from sagellm.engines.llm import LLM

PROCESS_STAT = Path("/proc/self/stat")
log = logging.getLogger("sagellm.start")


def load_llm(
    config: Config,
    events: EventBus | None = None,
    *,
    log_level: int = logging.DEBUG,
    clock: Clock | None = None,
) -> LLM:
    """The configured model, ready to answer. Raises as `build_llm`.

    Logs the time of the start, and later that of the first step, at `log_level`.
    """
    from sagellm.engines.build import build_llm, located

    set_up_logging(config.log.level, config.log.format)
    clock, events, name = clock or MonotonicClock(), events or EventBus(), config.model.name
    config = located(config)  # before our progress bar, since the hub's client shows its own
    began_s = clock.now()
    readings: list[tuple[float, int]] = []  # time and bytes of weights read so far
    terminal = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        task = bar.add_task(f"loading {name or 'the demo model'}", total=None)

        def listen(done: int, total: int) -> None:
            readings.append((clock.now(), done))
            bar.update(task, completed=done, total=total)

        llm = build_llm(config, events=events, progress=listen)
    took = f"loaded in {clock.now() - began_s:.2f} s"
    if readings:
        (first_s, _), (last_s, num_bytes) = readings[0], readings[-1]
        took += f", of which {last_s - first_s:.2f} s for {as_text(num_bytes)} of weights"
    age_s = _process_age_s()
    log.log(log_level, took if age_s is None else f"{took}; {age_s:.2f} s after the start of the process")
    if not log.isEnabledFor(log_level):
        return llm

    def log_first(step: StepDone) -> None:
        if step.num_prefill_tokens or step.num_decode_tokens:
            unsubscribe()
            tokens = f"{step.num_prefill_tokens} tokens of prompts"
            log.log(log_level, f"the first step, with {tokens}, took {step.duration_s:.2f} s")

    unsubscribe = events.subscribe(StepDone, log_first)
    return llm


def _process_age_s() -> float | None:
    """Seconds since the start of this process; None where the system does not say."""
    if not PROCESS_STAT.exists() or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    fields = PROCESS_STAT.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def as_text(num_bytes: int) -> str:
    """Bytes in the unit that keeps one to three digits before the point."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
