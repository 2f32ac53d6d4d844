"""All commands of `sagellm`. A command imports heavy packages only when it runs."""

from __future__ import annotations

import platform
from typing import Annotated

import typer

from sagellm import __version__
from sagellm.cli import (
    bench,
    calibrate,
    chat,
    config,
    doctor,
    explain,
    models,
    replay,
    run,
    serve,
    simulate,
    trace,
)
from sagellm.cli._options import App, flag

app = App(
    name="sagellm",
    help="A modular LLM inference engine. Without -m MODEL, commands use the demo model that comes with it.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("pull")(models.pull)
app.command("models")(models.models)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")
app.command("replay")(replay.replay)
app.command("simulate")(simulate.simulate)
app.command("calibrate")(calibrate.calibrate)
app.command("explain")(explain.explain)
app.add_typer(trace.app, name="trace")
app.add_typer(config.app, name="config")


@app.command("version")
def version() -> None:
    """Print the versions of sageLLM and Python."""
    print(f"sagellm {__version__} (Python {platform.python_version()})")


def _show_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _root(
    *,
    show_version: Annotated[
        bool,
        flag("--version", "Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Options before the command."""
