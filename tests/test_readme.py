"""What the README tells a newcomer to type."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from sagellm.core.ports import SagePorts

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
CLIENT, LIBRARY = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_client_example_needs_no_package_of_ours() -> None:
    imported = {node.module for node in ast.walk(ast.parse(CLIENT)) if isinstance(node, ast.ImportFrom)}
    assert imported == {"openai"}
    assert f"http://localhost:{SagePorts.HTTP}/v1" in CLIENT


def test_curl_asks_the_default_port() -> None:
    assert f"curl http://localhost:{SagePorts.HTTP}/v1/chat/completions" in README


def test_the_library_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(LIBRARY, "README.md", "exec"), {})
    assert "42" in capsys.readouterr().out
