"""`sagellm fleet`: the instances behind a running server."""

from __future__ import annotations

from sagellm.cli._options import App
from sagellm.cli.fleet_chips import chips
from sagellm.cli.fleet_manifests import manifests

app = App(help="The instances behind a running server.")


@app.callback()
def _group() -> None:
    """The instances behind a running server."""


app.add(chips, manifests)
