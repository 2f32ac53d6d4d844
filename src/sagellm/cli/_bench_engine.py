"""`sagellm bench engine`: a whole engine on fixed workloads, alone or beside other engines' rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sagellm.cli._bench_output import Output
from sagellm.cli._options import ModelOption, command
from sagellm.cli._settings import Settings
from sagellm.core.errors import ConfigError

if TYPE_CHECKING:
    from sagellm.benchmarks.engine.run import EngineBenchReport
    from sagellm.benchmarks.engine.shapes import Shape
    from sagellm.core.config import Config

_ONLY_HELP = (
    "Only these workloads, as a,b; prefill and decode mean all sizes of one; default: all but throughput."
)


@command
def engine(
    model: ModelOption = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Random weights instead of a model: S (184 M), M (596 M), 8B, tiny."
        ),
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="NAMES", help=_ONLY_HELP)] = None,
    repeats: Annotated[int, typer.Option(metavar="N", help="Times that each workload runs.")] = 3,
    compare: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Rows of the peers' harness to stand beside; may be repeated."),
    ] = None,
    *,
    settings: Settings,
    output: Output,
) -> None:
    """Measure the engine: prefill, decode by batch, offline throughput, conversations, long context, cold
    start.

    Every core is used unless --threads says otherwise. "others" is the share of the machine that other
    processes took meanwhile: where it is not near 0, compare nothing.
    """
    from sagellm.benchmarks.engine.peer_rows import read_peers
    from sagellm.benchmarks.engine.run import EngineBenchPlan, EngineBenchReport, run
    from sagellm.benchmarks.engine.workloads import chosen_names
    from sagellm.benchmarks.reporting import environment

    names = chosen_names([word.strip() for word in only.split(",")] if only is not None else [])
    random_shape, label = _model_or_shape(model, shape)
    config = _configured(settings, model)
    peers = read_peers(compare or [], label, EngineBenchPlan(config, label, names, repeats).threads)
    output.check()
    with Console(stderr=True).status("") as status, _model_there(random_shape, config) as there:
        report = EngineBenchReport(
            EngineBenchPlan(there, label, names, repeats), environment(datetime.now(UTC)), peers
        )
        try:
            run(report, on_run=status.update)
        finally:
            status.stop()
            _show(report, output)
    if only is not None and report.left_out:
        [(name, reason), *_] = report.left_out.items()
        raise ConfigError(f"{name} {reason}")


def _model_or_shape(model: str | None, shape: str | None) -> tuple[Shape | None, str]:
    """The shape, if one is asked for, and the model's name in rows."""
    from sagellm.benchmarks.engine.shapes import shape_named
    from sagellm.engines.build import DEMO_NAME

    if shape is None:
        return None, Path(model).name if model else DEMO_NAME
    if model is not None:
        raise ConfigError("--shape makes a model of random weights: leave out --model, or --shape")
    return shape_named(shape), shape_named(shape).label


@contextmanager
def _model_there(shape: Shape | None, config: Config) -> Iterator[Config]:
    """The configuration of a model that is there; random weights are gone afterwards."""
    from sagellm.benchmarks.engine.shapes import write_model

    if shape is None:
        yield config
        return
    with TemporaryDirectory(prefix="sagellm-bench-") as folder:
        write_model(shape, Path(folder))
        yield config.model_copy(update={"model": config.model.model_copy(update={"name": folder})})


def _configured(settings: Settings, model: str | None) -> Config:
    """The configuration, with every core where nobody chose a number of threads."""
    from sagellm.core.cores import usable_cores

    config = settings.load(model=model).config
    if config.engine.threads is not None:
        return config
    return config.model_copy(update={"engine": config.engine.model_copy(update={"threads": usable_cores()})})


def _show(report: EngineBenchReport, output: Output) -> None:
    from sagellm.benchmarks.engine.run import tables

    if not report.measured:
        return
    output.show(tables(report), report.as_json())
    for name, reason in report.left_out.items():
        print(f"left out: {name} {reason}")
