"""The command as a whole: help, version, a real process, and `serve`'s wiring."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import sagellm
from sagellm import serving
from sagellm.cli import serve
from sagellm.core.ports import SagePorts

COMMANDS = ("run", "chat", "serve", "doctor", "config", "version")


def test_help_lists_every_command(cli: Any) -> None:
    result = cli("--help")
    assert result.exit_code == 0
    assert all(f"  {name} " in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(cli: Any, name: str) -> None:
    assert cli(name, "--help").exit_code == 0


def test_version(cli: Any) -> None:
    assert cli("version").stdout.startswith(f"sagellm {sagellm.__version__} (Python 3.")
    assert cli("--version").stdout == cli("version").stdout


def test_an_unknown_option_is_refused(cli: Any) -> None:
    assert cli("run", "x", "--temprature", "1").exit_code == 2


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SAGELLM_")}
    return subprocess.run(
        [sys.executable, "-m", "sagellm", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**clean, **environment},
        check=False,
    )


def test_a_real_process_shows_its_configuration() -> None:
    done = process("config", "show", "--origin", SAGELLM_KV_BLOCK_SIZE="64")
    assert done.returncode == 0, done.stderr
    lines = [line.split(None, 2) for line in done.stdout.splitlines()]
    assert ["kv.block_size", "64", "environment SAGELLM_KV_BLOCK_SIZE"] in lines


def test_a_real_process_explains_its_errors() -> None:
    done = process("config", "show", SAGELLM_KV_BLOKSIZE="64")
    assert done.returncode == 2
    assert done.stderr.startswith("sagellm: unknown environment variable SAGELLM_KV_BLOKSIZE. Did you mean")
    assert done.stderr.count("\n") == 1


def test_serve_hands_over_what_is_configured(cli: Any, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(serving, "serve", lambda llm, **options: served.append((llm, options)))
    result = cli(
        "serve", "some/folder", "--host", "0.0.0.0", "--api-key", "k", "--set", "server.max_waiting=5"
    )
    assert result.exit_code == 0, result.stderr
    options = {
        "host": "0.0.0.0",
        "port": int(SagePorts.HTTP),
        "log_level": "info",
        "api_key": "k",
        "max_waiting": 5,
    }
    assert served == [(made[0], options)]
    assert made[0].config.model.name == "some/folder"


def test_serve_without_its_packages_names_the_extra(
    cli: Any, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    result = cli("serve")
    assert result.exit_code == 2
    assert "pip install 'sagellm[serve]'" in result.stderr
    assert not made
