"""`sagellm verify`: exit status, what it writes, and a server that is restarted."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sagellm.diagnostics.verify import PRESETS, Preset
from tests.diagnostics.verify.fake_server import FakeServer
from tests.serving.live import free_port, wait_until
from tests.serving.test_lifecycle import answers

QUICK = Preset(budget_s=10.0, long_tokens=128, max_rounds=1, repeats=4, churn_share=0.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "minute", QUICK)


def test_a_clean_server_ends_with_0(cli: Any, tmp_path: Path) -> None:
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    with FakeServer().running() as fake:
        result = cli("verify", f"{fake.url}/v1/", "--html", str(page), "--json", str(data))
    assert result.exit_code == 0, result.output
    assert "clean: " in result.output
    assert json.loads(data.read_text())["outcome"] == "clean"
    assert "No finding" in page.read_text()


def test_findings_end_with_1(cli: Any) -> None:
    with FakeServer(corrupt=1.0).running() as fake:
        result = cli("verify", fake.url, "--json", "-")
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["findings"][0]["evidence"]["cold"]


REFUSED = {
    "nothing listens": (["http://127.0.0.1:9"], "127.0.0.1:9"),
    "no URL": (["localhost"], "write http://"),
    "no such preset": (["http://127.0.0.1:9", "--preset", "day"], "minute, hour"),
    "no folder": (["http://127.0.0.1:9", "--html", "/nonexistent/x.html"], "in a folder that exists"),
    "a folder": (["http://127.0.0.1:9", "--html", "/"], "cannot write /: name a file"),
    "a key that no header holds": (["http://127.0.0.1:9", "--api-key", "ключ"], "the API key"),
    "none at once": (["http://127.0.0.1:9", "--concurrency", "0"], "1 to 256"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_tested_ends_with_2(cli: Any, arguments: list[str], message: str) -> None:
    result = cli("verify", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("corrupt", [0.0, 1.0])
def test_what_a_restart_breaks_is_found(cli: Any, corrupt: float) -> None:
    with FakeServer(corrupt_after_restart=corrupt).running() as fake:
        get = f"import urllib.request as r; r.urlopen('{fake.url}/restart')"
        result = cli("verify", fake.url, "--restart-command", f'{sys.executable} -c "{get}"')
    assert ("FINDING restart" in result.output) is (corrupt > 0), result.output
    assert result.exit_code == (1 if corrupt else 0)


def test_a_restart_command_that_fails_is_no_clean_run(cli: Any) -> None:
    with FakeServer().running() as fake:
        result = cli("verify", fake.url, "--restart-command", "exit 7")
    assert result.exit_code == 2
    assert "status 7" in result.output


RESTART = """
import os, signal, subprocess, sys
pid_file, *server = sys.argv[1:]
if os.path.exists(pid_file):
    os.kill(int(open(pid_file).read()), signal.SIGKILL)
process = subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
open(pid_file, "w").write(str(process.pid))
"""


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_is_clean(cli: Any, tmp_path: Path) -> None:
    port, pid_file = free_port(), tmp_path / "pid"
    serve = [sys.executable, "-m", "sagellm", "serve", "--port", str(port)]
    restart = [sys.executable, "-c", RESTART, str(pid_file), *serve]
    subprocess.run(restart, check=True)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/ready"))
        result = cli("verify", f"http://127.0.0.1:{port}", "--restart-command", shlex.join(restart))
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert result.exit_code == 0, result.output
    row = next(line.split() for line in result.output.splitlines() if line.split()[:1] == ["restart"])
    assert row[1:3] == ["8", "8"]
