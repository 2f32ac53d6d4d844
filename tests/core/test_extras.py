"""The command that installs an extra: it has to work where it is shown."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sagellm.core import extras
from sagellm.core.errors import MissingExtraError


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the package lay in a folder of installed packages."""
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "lib" / "site" / "sagellm" / "core" / "extras.py"))
    return tmp_path


def recorded(monkeypatch: pytest.MonkeyPatch, url: str | None) -> None:
    text = None if url is None else json.dumps({"url": url, "dir_info": {}})
    monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))


def test_in_a_clone_the_clone_is_named() -> None:
    clone = Path(__file__).resolve().parents[2]
    assert extras.install_command("native") == f"pip install -e '{clone}[native]'"


def test_installed_from_a_folder_the_folder_is_named(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = installed / "my clone"
    clone.mkdir()
    recorded(monkeypatch, clone.as_uri())
    assert extras.install_command("serve") == f"pip install '{clone}[serve]'"


def test_installed_from_a_wheel_the_wheel_is_named(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = installed / "sagellm.whl"
    wheel.touch()
    recorded(monkeypatch, wheel.as_uri())
    assert extras.install_command("serve") == f"pip install 'sagellm[serve] @ {wheel.as_uri()}'"


@pytest.mark.parametrize("url", [None, "file:///gone", "https://example.org/sagellm.whl"])
def test_otherwise_a_clone_is_needed(
    installed: Path, monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    recorded(monkeypatch, url)
    assert str(MissingExtraError("the HTTP server", "serve")).endswith(
        "pip install '.[serve]' in a clone of sageLLM"
    )


def test_without_any_record_a_clone_is_needed(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", unknown)
    assert extras.install_command() == "pip install . in a clone of sageLLM"
