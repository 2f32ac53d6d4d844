"""All commands of `sagellm`. A command imports heavy packages only when it runs."""

from __future__ import annotations

import platform

import typer

from sagellm import __version__
from sagellm.cli import (
    bench,
    cache,
    calibrate,
    chat,
    config,
    doctor,
    explain,
    fleet,
    models,
    overlap,
    replay,
    run,
    serve,
    simulate,
    topo,
    trace,
    verify,
    vllm,
    watch,
)
from sagellm.cli._options import App

app = App(
    name="sagellm",
    help="A modular LLM inference engine. Without -m MODEL, commands use the demo model that comes with it.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version() -> None:
    """Print the versions of sageLLM and Python."""
    print(f"sagellm {__version__} (Python {platform.python_version()})")


app.add(run.run, chat.chat, serve.serve, models.pull, models.models, doctor.doctor)
app.add(topo.topo)
app.add(watch.watch)
app.add(replay.replay, simulate.simulate, calibrate.calibrate, overlap.overlap, explain.explain, version)
app.add(verify.verify)
app.add_typer(bench.app, name="bench")
app.add_typer(cache.app, name="cache")
app.add_typer(fleet.app, name="fleet")
app.add_typer(trace.app, name="trace")
app.add_typer(config.app, name="config")
app.add_typer(vllm.app, name="vllm")


def _show_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _root(
    *,
    show_version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    """Options before the command."""
