"""`sagellm fleet`: the instances behind a running server."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import httpx2

from sagellm.benchmarks.reporting import Table, print_tables
from sagellm.cli._options import App, argument, command, flag
from sagellm.cli.cache_server import DEFAULT_URL, base_url, refusal
from sagellm.cli.fleet_chips import chips
from sagellm.cli.fleet_manifests import manifests
from sagellm.core.config_layers import env_name
from sagellm.core.errors import ConfigError

OPERATION_S, STATUS_S = 3600.0, 10.0
_URL = flag("--url URL", f"The server; default: {DEFAULT_URL}.")
_KEY = flag("--admin-key KEY", "Its admin key, or an API key for status; default: SAGELLM_SERVER_ADMIN_KEY.")
_JSON = flag("--json", "Print JSON.", False)
_NAME = argument("INSTANCE", "Its name in `status`.", ...)


@command
def status(url: str | None = _URL, key: str | None = _KEY, as_json: bool = _JSON) -> None:
    """Show each instance: its state, load and faults."""
    key = key or os.environ.get(env_name("server.api_key"))
    _show(ask("GET", url, "/v1/fleet", key, timeout_s=STATUS_S), as_json=as_json)


@command
def drain(
    name: str = _NAME,
    url: str | None = _URL,
    key: str | None = _KEY,
    as_json: bool = _JSON,
) -> None:
    """Give an instance no new requests, and wait until it has none."""
    _show(ask("POST", url, "/v1/admin/fleet/drain", key, {"name": name}), as_json=as_json)


@command
def resume(
    name: str = _NAME,
    url: str | None = _URL,
    key: str | None = _KEY,
    as_json: bool = _JSON,
) -> None:
    """Give a drained instance requests again."""
    _show(ask("POST", url, "/v1/admin/fleet/resume", key, {"name": name}), as_json=as_json)


@command
def restart(
    name: str | None = argument("[INSTANCE]", "Its name in `status`; default: each in turn."),
    url: str | None = _URL,
    key: str | None = _KEY,
    as_json: bool = _JSON,
) -> None:
    """Drain an instance and start it again; no request is lost."""
    body = {} if name is None else {"name": name}
    _show(ask("POST", url, "/v1/admin/fleet/restart", key, body), as_json=as_json)


@command
def scale(
    group: str = argument("GROUP", "A group of the fleet file, or prefill, decode.", ...),
    count: int = argument("COUNT", "How many instances it has then.", ..., min=0),
    url: str | None = _URL,
    key: str | None = _KEY,
    as_json: bool = _JSON,
) -> None:
    """Start instances of a group, or drain and end some."""
    body = {"group": group, "count": count}
    _show(ask("POST", url, "/v1/admin/fleet/scale", key, body), as_json=as_json)


@command
def switch(
    name: str = _NAME,
    to: str = flag("--to TYPE", "general, prefilling, decoding or hybrid.", ...),
    url: str | None = _URL,
    key: str | None = _KEY,
    as_json: bool = _JSON,
) -> None:
    """Change what an instance serves; no request is lost."""
    _show(ask("POST", url, "/v1/admin/fleet/switch", key, {"name": name, "type": to}), as_json=as_json)


app = App(help="The instances behind a running server.")
app.add(status, drain, resume, restart, scale, switch, chips, manifests)


class NotServingError(ConfigError):
    """The server is there and does not serve yet."""


def ask(
    method: str,
    url: str | None,
    path: str,
    key: str | None,
    body: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = OPERATION_S,
) -> dict[str, Any]:
    """The answer of the server. Raises `ConfigError` with what it says."""
    address, key = base_url(url) + path, key or os.environ.get(env_name("server.admin_key"))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx2.request(method, address, json=body, headers=headers, timeout=timeout_s)
    except httpx2.ReadTimeout as error:
        raise NotServingError(
            f"{address} has not answered within {timeout_s:g} s: its processes start, or are stopped"
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ConfigError(f"no sageLLM server answers at {address}: {error}; name it with --url") from error
    if answer.status_code == 503:
        raise NotServingError(f"{address}: {refusal(answer)}")
    if answer.status_code != 200:
        raise ConfigError(f"{address}: {refusal(answer)}")
    try:
        found: dict[str, Any] = answer.json()
    except ValueError:
        raise ConfigError(f"{address} answers what is no JSON: is this a sageLLM server?") from None
    return found


def _show(status: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(status, indent=2))
        return
    from sagellm.diagnostics.watch.fleet import fleet_lines, fleet_table

    print_tables([fleet_table(status)])
    if status["quotas"]:
        names = ("name", "num_requests", "num_waiting", "num_refused")
        quotas = [tuple(str(each[name]) for name in names) for each in status["quotas"]]
        columns = ("tenant", "requests", "wait for its quota", "refused")
        print_tables([Table("Quotas", columns, quotas, num_names=1)])
    for line in fleet_lines(status):
        print(line)
