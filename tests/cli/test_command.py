"""The command as a whole: help, version, a real process, and `serve`'s wiring."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest

import sagellm
from sagellm import serving
from sagellm.cli import serve
from sagellm.core.config import ServerConfig
from sagellm.core.extras import install_command

COMMANDS = ("run", "chat", "serve", "doctor", "config", "version")
WITH_MODEL = [("run", "hi"), ("chat",), ("serve", "--port", "0")]


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


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("--temp", "--temperature"),
        ("--max-token", "--max-tokens"),
        ("--top", "--top-k, --top-p"),
        ("--modle", "--model"),
    ],
)
def test_an_unknown_option_offers_the_nearest(cli: Any, typed: str, offered: str) -> None:
    assert f"No such option: {typed} (Possible options: {offered})" in cli("run", "x", typed, "1").stderr


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (("nosuch",), "Known: run, chat, serve"),
        (("bench", "nosuch"), "Known: engine, fairness, http"),
        (("bench", "micro", "nosuch"), "Known: prefix_cache, kv_pool, scheduler_ir, eviction, fusion"),
        (("bench", "micro", "fuson"), "Did you mean 'fusion'?"),
    ],
)
def test_an_unknown_command_offers_the_nearest_or_all(cli: Any, typed: tuple[str, ...], offered: str) -> None:
    assert f"No such command {typed[-1]!r}. {offered}" in cli(*typed).stderr


def test_an_option_like_none_offers_none(cli: Any) -> None:
    assert cli("run", "x", "--zzz").stderr.endswith("No such option: --zzz\n")


@pytest.mark.parametrize("group", [(), ("bench",), ("bench", "micro"), ("trace",), ("config",)])
def test_summaries_of_commands_are_whole_sentences(
    cli: Any, monkeypatch: pytest.MonkeyPatch, group: tuple[str, ...]
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    _, _, listed = cli(*group, "--help").stdout.partition("Commands:\n")
    assert listed.rstrip().endswith(".")
    assert "..." not in listed


@pytest.mark.parametrize("arguments", WITH_MODEL, ids=" ".join)
def test_every_command_takes_the_model_as_an_option(
    cli: Any, made: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(serving, "serve", lambda llm, server, **options: None)
    for flag in ("-m", "--model"):
        assert cli(*arguments, flag, "some/folder", stdin="").exit_code == 0
    assert [llm.config.model.name for llm in made] == ["some/folder"] * 2


@pytest.mark.parametrize("command", ["serve", "chat", "doctor"])
def test_two_models_are_refused(cli: Any, made: Any, command: str) -> None:
    result = cli(command, "a/b", "-m", "c/d")
    assert (result.exit_code, result.stderr) == (2, "sagellm: two models, a/b and c/d: name one\n")
    assert not made


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("run --preset lap", ["laptop"]),
        ("serve --quant ", ["none", "int8", "int4"]),
        ("chat --set kv.num_b", ["kv.num_blocks="]),
        ("run --log-level de", ["debug"]),
    ],
)
def test_the_shell_completes_values(typed: str, offered: list[str]) -> None:
    words = f"sagellm {typed}"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_SAGELLM_COMPLETE": "complete_bash"}
    assert process(**asked).stdout.split() == offered


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
    done = process("config", "show", SAGELLM_KV_BLOCK_SIZE="sixteen")
    assert done.returncode == 2
    assert done.stderr.startswith("sagellm: kv.block_size = 'sixteen' (environment SAGELLM_KV_BLOCK_SIZE)")
    assert done.stderr.count("\n") == 1


def test_a_real_process_starts_in_a_pod_beside_a_service_of_its_name() -> None:
    done = process("config", "show", SAGELLM_PORT="tcp://10.0.0.11:8000", SAGELLM_SERVICE_HOST="10.0.0.11")
    assert (done.returncode, done.stderr) == (0, "")
    done = process("config", "show", SAGELLM_KV_BLOKSIZE="64")
    assert done.returncode == 0
    assert "SAGELLM_KV_BLOKSIZE is ignored. Did you mean 'SAGELLM_KV_BLOCK_SIZE'?" in done.stderr


def test_serve_hands_over_what_is_configured(cli: Any, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[Any, ServerConfig, dict[str, Any]]] = []
    monkeypatch.setattr(
        serving, "serve", lambda llm, server, **options: served.append((llm, server, options))
    )
    settings = [
        "server.max_waiting=5",
        "server.max_body_bytes=2048",
        "server.cors_origins=http://a,http://b:80",
        "server.max_n=3",
        'server.client_keys={"ann": "a key"}',
    ]
    given = [part for one in settings for part in ("--set", one)]
    result = cli("serve", "some/folder", "--host", "0.0.0.0", "--port", "0", "--api-key", "k", *given)
    assert result.exit_code == 0, result.stderr
    [(llm, server, options)] = served
    assert isinstance(options.pop("listener"), socket.socket)
    expected = {"log_level": "info", "log_format": "text", "log_requests": True}
    assert {name: options[name] for name in expected} == expected
    assert server == ServerConfig(
        host="0.0.0.0",
        port=0,
        api_key="k",
        client_keys={"ann": "a key"},
        max_n=3,
        cors_origins=("http://a", "http://b:80"),
        max_waiting=5,
        max_body_bytes=2048,
    )
    assert (server.admin_key, server.body_timeout_s, server.shutdown_grace_s) == (None, 60.0, 20.0)
    assert llm is made[0]
    assert made[0].config.model.name == "some/folder"


@pytest.mark.parametrize("host", ["127.0.0.1", "no such host"])
def test_serve_has_its_address_before_it_loads(cli: Any, made: Any, host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = cli("serve", "--host", host, "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"sagellm: cannot listen on {host}:")
    assert result.stderr.count("\n") == 1
    assert not made


@pytest.mark.parametrize("options", [["--api-key", ""], ["--set", "server.api_key="]])
def test_an_empty_key_starts_no_open_server(cli: Any, made: Any, options: list[str]) -> None:
    result = cli("serve", "--port", "0", *options)
    assert result.exit_code == 2
    assert "server.api_key in command line is empty" in result.stderr
    assert not made


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "a\udcff"],
        ["run", "x", "--stop", "\udcff"],
        ["serve", "\udcff"],
        ["config", "show", "-m", "\udcff"],
    ],
)
def test_an_argument_that_is_no_text_is_one_line(cli: Any, made: Any, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert result.stderr.endswith("is not UTF-8 text\n")
    assert result.stderr.count("\n") == 1
    assert not made


def test_serve_without_its_packages_names_the_extra(
    cli: Any, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    result = cli("serve")
    assert result.exit_code == 2
    assert install_command("serve") in result.stderr
    assert not made
