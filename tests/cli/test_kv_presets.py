"""`--kv-preset` and `sagellm config presets`: each preset is valid, and everything explicit wins over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sagellm.core.config import PRESETS
from sagellm.core.errors import ConfigError
from sagellm.engines.build import load_config
from sagellm.engines.config_file import KV_PRESETS_FILE, kv_presets

NAMES = list(kv_presets())


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_valid(name: str) -> None:
    preset = kv_presets()[name]
    needs_folder = "kv.disk_gb" in preset.keys
    assert needs_folder == ("needs --kv-dir" in preset.meaning)
    given = {"kv.dir": "/var/cache/kv"} if needs_folder else {}
    resolved = load_config(kv_preset=name, cli=given, environ={})
    for key, value in preset.keys.items():
        assert key.startswith("kv.")
        assert resolved.config.flat()[key] == value
        assert resolved.origins[key] == f"KV preset {name}"
    if needs_folder:
        with pytest.raises(ConfigError, match=r"set kv\.dir"):
            load_config(kv_preset=name, environ={})


def test_every_line_of_a_preset_has_its_reason() -> None:
    entries = KV_PRESETS_FILE.read_text(encoding="utf-8").split("\n\n")
    assert len(entries) >= len(NAMES)
    assert all("#" in entry for entry in entries)


def test_everything_explicit_wins(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("kv: {disk_gb: 7}")
    resolved = load_config(
        file,
        preset="laptop",
        kv_preset="server-with-nvme",
        cli={"kv.dir": str(tmp_path)},
        environ={"SAGELLM_KV_HOST_GB": "3"},
    )
    kv = resolved.config.kv
    assert (kv.host_gb, kv.disk_gb, kv.codec, kv.memory_fraction) == (3, 7, "raw", 0.15)
    shown = cli("config", "show", "--origin", "--kv-preset", "host-only", "--kv-host-gb", "5").output
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert lines["kv.host_gb"].split()[1:] == ["5.0", "command", "line"]
    assert lines["kv.memory_fraction"].split()[1:] == ["0.15", "KV", "preset", "host-only"]


def test_an_unknown_name_lists_the_known(cli: Any) -> None:
    result = cli("serve", "--kv-preset", "lap-top")
    assert result.exit_code == 2
    assert f"Known: {', '.join(NAMES)}" in result.output


def test_the_list(cli: Any) -> None:
    text = cli("config", "presets").output
    for name in (*PRESETS, *NAMES):
        assert f"preset {name}" in text
    assert "kv.host_gb = 16" in text
